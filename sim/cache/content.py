"""``logical_content``: what a running cache holds for each beam, read from memory; and two managers side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from ...model.errors import SpecError
from ..registry import allocate, resolve
from .cache import RunningCache
from .geometry import CycleGeometry, geometry_of
from .managers import V1, V2
from .sequence import Sequence
from .shadow import TARGET_BITS
from .trace import Trace

Content: TypeAlias = dict[tuple[int, int, int, str], tuple[object, ...]]
"""By (request, beam, layer, role): the tokens that memory holds, by position; None where a window has passed."""


def logical_content(cache: RunningCache) -> Content:
    """Return what the views of ``cache`` show of every token that is written and on the device.

    A token is given by the number of the prefix that ends with it, a recurrent state by that of all it has consumed; a
    byte that is no token's is shown as it is, so that it equals nothing.
    """
    found: Content = {}
    for request, sequence in sorted(cache.sequences.items()):
        if sequence.suspended:
            continue
        for beam in range(sequence.beams):
            for cycle in cache.geometry.cycles:
                found.update(_of_cycle(cache, sequence, request, beam, cycle))
    return found


def _of_cycle(
    cache: RunningCache, sequence: Sequence, request: int, beam: int, cycle: CycleGeometry
) -> Iterator[tuple[tuple[int, int, int, str], tuple[object, ...]]]:
    """Yield what one life cycle holds for one beam, by layer and role."""
    rows = list(_codes(sequence, beam, cycle, cache.block_tokens))
    for number in dict.fromkeys(cycle.read_cells.tolist()):
        target = cache.geometry.targets[number]
        columns = cycle.read_cells == number
        tokens: list[object] = []
        for code in rows:
            if code is None:
                tokens.append(None)
                continue
            tags = set(cache.shadow.tags[cycle.read[code][columns]].tolist())
            tag = tags.pop() if len(tags) == 1 else -1
            own = tag >= 0 and tag & (1 << TARGET_BITS) - 1 == number
            tokens.append(cache.shadow.events[tag >> TARGET_BITS].content if own else ("stray", tag))
        yield (request, beam, target.layer, target.role), tuple(tokens)


def _codes(sequence: Sequence, beam: int, cycle: CycleGeometry, size: int) -> Iterator[int | None]:
    """Yield the rows of the read table that a beam's written tokens are in; of a quiet recurrent state, its one row."""
    if cycle.recurrent:
        page = sequence.blocks[cycle.cycle][beam][0]
        quiet = sequence.done == sequence.scheduled and cycle.cycle not in sequence.sources and sequence.done > 0
        if page is not None and quiet:
            yield page.slot
        return
    origin = sequence.origin[beam]
    for position in range(sequence.done):
        holder = origin[position] if sequence.beams > 1 else beam
        page = sequence.blocks[cycle.cycle][holder][position // size]  # floor: the block of a position
        yield None if page is None else page.slot * cycle.tokens + position % size


class Difference(msgspec.Struct, frozen=True):
    """Where two managers part: after ``operation``, with what each of them said or held."""

    operation: int
    first: object
    second: object


def compare_managers(trace: Trace) -> Difference | None:
    """Run ``trace`` under V1's and V2's rules, each over its own layout, and return the first difference.

    After every operation both have refused or done it, for one reason, and hold equal content for every beam, layer and
    role. V1's publishing at the end of a request, which V2 leaves to commits, is switched off. Suspend and resume are
    V2's alone: leave them out. So are attention sinks: V1 keeps a window's last blocks and nothing before them; a spec
    with sinks raises ``SpecError``.
    """
    for number, layer in enumerate(trace.spec.layers):
        sinks = getattr(layer, "sink_tokens", 0)
        if sinks:
            field = f"spec.layers[{number}].sink_tokens"
            raise SpecError(field, f"found {sinks}, needs 0 to compare the managers: V1 keeps no sinks")
    first = RunningCache(
        geometry_of(allocate(trace.spec, resolve("trtllm-v1"))), msgspec.structs.replace(V1, stores_on_free=False)
    )
    second = RunningCache(geometry_of(allocate(trace.spec, resolve("trtllm-v2"))), V2)
    for number, operation in enumerate(trace.operations):
        answers = [cache.apply(number, operation) for cache in (first, second)]
        reasons = [None if answer is None else answer.reason for answer in answers]
        if reasons[0] != reasons[1]:
            return Difference(number, *reasons)
        held = [logical_content(cache) for cache in (first, second)]
        if held[0] != held[1]:
            return Difference(number, *held)
    return None
