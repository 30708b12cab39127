"""How often each Triton function was compiled in this process."""

from __future__ import annotations

import sys
from typing import Any


def compiled_variants() -> dict[str, int]:
    """Return the compiled variants of every Triton function that was launched; empty under the interpreter."""
    found: dict[str, int] = {}
    package = __package__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and ".triton_" in name:
            for function in vars(module).values():
                count = _variants(function)
                if count and getattr(function, "__module__", name) == name:
                    found[f"{name.removeprefix(package + '.')}.{function.__name__}"] = count
    return found


def _variants(function: Any) -> int:
    """Return the size of a compiled function's cache over all devices; 0 where it has none."""
    caches = getattr(function, "device_caches", None)
    if not caches:
        return 0
    return sum(len(cache[0] if isinstance(cache, tuple) else cache) for cache in caches.values())
