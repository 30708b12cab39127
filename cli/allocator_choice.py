"""From ``--allocator NAME`` to a function that may be called."""

from __future__ import annotations

import os
import sys
from typing import Final

from ..model.errors import SpecError
from ..model.spec import CacheSpec
from ..sim.layout import Layout
from ..sim.registry import ALLOCATORS, default_allocator, resolve
from ..sim.rejection import Rejected
from .examination import NamedAllocator

AUTO: Final = "auto"
"""The name that stands for the allocator of the manager that the engine would select."""


def choose_allocator(name: str | None, spec: CacheSpec, option: str = "--allocator") -> NamedAllocator:
    """Return the allocator called ``name``, or the default one for ``spec``; raise ``SpecError`` naming ``option``.

    Modules are looked for in the current directory first, as ``python -m`` does.
    """
    if name == AUTO:
        return _selected_allocator(spec, option)
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


def _selected_allocator(spec: CacheSpec, option: str) -> NamedAllocator:
    """Return the allocator of the manager that the engine would select for ``spec``, with its ordinary options.

    Where the engine refuses, the allocator does. Raises ``SpecError`` for a manager that no allocator lays out.
    """
    from ..model.selection import inputs_of, select

    decision = select(inputs_of(spec))
    held = decision.held
    if held is None:
        refusal = decision.refusal

        def refuse(spec: CacheSpec) -> Layout:
            message, remedy = ("", "") if refusal is None else (refusal.message, refusal.remedy)
            raise Rejected(f"the engine selects no cache manager: {message}", remedy, supported=False)

        return NamedAllocator(AUTO, refuse, False)
    if not held.allocator:
        raise SpecError(option, f"the engine would hold the manager {held.name}, which no allocator lays out; name one")
    return choose_allocator(held.allocator, spec, option)


def import_from_here() -> None:
    """Look for modules in the current directory first, as ``python -m`` does."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
