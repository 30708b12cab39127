"""``import kvsan`` offers the public names, and imports a module only when one of its names is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsan

HEAVY = ("cupy", "hypothesis", "islpy", "numpy", "torch", "transformers", "triton")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "qwen3.8-flash-next" / "config.json"
SHOW_MODULES = "; import sys; print('loaded:', *sorted(m for m in sys.modules if '.' not in m))"
RUN_CHECK = """
import runpy, sys
sys.argv = ["kvsan", "check", {config!r}, "--json"]
try:
    runpy.run_module("kvsan", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print()
print("loaded:", *sorted(m for m in sys.modules if "." not in m))
"""


def _loaded_by(code: str) -> set[str]:
    """Return the top-level modules that are loaded once ``code`` has run in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


@pytest.mark.parametrize("name", kvsan.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(kvsan, name) is not None
    assert name in dir(kvsan)


def test_every_lazy_name_is_public() -> None:
    assert {*kvsan._HOMES, "__version__"} == set(kvsan.__all__)


@given(name=st.from_regex(r"[a-z][a-z_]{0,20}", fullmatch=True).filter(lambda name: name not in dir(kvsan)))
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"^module 'kvsan' has no attribute '{name}'$"):
        getattr(kvsan, name)


def test_importing_kvsan_imports_nothing_heavy() -> None:
    loaded = _loaded_by("import kvsan" + SHOW_MODULES)
    assert "kvsan" in loaded
    assert sorted(loaded.intersection(HEAVY)) == []


def test_checking_a_model_imports_only_what_it_needs() -> None:
    loaded = _loaded_by(RUN_CHECK.format(config=str(EXAMPLE)))
    assert "kvsan" in loaded
    assert sorted(loaded.intersection(HEAVY) - {"numpy"}) == []
