"""Short traces from what a longer one is made of: all of a few operations, of the kinds that are left in it.

A reduction may come to rest on a trace whose every neighbour is sound, while a shorter one shows the same by another
way. Kinds, texts and parents are those of the trace, requests its first two, tokens and chunks small. Operations that
are sure to be refused are left out, and requests are numbered in the order in which they come.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ...sim.cache.trace import ARGUMENTS, Kind, Operation, requests_of

MAX_IN_FLIGHT = 2
_TOKENS = (1, 2)


def short_traces(operations: tuple[Operation, ...], length: int) -> Iterator[tuple[Operation, ...]]:
    """Yield the traces of ``length`` operations, made of the kinds in ``operations``."""
    yield from _longer((), alphabet(operations), length)


def alphabet(operations: tuple[Operation, ...]) -> list[Operation]:
    """Return the operations that short traces are made of."""
    found: dict[Operation, None] = {}
    kinds = dict.fromkeys(entry.kind for entry in operations)
    for kind in kinds:
        values = [_values(operations, kind, place, name) for place, name in enumerate(ARGUMENTS[kind])]
        found.update(dict.fromkeys(Operation(kind, *chosen) for chosen in itertools.product(*values)))
    return list(found)


def _values(operations: tuple[Operation, ...], kind: Kind, place: int, name: str) -> list[int]:
    """Return the values of one argument, smallest first."""
    used = sorted({(entry.a, entry.b, entry.c)[place] for entry in operations if entry.kind == kind})
    if name == "request":
        return [0, 1] if len(_requests(operations)) > 1 else [0]
    if name == "requests":
        return [1, 2] if len(_requests(operations)) > 1 else [1]
    if name == "tokens":
        return list(_TOKENS)
    if name in ("chunk", "text", "padding"):
        return sorted({0, *used})
    return used


def _requests(operations: tuple[Operation, ...]) -> set[int]:
    found = {entry.a for entry in operations if ARGUMENTS[entry.kind][:1] == ("request",)}
    return found.union(*(requests_of(entry.a) for entry in operations if entry.kind == "step"))


def _longer(path: tuple[Operation, ...], letters: list[Operation], left: int) -> Iterator[tuple[Operation, ...]]:
    if not left:
        yield path
        return
    for letter in letters:
        longer = (*path, letter)
        if plausible(longer):
            yield from _longer(longer, letters, left - 1)


def plausible(operations: tuple[Operation, ...]) -> bool:
    """Say whether no operation is sure to be refused, whatever room there is."""
    live: set[int] = set()
    suspended: set[int] = set()
    flight = 0
    for operation in operations:
        kind, request = operation.kind, operation.a
        if kind == "admit":
            if request in live or operation.b == 0:
                return False
            live.add(request)
        elif kind == "step":
            flight += 1
            if flight > MAX_IN_FLIGHT or not any(number in live for number in requests_of(request)):
                return False
        elif kind == "complete":
            flight -= 1
            if flight < 0:
                return False
        elif kind not in ("offload", "onload"):
            if request not in live or (kind != "free" and (kind == "resume") != (request in suspended)):
                return False
            if kind in ("suspend", "resume", "free"):
                (suspended.add if kind == "suspend" else suspended.discard)(request)
            if kind == "free":
                live.discard(request)
    return True
