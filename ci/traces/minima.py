"""Known minima: the simplest trace of the grid on which a fault shows, by trying every state that can be reached.

For every spec of the grid the states that operations of the grid lead to are visited breadth first, each once, and
every operation is tried in each; refused operations lead nowhere. The first length at which the fault's rule fires on
any spec is the minimum's; of the specs the simplest counts, and of its traces the one with the smallest arguments.

Traces of up to ``WIDE_OPERATIONS`` are tried on the whole grid, longer ones on the narrow one. Where a fault has a
chain (``chains``), an argument tells what every trace that shows it contains: then the whole grid is tried at any
length, without the traces that have no room left for the rest of their chain.

    python -m kvsan.ci.traces.minima fault:hit-not-held
    python -m kvsan.ci.traces.minima --whole fault:one-host-table

``--whole`` searches without chains, for minutes at three operations and for hours at four and more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import msgspec

from ...model.spec import CacheSpec
from ...sim.cache.cache import RunningCache
from ...sim.cache.managers import running_cache
from ...sim.cache.state import state_key
from ...sim.cache.trace import Operation, Trace
from ...sim.rejection import Rejected
from .chains import CHAINS, Chain
from .grid import grid_operations, grid_specs, narrow_operations, narrow_specs
from .simplicity import operation_key, trace_key

Path = tuple[Operation, ...]

WIDE_OPERATIONS = 3
_ANYTHING = Chain((), "")


class _Frontier(msgspec.Struct):
    """The states of one spec that were reached with the last number of operations, each by its simplest path.

    ``left`` operations may still follow, of which the rest of ``chain`` must be some.
    """

    spec: CacheSpec
    fault: str
    rules: tuple[str, ...]
    operations: tuple[Operation, ...]
    chain: Chain
    left: int
    paths: list[Path] = msgspec.field(default_factory=lambda: [()])
    seen: set[tuple[object, ...]] = msgspec.field(default_factory=set)


def find_minimum(
    fault: str,
    rules: tuple[str, ...],
    max_operations: int,
    tell: Callable[[str], None] = lambda text: None,
    *,
    specs: tuple[CacheSpec, ...] | None = None,
    chained: bool = True,
) -> Trace | None:
    """Return the simplest trace of at most ``max_operations`` that breaks one of ``rules``, None where none does.

    ``specs`` are tried in place of the grid's; without ``chained`` no argument cuts the search short.
    """
    chain = CHAINS.get(fault) if chained else None
    if chain is None:
        tried = _supported(fault, specs or grid_specs())
        wide = [_Frontier(spec, fault, rules, grid_operations(), _ANYTHING, WIDE_OPERATIONS) for spec in tried]
        found = _search(wide, 1, min(WIDE_OPERATIONS, max_operations), tell)
        if found is not None or max_operations <= WIDE_OPERATIONS:
            return found
        tried = _supported(fault, specs or narrow_specs())
        narrow = [_Frontier(spec, fault, rules, narrow_operations(), _ANYTHING, max_operations) for spec in tried]
        return _search(narrow, WIDE_OPERATIONS + 1, max_operations, tell)
    for length in range(len(chain.kinds), max_operations + 1):
        for spec in _supported(fault, specs or grid_specs()):
            found = _search([_Frontier(spec, fault, rules, grid_operations(), chain, length)], length, length)
            if found is not None:
                return found
        tell(f"{fault}: nothing with {length} operations")
    return None


def _supported(fault: str, specs: tuple[CacheSpec, ...]) -> Iterator[CacheSpec]:
    """Yield the specs that the fault's base supports, in their order."""
    for spec in specs:
        try:
            running_cache(spec, fault)
        except Rejected:
            continue
        yield spec


def _search(
    frontiers: list[_Frontier], shortest: int, longest: int, tell: Callable[[str], None] = lambda text: None
) -> Trace | None:
    """Return the simplest trace of ``shortest`` to ``longest`` operations that breaks a rule; shorter ones do not
    count."""
    for length in range(1, longest + 1):
        for frontier in frontiers:
            found = _advance(frontier)
            if found and length >= shortest:
                return min([Trace(spec=frontier.spec, operations=path) for path in found], key=trace_key)
        tell(f"{frontiers[0].fault}: nothing with {length} operations, {sum(len(it.paths) for it in frontiers)} states")
    return None


def _advance(frontier: _Frontier) -> list[Path]:
    """Try every operation in every state of the frontier; return the paths that break a rule, and move on."""
    found: list[Path] = []
    reached: dict[tuple[object, ...], Path] = {}
    frontier.left -= 1
    for path in frontier.paths:
        cache: RunningCache | None = None
        for operation, matched in _possible(frontier, path):
            cache = _run(frontier, path) if cache is None else cache
            refused = cache.apply(len(path), operation) is not None
            if refused and not cache.shadow.findings:
                continue  # nothing has changed: the cache serves for the next operation
            longer = (*path, operation)
            if cache.shadow.findings:
                if any(rule in cache.shadow.broken for rule in frontier.rules):
                    found.append(longer)
            elif frontier.left:
                key = (matched, *state_key(cache))
                if key not in frontier.seen and (key not in reached or _path_key(longer) < _path_key(reached[key])):
                    reached[key] = longer
            cache = None
    frontier.seen.update(reached)
    frontier.paths = list(reached.values())
    return found


def _path_key(path: Path) -> tuple[object, ...]:
    """Return the key of operations of one length on one spec."""
    return sum(entry.a + entry.b + entry.c for entry in path), tuple([operation_key(entry) for entry in path])


def _run(frontier: _Frontier, path: Path) -> RunningCache:
    cache = running_cache(frontier.spec, frontier.fault)
    for number, operation in enumerate(path):
        cache.apply(number, operation)
    return cache


def _possible(frontier: _Frontier, path: Path) -> Iterator[tuple[Operation, int]]:
    """Yield the operations that are not sure to be refused and leave room for the rest of the chain, and how much of
    the chain is there with each."""
    cache = _run(frontier, path)
    live, flight, recurrent, chain = set(cache.sequences), bool(cache.flight), bool(cache.recurrent), frontier.chain
    matched = 0
    for operation in path:
        matched = chain.matched(matched, operation.kind)
    for operation in frontier.operations:
        kind, request = operation.kind, operation.a
        now = chain.matched(matched, kind)
        if len(chain.kinds) - now > frontier.left:
            continue
        if kind == "admit":
            if request in live or (request == 1 and 0 not in live and not path):
                continue
        elif kind == "step":
            if not any(number in live for number in (0, 1) if request >> number & 1) or (operation.c and not recurrent):
                continue
        elif kind == "complete":
            if not flight:
                continue
        elif kind not in ("offload", "onload") and request not in live:
            continue
        yield operation, now


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(names: list[str]) -> None:
    """Print the minimum of each fault named, of all faults of running caches where none is."""
    from ..cases import encode_input
    from ..faults import FAULTS

    chained = "--whole" not in names
    names = [name for name in names if name != "--whole"]
    for fault in FAULTS:
        if fault.kind == "trace" and (not names or fault.name in names):
            found = find_minimum(fault.name, fault.rules, 9, _tell, chained=chained)
            print(fault.name, "none" if found is None else encode_input(found).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
