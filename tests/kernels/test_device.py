"""Opening a device: which mode Triton is in is found out, whoever imported it first."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from kvsan.kernels.device import require_interpreter
from kvsan.model.errors import SpecError

OPEN = "from kvsan.kernels.device import open_device\nprint(open_device('cpu').kind)\n"


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(entry or "." for entry in sys.path)
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@needs_triton
def test_the_interpreter_is_chosen_without_help() -> None:
    assert run_python(OPEN).stdout == "cpu\n"


@needs_triton
def test_triton_imported_for_compiling_is_found_out() -> None:
    """Its own functions stay as they were decorated; a kernel that calls one would fail far from here."""
    ran = run_python("import triton\n" + OPEN)
    assert ran.returncode == 1
    assert "device: found Triton imported without TRITON_INTERPRET=1 before cpu was opened" in ran.stderr


@pytest.mark.parametrize(
    ("triton", "numpy", "fits"),
    [
        ("3.6.0", "2.4.6", False),
        ("3.6.0", "2.3.5", True),
        ("3.7.0", "2.4.0", True),
        ("3.9.0", "2.4.6", True),
        ("3.0.0", "3.0.0rc1", False),
        ("main", "1.26.4", True),
    ],
)
def test_versions_that_do_not_go_together_are_one_line(triton: str, numpy: str, fits: bool) -> None:
    """Each row but the last two was tried: the interpreter of 3.6 fails on NumPy 2.4 in the first loop."""
    if fits:
        require_interpreter(triton, numpy)
        return
    with pytest.raises(SpecError, match=r"pip install 'triton>=3.7', or 'numpy<2.4'"):
        require_interpreter(triton, numpy)
