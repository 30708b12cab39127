"""Beams: a sequence goes on in several ways, which share full blocks of their past.

Nothing is copied when beams go on from other parents: the cache indirection says for every token which beam's blocks
hold it. What cannot be shared is copied at the fork: the partial last block, and recurrent states, which are copied at
every change of parents too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .refusal import Refused
from .sequence import Sequence
from .trace import MAX_BEAMS, parents_of

if TYPE_CHECKING:
    from .cache import RunningCache


def _require_quiet(sequence: Sequence) -> None:
    if sequence.waiting or sequence.done != sequence.scheduled or not sequence.done:
        raise Refused(
            "tokens-wait",
            f"request {sequence.request} has {sequence.capacity - sequence.done} tokens that are not written yet: "
            "complete their step first",
        )


def fork(cache: RunningCache, sequence: Sequence, count: int) -> None:
    """Go on with ``count`` beams: full blocks are shared, the partial one and the states are copied for each."""
    if sequence.beams > 1 or not 2 <= count <= MAX_BEAMS:
        raise Refused(
            "beams",
            f"request {sequence.request} has {sequence.beams} beams and is asked for {count}: fork once, into 2 to "
            f"{MAX_BEAMS}",
        )
    _require_quiet(sequence)
    full, rest = divmod(sequence.done, cache.block_tokens)
    needs = [0] * len(cache.pools)
    for cycle in cache.paged:
        held = bool(rest) and sequence.blocks[cycle.cycle][0][full] is not None
        needs[cycle.group] += (count - 1) * held
    for cycle in cache.recurrent:
        needs[cycle.group] += count - 1
    cache.require_room(needs, set(), f"request {sequence.request} with {count} beams")
    for cycle in cache.paged:
        rows = sequence.blocks[cycle.cycle]
        for _ in range(1, count):
            row = rows[0][:full]
            for page in row:
                if page is not None:
                    cache.hold(page)
            if rest:
                mine = rows[0][full]
                if mine is None:
                    row.append(None)
                else:
                    page = cache.new_block(cycle)
                    row.append(page)
                    cache.copy_tokens(cycle, mine, page, rest)
                    cache.check_copy(cycle, page, sequence.events[0][full * cache.block_tokens :])
            rows.append(row)
    for cycle in cache.recurrent:
        rows = sequence.blocks[cycle.cycle]
        for _ in range(1, count):
            page = cache.new_block(cycle)
            rows.append([page])
            live = rows[0][0]
            if live is not None:
                cache.shadow.copy(cycle.read[live.slot], cycle.read[page.slot])
    for beam in range(1, count):
        sequence.contents.append(list(sequence.contents[0]))
        sequence.events.append(list(sequence.events[0]))
        shared = full * cache.block_tokens
        sequence.origin.append(sequence.origin[0][:shared] + [beam] * (sequence.done - shared))
        sequence.state_events.append(sequence.state_events[0])
    if rest:
        cache.seen.add("fork in the middle of a block")
    sequence.beams = count
    sequence.history = sequence.done


def reorder(cache: RunningCache, sequence: Sequence, code: int) -> None:
    """Let every beam go on from its parent, the base-4 digits of ``code``."""
    parents = parents_of(code)[: sequence.beams]
    if sequence.beams == 1 or max(parents) >= sequence.beams:
        raise Refused(
            "beams",
            f"request {sequence.request} has {sequence.beams} beams and is asked for parents "
            f"{', '.join(map(str, parents))}",
        )
    _require_quiet(sequence)
    if len(set(parents)) > 1 and parents != tuple(range(sequence.beams)):
        cache.seen.add("beams of divergent parents")
    for values in (sequence.contents, sequence.events, sequence.origin):
        values[:] = [list(values[parent]) for parent in parents]
    for cycle in cache.recurrent:
        slots = [page.slot for row in sequence.blocks[cycle.cycle] for page in row if page is not None]
        moves = [(slots[parent], slots[beam]) for beam, parent in enumerate(parents) if parent != beam]
        if moves:
            source = np.concatenate([cycle.read[first] for first, _ in moves])
            target = np.concatenate([cycle.read[second] for _, second in moves])
            cache.shadow.copy(source, target)
    sequence.state_events[:] = [sequence.state_events[parent] for parent in parents]
    sequence.history = sequence.done
