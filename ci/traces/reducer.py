"""The structural reducer for traces: from any failing trace to the simplest one reached, by ``simplicity``.

Operations are dropped in chunks, halves first, then single arguments are lowered, requests and texts renumbered and
neighbours exchanged, to a fixpoint. Then the spec is made simpler: each spec of the grid that is simpler is tried with
the operations as they are and with one argument changed. Last, one operation is dropped while others change to make up
for it. A candidate counts only if it is simpler and still fails, so the result is never larger than the input. Nothing
is random, and no clock is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import msgspec

from ...model.errors import SpecError
from ...model.spec import CacheSpec
from ...sim.cache.trace import ARGUMENTS, Operation, Trace
from ..reducer import reduce_spec
from .grid import grid_operations, grid_specs
from .simplicity import trace_key

MAX_CHECKS = 60_000
MAX_SPEC_CHECKS = 400
"""Specs tried for a trace that fails on none of the grid."""
SMALL = (0, 1, 2, 3)
"""Values that an argument is changed to."""
MAX_CHANGED = 10
"""Operations of a trace up to which they are changed as well as dropped and lowered."""


class TraceReduction(msgspec.Struct, frozen=True):
    """The simplest failing trace found, and how many candidates were run for it."""

    trace: Trace
    checks: int


class _OutOfChecks(Exception):
    """The allowed number of checks is used up."""


class _Search:
    """The simplest failing trace so far."""

    def __init__(self, trace: Trace, fails: Callable[[Trace], bool], max_checks: int) -> None:
        self.trace = trace
        self.key = trace_key(trace)
        self.checks = 0
        self._fails = fails
        self._max_checks = max_checks
        self._passed: set[Trace] = set()

    def offer(self, operations: tuple[Operation, ...], spec: CacheSpec | None = None) -> bool:
        """Take a candidate if it is simpler and fails; say whether it was taken."""
        candidate = Trace(spec=self.trace.spec if spec is None else spec, operations=operations)
        key = trace_key(candidate)
        if key >= self.key or candidate in self._passed:
            return False
        if self.checks >= self._max_checks:
            raise _OutOfChecks
        self.checks += 1
        if not self.fails(candidate):
            self._passed.add(candidate)
            return False
        self.trace, self.key = candidate, key
        return True

    def fails(self, candidate: Trace) -> bool:
        """Say whether a candidate fails; one that cannot be run does not."""
        try:
            return self._fails(candidate)
        except SpecError:
            return False


def reduce_trace(trace: Trace, fails: Callable[[Trace], bool], *, max_checks: int = MAX_CHECKS) -> TraceReduction:
    """Return the simplest trace reached from ``trace`` for which ``fails`` is true, after ``max_checks`` calls at most.

    Raises ``ValueError`` when ``trace`` itself does not fail.
    """
    if not fails(trace):
        raise ValueError("the trace to reduce does not fail")
    search = _Search(trace, fails, max_checks)
    try:
        _drop(search)
        while _lower(search) or _drop_single(search):
            pass
        while _simplify(search) or _own_spec(search):
            _drop(search)
            while _lower(search) or _drop_single(search):
                pass
    except _OutOfChecks:
        pass
    return TraceReduction(search.trace, search.checks + 1)


def _drop(search: _Search) -> None:
    """Drop operations in chunks: halves, then quarters, down to single ones, from the end."""
    chunk = len(search.trace.operations) >> 1
    while chunk:
        end = len(search.trace.operations)
        while end > 0:
            operations = search.trace.operations
            first = max(0, end - chunk)
            search.offer(operations[:first] + operations[end:])
            end = first
        chunk >>= 1


def _drop_single(search: _Search) -> bool:
    """Drop one operation, or two; say whether any could go."""
    operations = search.trace.operations
    count = len(operations)
    for first in range(count - 1, -1, -1):
        if search.offer(operations[:first] + operations[first + 1 :]):
            return True
    if count <= 4 * MAX_CHANGED:
        for first in range(count):
            for second in range(first + 1, count):
                rest = operations[:first] + operations[first + 1 : second] + operations[second + 1 :]
                if search.offer(rest):
                    return True
    return False


def _lower(search: _Search) -> bool:
    """Renumber requests and texts, lower single arguments, exchange neighbours; say whether anything helped."""
    operations = search.trace.operations
    moves = (_renumbered(operations), _lowered(operations), _exchanged(operations))
    return any(search.offer(candidate) for candidate in itertools.chain(*moves))


def _exchanged(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with two neighbours exchanged."""
    for place in range(len(operations) - 1):
        if operations[place] != operations[place + 1]:
            yield (*operations[:place], operations[place + 1], operations[place], *operations[place + 2 :])


def _renumbered(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with one request, or one text, given a smaller number from some place on."""
    requests = sorted({entry.a for entry in operations if ARGUMENTS[entry.kind][:1] == ("request",)})
    for old in requests:
        for new in range(old):
            for place in range(len(operations)):
                changed = [_with_request(entry, old, new) for entry in operations[place:]]
                yield (*operations[:place], *changed)
    texts = sorted({entry.c for entry in operations if entry.kind == "admit"})
    for old in texts:
        for new in range(old):
            yield tuple(
                [
                    Operation("admit", entry.a, entry.b, new) if entry.kind == "admit" and entry.c == old else entry
                    for entry in operations
                ]
            )


def _with_request(operation: Operation, old: int, new: int) -> Operation:
    """Return ``operation`` with the requests ``old`` and ``new`` exchanged."""
    other = {old: new, new: old}
    if operation.kind == "step":
        mask = operation.a & ~(1 << old | 1 << new)
        mask |= (operation.a >> old & 1) << new | (operation.a >> new & 1) << old
        return Operation("step", mask, operation.b, operation.c)
    if ARGUMENTS[operation.kind][:1] == ("request",):
        return Operation(operation.kind, other.get(operation.a, operation.a), operation.b, operation.c)
    return operation


def _lowered(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with one argument of one of them lowered, the smallest values first."""
    for place, entry in enumerate(operations):
        for argument, value in enumerate((entry.a, entry.b, entry.c)):
            for lower in dict.fromkeys([*range(min(value, 4)), value >> 1, value - 1]):
                if 0 <= lower < value:
                    values = [entry.a, entry.b, entry.c]
                    values[argument] = lower
                    changed = Operation(entry.kind, *values)
                    yield (*operations[:place], changed, *operations[place + 1 :])


def _own_spec(search: _Search) -> bool:
    """Make the trace's own spec simpler, where none of the grid fails; say whether that helped."""
    trace = search.trace
    if trace.spec in grid_specs():
        return False

    def spec_fails(spec: CacheSpec) -> bool:
        return spec is trace.spec or search.fails(Trace(spec=spec, operations=trace.operations))

    try:
        found = reduce_spec(trace.spec, spec_fails, max_checks=MAX_SPEC_CHECKS)
    except ValueError:
        return False
    search.checks += found.checks
    return search.offer(trace.operations, found.spec)


def _simplify(search: _Search) -> bool:
    """Try simpler specs, then other operations; say whether anything helped."""
    operations = search.trace.operations
    simpler = [spec for spec in grid_specs() if trace_key(Trace(spec=spec, operations=operations)) < search.key]
    if any(search.offer(operations, spec) for spec in simpler):
        return True
    if len(operations) > MAX_CHANGED:
        return False
    changed = list(_changed(operations))
    if any(search.offer(candidate, spec) for spec in simpler for candidate in changed):
        return True
    if any(search.offer(candidate) for candidate in _replaced(operations)):
        return True
    return _shorten(search)


def _shorten(search: _Search) -> bool:
    """Drop one operation and make up for it: another number of slots or tokens, other arguments, other requests."""
    operations, spec = search.trace.operations, search.trace.spec
    alike = [other for other in grid_specs() if other.layers == spec.layers]
    for drop in range(len(operations)):
        rest = operations[:drop] + operations[drop + 1 :]
        variants = [rest, *_renumbered(rest), *_raised(rest)]
        for candidate in variants:
            if any(search.offer(candidate, other) for other in (spec, *alike)):
                return True
        for candidate in variants:
            changed = list(_changed(candidate))
            if any(search.offer(other) for other in changed):
                return True
            if candidate is rest and any(search.offer(twice) for other in changed for twice in _changed(other)):
                return True
            if any(search.offer(other, alike_spec) for alike_spec in alike for other in changed):
                return True
    return False


def _raised(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with request 0 made another one from some place on."""
    for place in range(1, len(operations)):
        yield (*operations[:place], *(_with_request(entry, 0, 1) for entry in operations[place:]))


def _changed(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with one argument of one of them set to another small value."""
    for place, entry in enumerate(operations):
        values = (entry.a, entry.b, entry.c)
        for argument in range(len(ARGUMENTS[entry.kind])):
            for value in SMALL:
                if value != values[argument]:
                    other = Operation(entry.kind, *values[:argument], value, *values[argument + 1 :])
                    yield (*operations[:place], other, *operations[place + 1 :])


def _replaced(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with one of them replaced by any of the grid's."""
    for place in range(len(operations)):
        for other in grid_operations():
            if other != operations[place]:
                yield (*operations[:place], other, *operations[place + 1 :])
