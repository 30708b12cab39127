"""kvsan: a sanitizer for the KV-cache layouts of LLM inference.

    import kvsan

    spec = kvsan.load("config.json", tp=4, kv_dtype="fp8")
    layout = kvsan.allocate(spec, "trtllm-v2-qsa-packed")
    findings = kvsan.check(layout)

Nothing is imported until it is asked for, so ``import kvsan`` costs next to nothing. The imports are absolute on
purpose: this folder is the root of the repository, and in a clone whose folder is no identifier (``kvsan-main``) pytest
loads this file without a parent package, where a relative import would fail.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsan.model.errors import SpecError
    from kvsan.model.loading import load
    from kvsan.model.spec import CacheSpec
    from kvsan.sim.checking import check
    from kvsan.sim.finding import Finding
    from kvsan.sim.layout import Layout
    from kvsan.sim.registry import allocate
    from kvsan.sim.rejection import Rejected
    from kvsan.sim.tensors.checking import assert_no_alias, check_tensors
    from kvsan.sim.tensors.contract import TensorContract

__version__ = "0.1.0"

__all__ = [
    "CacheSpec",
    "Finding",
    "Layout",
    "Rejected",
    "SpecError",
    "TensorContract",
    "__version__",
    "allocate",
    "assert_no_alias",
    "check",
    "check_tensors",
    "load",
]

_HOMES = {
    "CacheSpec": "kvsan.model.spec",
    "Finding": "kvsan.sim.finding",
    "Layout": "kvsan.sim.layout",
    "Rejected": "kvsan.sim.rejection",
    "SpecError": "kvsan.model.errors",
    "TensorContract": "kvsan.sim.tensors.contract",
    "allocate": "kvsan.sim.registry",
    "assert_no_alias": "kvsan.sim.tensors.checking",
    "check": "kvsan.sim.checking",
    "check_tensors": "kvsan.sim.tensors.checking",
    "load": "kvsan.model.loading",
}

if not TYPE_CHECKING:  # a type checker reads the imports above, and refuses a misspelt name

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
