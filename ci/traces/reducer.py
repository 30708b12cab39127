"""The structural reducer for traces: from any failing trace to the simplest one reached, by ``simplicity``.

Operations are dropped in chunks, halves first, then single arguments are lowered, requests and texts renumbered and
neighbours exchanged, to a fixpoint. Then the spec is made simpler: each spec of the grid that is simpler is tried with
the operations as they are and with one argument changed. Last, one operation is dropped while others change to make up
for it. A candidate counts only if it is simpler and still fails, so the result is never larger than the input. Nothing
is random, and no clock is read.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import msgspec

from ...model.arithmetic import div_up
from ...model.errors import SpecError
from ...model.spec import CacheSpec
from ...sim.cache.trace import ARGUMENTS, MAX_ARGUMENT, Operation, Trace, requests_of
from ..reducer import reduce_spec
from .grid import SLOTS, grid_operations, grid_specs
from .rebuild import plausible, short_traces
from .simplicity import trace_key

MAX_CHECKS = 100_000
MAX_SPEC_CHECKS = 400
"""Specs tried for a trace that fails on none of the grid."""
SMALL = (0, 1, 2, 3)
"""Values that an argument is changed to."""
MAX_CHANGED = 10
"""Operations of a trace up to which they are changed as well as dropped and lowered."""
MAX_DROPPED = 14
"""Operations of a trace up to which several are dropped at once, under another number of slots."""
MAX_PAIRED = 5
"""Operations of a trace up to which two are changed to make up for one that is dropped."""
MAX_ADMITTED = 3
"""Admissions of a trace up to which all of them are changed together."""
MAX_REBUILT = 1_000
"""Short traces that are made of the operations of one that comes to rest."""


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
        self.strict = False
        self._fails = fails
        self._max_checks = max_checks
        self._passed: set[Trace] = set()

    def offer(self, operations: tuple[Operation, ...], spec: CacheSpec | None = None) -> bool:
        """Take a candidate if it is simpler and fails; say whether it was taken.

        A ``strict`` search passes over candidates with an operation that is sure to be refused: the same without it is
        a candidate as well.
        """
        if self.strict and not plausible(operations):
            return False
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


def reduce_trace(
    trace: Trace, fails: Callable[[Trace], bool], *others: Trace, max_checks: int = MAX_CHECKS
) -> TraceReduction:
    """Return the simplest trace reached from ``trace`` for which ``fails`` is true, after ``max_checks`` calls or so.

    ``others`` are further traces to begin with: each is reduced as far as dropping and lowering goes, and the search
    goes on from the simplest. Raises ``ValueError`` when ``trace`` itself does not fail.
    """
    if not fails(trace):
        raise ValueError("the trace to reduce does not fail")
    searches = [_Search(start, fails, max_checks) for start in (trace, *others)]
    with contextlib.suppress(_OutOfChecks):
        for begun in searches:
            _minimize(begun)
    search = min(searches, key=lambda begun: begun.key)
    search.checks = sum(begun.checks for begun in searches)
    with contextlib.suppress(_OutOfChecks):
        while _simplify(search) or _own_spec(search):
            _minimize(search)
    return TraceReduction(search.trace, search.checks + 1)


def _minimize(search: _Search) -> None:
    """Drop and lower to a fixpoint, simpler specs included where they fail as they are."""
    while True:
        _drop(search)
        while _lower(search) or _drop_single(search):
            pass
        operations = search.trace.operations
        simpler = [spec for spec in grid_specs() if trace_key(Trace(spec=spec, operations=operations)) < search.key]
        if not any(search.offer(operations, spec) for spec in simpler):
            return


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
    moves = (
        _merged(operations),
        _postponed(operations),
        _renumbered(operations),
        _lowered(operations),
        _exchanged(operations),
        _traded(operations),
    )
    return any(search.offer(candidate) for candidate in itertools.chain(*moves))


def _merged(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with an extension made part of the prompt, which earlier steps take up to there."""
    for place, entry in enumerate(operations):
        if entry.kind != "extend":
            continue
        for first in range(place - 1, -1, -1):
            prompt = operations[first]
            if prompt.kind == "admit" and prompt.a == entry.a and prompt.b + entry.b <= MAX_ARGUMENT:
                between = [
                    _with_argument(other, 1, prompt.b) if other.kind == "step" and other.b == 0 else other
                    for other in operations[first + 1 : place]
                ]
                longer = _with_argument(prompt, 1, prompt.b + entry.b)
                yield (*operations[:first], longer, *between, *operations[place + 1 :])
                break


def _postponed(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with a request admitted where it was extended first, with the tokens of the extension."""
    for place, entry in enumerate(operations):
        if entry.kind != "extend":
            continue
        for first in range(place - 1, -1, -1):
            prompt = operations[first]
            if prompt.kind == "extend" and prompt.a == entry.a:
                break
            if prompt.kind == "admit" and prompt.a == entry.a:
                later = Operation("admit", entry.a, entry.b, prompt.c)
                yield (*operations[:first], *operations[first + 1 : place], later, *operations[place + 1 :])
                break


def _exchanged(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with two neighbours exchanged."""
    for place in range(len(operations) - 1):
        if operations[place] != operations[place + 1]:
            yield (*operations[:place], operations[place + 1], operations[place], *operations[place + 2 :])


def _traded(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with two of one kind exchanged, near or far: their arguments trade places."""
    for first, second in itertools.combinations(range(len(operations) if len(operations) <= MAX_DROPPED else 0), 2):
        one, other = operations[first], operations[second]
        if one.kind == other.kind and one != other:
            between = operations[first + 1 : second]
            yield (*operations[:first], other, *between, one, *operations[second + 1 :])


def _renumbered(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with one request, or one text, given a smaller number from some place on."""
    requests = {entry.a for entry in operations if ARGUMENTS[entry.kind][:1] == ("request",)}
    requests.update(*(requests_of(entry.a) for entry in operations if entry.kind == "step"))
    for old in sorted(requests):
        for new in range(old):
            for place in range(len(operations)):
                changed = [_with_request(entry, old, new) for entry in operations[place:]]
                yield (*operations[:place], *changed)
    texts = sorted({entry.c for entry in operations if entry.kind == "admit"})
    for old in texts:
        for new in range(old):
            yield tuple([_with_text(entry, old, new) for entry in operations])


def _with_text(operation: Operation, old: int, new: int) -> Operation:
    """Return ``operation`` with the texts ``old`` and ``new`` exchanged."""
    if operation.kind != "admit":
        return operation
    return _with_argument(operation, 2, {old: new, new: old}.get(operation.c, operation.c))


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
                    changed = _with_argument(entry, argument, lower)
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
    search.strict = True
    try:
        return _simplified(search)
    finally:
        search.strict = False


def _simplified(search: _Search) -> bool:
    operations = search.trace.operations
    simpler = [spec for spec in grid_specs() if trace_key(Trace(spec=spec, operations=operations)) < search.key]
    if len(operations) <= MAX_DROPPED and _drop_and_resize(search):
        return True
    if len(operations) > MAX_CHANGED:
        return False
    changed = [*_changed(operations), *_lowered(operations)]
    simpler += _fewer_slots(search.trace.spec)
    if any(search.offer(candidate, spec) for spec in simpler for candidate in changed):
        return True
    if any(search.offer(candidate) for candidate in _replaced(operations)):
        return True
    if any(search.offer(candidate) for candidate in _fused(operations)):
        return True
    return _rebuild(search) or _shorten(search) or _admit_otherwise(search)


def _admit_otherwise(search: _Search) -> bool:
    """Drop one operation that frees a request, and admit all requests otherwise: numbers, tokens and texts; say whether
    that helped.

    A slot that is freed and taken again is one way to the same state as two requests at once; to come from one to the
    other, every admission has to change together.
    """
    operations = search.trace.operations
    places = [place for place, entry in enumerate(operations) if entry.kind == "admit"]
    if len(places) > MAX_ADMITTED:
        return False
    texts = sorted({0, *(operations[place].c for place in places)})
    admissions = [Operation("admit", *chosen) for chosen in itertools.product((0, 1), SMALL[1:], texts)]
    for drop, freed in enumerate(operations):
        if freed.kind != "free":
            continue
        for chosen in itertools.product(admissions, repeat=len(places)):
            changed = list(operations)
            for place, admission in zip(places, chosen, strict=True):
                changed[place] = admission
            if search.offer((*changed[:drop], *changed[drop + 1 :])):
                return True
    return False


def _rebuild(search: _Search) -> bool:
    """Try short traces of the operations that are left, the shortest first, with any number of slots; say whether one
    fails."""
    operations, spec = search.trace.operations, search.trace.spec
    alike = [other for other in _alike(spec) if other.tokens_per_block == spec.tokens_per_block]
    shorter = itertools.chain.from_iterable(short_traces(operations, length) for length in range(1, len(operations)))
    tried = itertools.islice(shorter, MAX_REBUILT)
    return any(search.offer(candidate, other) for candidate in tried for other in alike)


def _alike(spec: CacheSpec) -> list[CacheSpec]:
    """Return a spec, and those that differ in slots and tokens per block alone: of the grid, or with fewer slots."""
    alike = [
        other
        for other in grid_specs()
        if (other.layers, other.kv_format) == (spec.layers, spec.kv_format) and other != spec
    ]
    return [spec, *alike, *_fewer_slots(spec)]


def _fewer_slots(spec: CacheSpec) -> list[CacheSpec]:
    """Return ``spec`` with fewer slots, for a spec that has more than any of the grid."""
    slots = spec.slots or 1
    return [msgspec.structs.replace(spec, slots=count) for count in range(1, slots)] if slots > SLOTS[-1] else []


def _drop_and_resize(search: _Search) -> bool:
    """Drop up to three operations under another number of slots or tokens per block; say whether that helped."""
    operations = search.trace.operations
    alike = _alike(search.trace.spec)
    if any(search.offer(candidate, spec) for candidate in _postponed(operations) for spec in alike):
        return True
    block_tokens = search.trace.spec.tokens_per_block
    if any(
        search.offer(_in_smaller_blocks(operations, block_tokens, spec.tokens_per_block), spec)
        for spec in alike
        if spec.tokens_per_block < block_tokens
    ):
        return True
    for count in (0, 1, 2, 3) if len(operations) <= MAX_CHANGED else (0, 1, 2):
        for dropped in itertools.combinations(range(len(operations)), count):
            rest = tuple([entry for place, entry in enumerate(operations) if place not in dropped])
            if any(search.offer(candidate, spec) for candidate in (rest, *_scaled(rest)) for spec in alike):
                return True
    return False


def _in_smaller_blocks(operations: tuple[Operation, ...], before: int, now: int) -> tuple[Operation, ...]:
    """Return the operations with about as many blocks of ``now`` tokens as there were of ``before``."""
    return tuple(
        [
            _with_argument(entry, 1, div_up(entry.b * now, before))
            if entry.kind in ("admit", "extend", "rewind", "step")
            else entry
            for entry in operations
        ]
    )


def _scaled(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with all extensions and rewinds (or all by one number of tokens) made by another number."""
    counts = {entry.b for entry in operations if entry.kind in ("extend", "rewind")}
    for old in sorted(counts):
        for new in SMALL[1:]:
            if new != old:
                yield tuple(
                    [
                        _with_argument(entry, 1, new)
                        if entry.kind in ("extend", "rewind") and entry.b == old
                        else entry
                        for entry in operations
                    ]
                )


def _shorten(search: _Search) -> bool:
    """Drop one operation and make up for it: another number of slots or tokens, other arguments, other requests."""
    operations = search.trace.operations
    alike = _alike(search.trace.spec)
    rests = [operations[:drop] + operations[drop + 1 :] for drop in range(len(operations))]
    variants = [candidate for rest in rests for candidate in (rest, *_renumbered(rest), *_raised(rest))]
    if any(search.offer(candidate, other) for candidate in variants for other in (*alike, *grid_specs())):
        return True
    for candidate in variants:
        changed = list(_changed(candidate))
        if any(search.offer(other, alike_spec) for other in changed for alike_spec in alike):
            return True
    if len(operations) > MAX_PAIRED:
        return False
    for candidate in variants:
        for once in _changed(candidate):
            if any(search.offer(twice) for twice in _changed(once)):
                return True
    for rest in rests:
        for once in _replaced(rest):
            if search.offer(once) or any(search.offer(twice) for twice in _changed(once)):
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
                    other = _with_argument(entry, argument, value)
                    yield (*operations[:place], other, *operations[place + 1 :])


def _fused(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with two neighbours replaced by one of the grid's."""
    for place in range(len(operations) - 1):
        for other in grid_operations():
            yield (*operations[:place], other, *operations[place + 2 :])


def _with_argument(operation: Operation, argument: int, value: int) -> Operation:
    """Return ``operation`` with one argument set to ``value``."""
    values = [operation.a, operation.b, operation.c]
    values[argument] = value
    return Operation(operation.kind, *values)


def _replaced(operations: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """Yield the operations with one of them replaced by any of the grid's."""
    for place in range(len(operations)):
        for other in grid_operations():
            if other != operations[place]:
                yield (*operations[:place], other, *operations[place + 1 :])
