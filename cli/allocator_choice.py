"""From ``--allocator NAME`` to a function that may be called."""

from __future__ import annotations

import os
import sys

from ..model.errors import SpecError
from ..model.spec import CacheSpec
from ..sim.registry import ALLOCATORS, default_allocator, resolve
from .examination import NamedAllocator


def choose_allocator(name: str | None, spec: CacheSpec, option: str = "--allocator") -> NamedAllocator:
    """Return the allocator called ``name``, or the default one for ``spec``; raise ``SpecError`` naming ``option``.

    Modules are looked for in the current directory first, as ``python -m`` does.
    """
    shipped = {entry.name for entry in ALLOCATORS}
    chosen = default_allocator(spec) if name is None else name
    if chosen not in shipped and ":" in chosen and not chosen.startswith("fault:"):
        import_from_here()
    try:
        function = resolve(chosen)
    except SpecError as error:
        raise SpecError(option, error.problem) from None
    engines = {entry.name for entry in ALLOCATORS if entry.kind == "engine"}
    return NamedAllocator(chosen, function, chosen in engines, name is not None)


def import_from_here() -> None:
    """Look for modules in the current directory first, as ``python -m`` does."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
