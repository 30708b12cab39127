"""The running caches by allocator: whose layout, and which manager's rules.

``trtllm-v1`` keeps block managers by attention window and swaps memory with the host; every other allocator is run by
V2's rules, slots per life cycle. ``fault:NAME`` is a faulty cache of ``faulty`` over its base's layout, or, for a fault
of the layout, the rules of its base over a faulty layout. An installed engine runs a manager of its own.
"""

from __future__ import annotations

import functools
from typing import Any, Final, cast

from ...model.errors import SpecError
from ...model.spec import CacheSpec
from ..allocators.faulty import base_of
from ..registry import Allocator, allocate, is_installed, resolve
from .cache import Rules, RunningCache
from .faulty import faulty_cache, faulty_entry
from .geometry import Geometry, geometry_of
from .names import layout_allocator
from .trace import COMMON_KINDS, KINDS, Kind

V1: Final = Rules("trtllm-v1", recycle_first=False, swaps_memory=True, stores_on_free=True, suspends=False)
V2: Final = Rules("trtllm-v2", recycle_first=True, swaps_memory=False, stores_on_free=False, suspends=True)


ENGINE_KINDS: Final[tuple[Kind, ...]] = ("admit", "extend", "step", "complete", "free", "suspend", "resume")
"""The operations of an installed engine's cache manager: the others are its scheduler's, or nobody's."""


def kinds_of(allocator: str) -> tuple[Kind, ...]:
    """Return the operations that traces of an allocator are made of."""
    if is_installed(allocator):
        return ENGINE_KINDS
    return KINDS if rules_of(allocator).suspends else COMMON_KINDS  # type: ignore[return-value]


def rules_of(allocator: str) -> Rules:
    """Return the rules that run the cache of an allocator."""
    return V1 if base_of(layout_allocator(allocator)) == "trtllm-v1" else V2


@functools.lru_cache(maxsize=256)
def _geometry(spec: CacheSpec, allocator: str) -> Geometry:
    return geometry_of(allocate(spec, resolve(allocator)))


def running_cache(spec: CacheSpec, allocator: str | Allocator, *, record: bool = False) -> RunningCache:
    """Return an empty cache of ``allocator`` for ``spec``.

    Raises ``Rejected`` where the allocator refuses the spec, and ``SpecError`` where traces cannot run on the layout.
    """
    if isinstance(allocator, str) and is_installed(allocator):
        if record:
            raise SpecError("allocator", f"a trace over {allocator} moves no bytes that could be recorded")
        return cast(RunningCache, cast(Any, resolve(allocator)).running_cache(spec))  # it has the face of one
    if not isinstance(allocator, str):
        return RunningCache(geometry_of(allocate(spec, allocator)), V2, record=record)
    geometry = _geometry(spec, layout_allocator(allocator))
    entry = faulty_entry(allocator)
    build = RunningCache if entry is None else faulty_cache(entry)
    return build(geometry, rules_of(allocator), record=record)
