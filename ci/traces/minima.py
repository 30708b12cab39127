"""Known minima: the simplest trace of the grid on which a fault shows, by trying every state that can be reached.

For every spec of the grid the states that operations of the grid lead to are visited breadth first, each once, and
every operation is tried in each; refused operations lead nowhere. The first length at which the fault's rule fires on
any spec is the minimum's; of the specs the simplest counts, and of its traces the one with the smallest arguments.
Traces of up to ``WIDE_OPERATIONS`` are tried on the whole grid, longer ones on the narrow one.

    python -m kvsan.ci.traces.minima fault:free-at-output
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

import msgspec

from ...model.spec import CacheSpec
from ...sim.cache.cache import RunningCache
from ...sim.cache.managers import running_cache
from ...sim.cache.state import state_key
from ...sim.cache.trace import Operation, Trace
from ...sim.rejection import Rejected
from .grid import grid_operations, grid_specs, narrow_operations, narrow_specs
from .simplicity import trace_key

Path = tuple[Operation, ...]

WIDE_OPERATIONS = 3


class _Frontier(msgspec.Struct):
    """The states of one spec that were reached with the last number of operations, each by its simplest path."""

    spec: CacheSpec
    operations: tuple[Operation, ...]
    paths: list[Path]
    seen: set[tuple[object, ...]]


def find_minimum(
    fault: str, rules: tuple[str, ...], max_operations: int, tell: Callable[[str], None] = lambda text: None
) -> Trace | None:
    """Return the simplest trace of at most ``max_operations`` that breaks one of ``rules``, None where none does."""
    found = _search(_frontiers(fault, grid_specs(), grid_operations()), fault, rules, (1, WIDE_OPERATIONS), tell)
    if found is None and max_operations > WIDE_OPERATIONS:
        narrow = _frontiers(fault, narrow_specs(), narrow_operations())
        found = _search(narrow, fault, rules, (WIDE_OPERATIONS + 1, max_operations), tell)
    return found


def _frontiers(fault: str, specs: Iterable[CacheSpec], operations: tuple[Operation, ...]) -> list[_Frontier]:
    """Return the empty traces on every spec that the fault's base supports."""
    frontiers = []
    for spec in specs:
        try:
            running_cache(spec, fault)
        except Rejected:
            continue
        frontiers.append(_Frontier(spec, operations, [()], set()))
    return frontiers


def _search(
    frontiers: list[_Frontier],
    fault: str,
    rules: tuple[str, ...],
    lengths: tuple[int, int],
    tell: Callable[[str], None],
) -> Trace | None:
    """Return the simplest trace that breaks a rule, of at most the longer of ``lengths``; shorter ones do not count."""
    for length in range(1, lengths[1] + 1):
        for frontier in frontiers:
            found = _advance(frontier, fault, rules)
            if found and length >= lengths[0]:
                return min([Trace(spec=frontier.spec, operations=path) for path in found], key=trace_key)
        tell(f"{fault}: nothing with {length} operations, {sum(len(entry.paths) for entry in frontiers)} states")
    return None


def _advance(frontier: _Frontier, fault: str, rules: tuple[str, ...]) -> list[Path]:
    """Try every operation in every state of the frontier; return the paths that break a rule, and move on."""
    found, reached = [], []
    for path in frontier.paths:
        for operation in _possible(frontier, fault, path):
            cache = _run(frontier.spec, fault, path)
            if cache.apply(len(path), operation) is not None and not cache.shadow.findings:
                continue
            longer = (*path, operation)
            if cache.shadow.findings:
                if any(rule in cache.shadow.broken for rule in rules):
                    found.append(longer)
                continue
            key = state_key(cache)
            if key not in frontier.seen:
                frontier.seen.add(key)
                reached.append(longer)
    frontier.paths = reached
    return found


def _run(spec: CacheSpec, fault: str, path: Path) -> RunningCache:
    cache = running_cache(spec, fault)
    for number, operation in enumerate(path):
        cache.apply(number, operation)
    return cache


def _possible(frontier: _Frontier, fault: str, path: Path) -> Iterator[Operation]:
    """Yield the operations that are not sure to be refused."""
    cache = _run(frontier.spec, fault, path)
    live = cache.sequences
    for operation in frontier.operations:
        kind, request = operation.kind, operation.a
        if kind == "admit":
            if request in live or (request == 1 and 0 not in live and not path):
                continue
        elif kind == "step":
            if not any(number in live for number in (0, 1) if request >> number & 1) or (
                operation.c and not cache.recurrent
            ):
                continue
        elif kind == "complete":
            if not cache.flight:
                continue
        elif kind not in ("offload", "onload") and request not in live:
            continue
        yield operation


def main(names: list[str]) -> None:
    """Print the minimum of each fault named, of all faults of running caches where none is."""
    from ..cases import encode_input
    from ..faults import FAULTS

    for fault in FAULTS:
        if fault.kind == "trace" and (not names or fault.name in names):
            found = find_minimum(fault.name, fault.rules, 9, tell=lambda text: print(text, file=sys.stderr, flush=True))
            print(fault.name, "none" if found is None else encode_input(found).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
