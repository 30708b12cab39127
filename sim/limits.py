"""``KnownLimit``: a published weakness of an allocator, understood, documented and watched.

A finding inside a known limit is counted, not reported. Each limit has a minimal spec that must still break the rule
(an expected failure): when it passes, the limit is gone and must be deleted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec

from ..model.spec import CacheSpec
from .allocators.faulty import base_of
from .finding import Finding
from .registry import ALLOCATORS, Allocator, resolve
from .verdict import judge

_FAMILIES = ("trtllm", "vllm")
"""Families of allocators with a table of limits: their folder, and how their names begin."""


class KnownLimit(msgspec.Struct, frozen=True):
    """Specs that match ``matches`` may break ``rules`` under ``allocator``; ``anchor`` is where it is explained.

    ``example`` is the canonical JSON of a minimal spec. ``words`` are what the finding's message must contain one of:
    an engine's own error, where the spec alone does not tell one defect from another.
    """

    name: str
    allocators: tuple[str, ...]
    rules: tuple[str, ...]
    matches: Callable[[CacheSpec], bool]
    anchor: str
    example: bytes
    words: tuple[str, ...] = ("",)

    def excuses(self, fault: Finding) -> bool:
        """Whether ``fault``, of a spec that matches, is this weakness."""
        return fault.rule in self.rules and any(word in fault.message for word in self.words)


def limits_of(allocator: str, release: str | None = None) -> tuple[KnownLimit, ...]:
    """Return the known limits of a shipped allocator; a fault has those of its base, foreign allocators none here.

    An installed engine has those of the ledger that its ``release`` was run against (None: ask it which it is).
    """
    if allocator.startswith("fault:"):
        allocator = base_of(allocator)
    family = allocator.partition("-")[0]
    if any(entry.name == allocator and entry.kind == "installed" for entry in ALLOCATORS):
        ledger = importlib.import_module("kvsan.sim.engines.limits")
        installed = cast(Any, resolve(allocator)).release if release is None else release
        return tuple(limit for limit in ledger.LIMITS if allocator in limit.allocators and installed in limit.releases)
    if family not in _FAMILIES or ":" in allocator:
        return ()
    module = importlib.import_module(f"kvsan.sim.allocators.{family}.limits")
    return tuple(limit for limit in module.LIMITS if allocator in limit.allocators)


def excused_by(limits: Iterable[KnownLimit], faults: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return those of ``faults`` that one of ``limits``, all of which match the spec, explains."""
    held = tuple(limits)
    return tuple([fault for fault in faults if any(limit.excuses(fault) for limit in held)])


def faults_outside_limits(
    spec: CacheSpec, allocator: Allocator, limits: tuple[KnownLimit, ...]
) -> tuple[list[Finding], int, bool]:
    """Return an allocator's faults on ``spec`` outside its known limits, the number inside, and whether it refused."""
    verdict = judge(spec, allocator)
    faults = verdict.faults
    if not faults:
        return [], 0, verdict.status == "rejected"
    excused = excused_by([limit for limit in limits if limit.matches(spec)], faults)
    outside = [fault for fault in faults if fault not in excused]
    return outside, len(faults) - len(outside), verdict.status == "rejected"
