"""``run_trace``: one trace, one allocator, and what came of it."""

from __future__ import annotations

import functools

import msgspec

from ...model.spec import CacheSpec
from ..checking import check
from ..finding import Finding
from ..registry import Allocator, allocate, is_installed, resolve
from ..rejection import Rejected
from .cache import RunningCache
from .managers import running_cache
from .names import layout_allocator
from .trace import Trace


class TraceVerdict(msgspec.Struct, frozen=True):
    """What came of a trace.

    ``findings`` are those of the layout's static rules, then those of the run, the first of each rule; ``refused`` are
    the reasons of the operations that were refused, by their number in the trace. ``done`` is how many operations were
    looked at: a run ends with the first finding. ``rejection`` is the allocator's refusal of the spec.
    """

    findings: tuple[Finding, ...]
    refused: dict[int, str]
    done: int
    rejection: Rejected | None = None

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that were broken, in the order found."""
        return tuple(dict.fromkeys(finding.rule for finding in self.findings))


def run_trace(
    trace: Trace, allocator: str | Allocator, *, to_end: bool = False, cache: RunningCache | None = None
) -> TraceVerdict:
    """Return what comes of ``trace``; ``to_end`` goes on after the first operation with a finding.

    ``cache`` is a fresh one of that allocator and spec, where the caller wants to look at it afterwards.

    Raises ``SpecError`` for an unknown allocator, and where traces cannot run on its layout.
    """
    try:
        cache = running_cache(trace.spec, allocator) if cache is None else cache
    except Rejected as rejection:
        return TraceVerdict((), {}, 0, rejection)
    return run_on(cache, trace, _static(trace.spec, allocator), to_end=to_end)


def run_on(
    cache: RunningCache, trace: Trace, static: tuple[Finding, ...] = (), *, to_end: bool = False
) -> TraceVerdict:
    """Run ``trace`` on a fresh ``cache``; ``static`` are findings of its layout."""
    refused: dict[int, str] = {}
    done = 0
    for number, operation in enumerate(trace.operations):
        refusal = cache.apply(number, operation)
        done = number + 1
        if refusal is not None:
            refused[number] = refusal.reason
        if cache.shadow.findings and not to_end:
            break
    return TraceVerdict((*static, *cache.shadow.findings), refused, done)


def _static(spec: CacheSpec, allocator: str | Allocator) -> tuple[Finding, ...]:
    if isinstance(allocator, str) and is_installed(allocator):
        return ()  # its manager is asked, and no view
    if isinstance(allocator, str):
        return _static_by_name(spec, layout_allocator(allocator))
    return tuple(check(allocate(spec, allocator)))


@functools.lru_cache(maxsize=256)
def _static_by_name(spec: CacheSpec, allocator: str) -> tuple[Finding, ...]:
    return tuple(check(allocate(spec, resolve(allocator))))
