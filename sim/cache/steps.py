"""Steps: dispatched with a page table of their own, executed when they complete, up to two in flight.

A step reads what its sequences hold and writes the tokens it was given, through the table that it was dispatched with.
Reads and writes happen at completion, the latest moment: whatever is freed, moved or handed out again before that must
leave the step's pages alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from ...model.arithmetic import div_up
from ..finding import Where
from .geometry import CycleGeometry
from .refusal import Refused
from .sequence import Sequence, root_of, token_of
from .shadow import Event
from .trace import MAX_BEAMS, requests_of

if TYPE_CHECKING:
    from .cache import RunningCache

MAX_IN_FLIGHT = 2

Table: TypeAlias = dict[tuple[int, int], list[int]]
"""The page table of a step: the row of a life cycle and a seat (four seats per request, one for each beam).

Entries are slot ids, -1 where there is no page; a recurrent state's row is the slot that is read and the one written.
"""
Segment: TypeAlias = tuple[int, int, list[int]]
"""A seat, the first position, and the events of the positions from there on."""


class Row:
    """One sequence and beam in a step: tokens ``start`` to ``end``, what it reads by life cycle, what it writes."""

    __slots__ = ("beam", "end", "events", "reads", "seat", "sequence", "start", "state_event")

    def __init__(self, sequence: Sequence, beam: int, start: int, end: int) -> None:
        self.sequence = sequence
        self.beam = beam
        self.seat = MAX_BEAMS * sequence.request + beam
        self.start = start
        self.end = end
        self.events: list[int] = []
        self.reads: list[list[Segment]] = []
        self.state_event = sequence.state_events[beam]


class Step:
    """A dispatched step: its number, its table, its rows and its padding rows."""

    __slots__ = ("number", "padding", "rows", "table")

    def __init__(self, number: int, table: Table, padding: int) -> None:
        self.number = number
        self.table = table
        self.padding = padding
        self.rows: list[Row] = []


def dispatch(cache: RunningCache, mask: int, chunk: int, padding: int) -> None:
    """Give the waiting tokens of the named requests to a step, at most ``chunk`` of each (0: all)."""
    if len(cache.flight) >= MAX_IN_FLIGHT:
        raise Refused("steps-in-flight", f"{len(cache.flight)} steps are in flight: complete one first")
    chosen = [cache.sequences[request] for request in requests_of(mask) if request in cache.sequences]
    chosen = [sequence for sequence in chosen if sequence.waiting > 0 and not sequence.suspended]
    if not chosen:
        raise Refused("nothing-waits", "no named request has a token waiting: extend one first")
    if padding:
        missing = [cycle for cycle in cache.recurrent if cycle.cycle not in cache.dummies]
        needs = [0] * len(cache.pools)
        for cycle in missing:
            needs[cycle.group] += 1
        cache.require_room(needs, set(), "the state of a padding row")
        for cycle in missing:
            cache.dummies[cycle.cycle] = cache.new_block(cycle)
    cache.step_count += 1
    table = cache.new_table()
    if any(step.table is table for step in cache.flight):
        cache.shadow.report(
            "in-flight",
            f"step {cache.step_count} fills the page table that step {cache.flight[-1].number}, still in flight, "
            "reads when it runs",
            "give every step in flight a table buffer of its own, or wait for the reader",
        )
        table.clear()
    step = Step(cache.step_count, table, padding)
    for sequence in chosen:
        count = min(sequence.waiting, chunk) if chunk else sequence.waiting
        _add_rows(cache, step, sequence, count)
    if padding and cache.recurrent:
        cache.seen.add("state of a padding row")
    for cycle in cache.recurrent if padding else ():
        _check_padding(cache, step, cycle)
    cache.flight.append(step)
    if len(cache.flight) == MAX_IN_FLIGHT:
        cache.seen.add("two steps in flight")


def _add_rows(cache: RunningCache, step: Step, sequence: Sequence, count: int) -> None:
    """Add the rows of one sequence, one for each beam, and let windows pass."""
    start, end = sequence.scheduled, sequence.scheduled + count
    sequence.history = max(sequence.history, start)
    if count < sequence.waiting and start < sequence.prompt:
        cache.seen.add("prompt in chunks")
    for cycle in cache.paged:
        if cycle.window is not None:
            drop_stale(cache, sequence, cycle)
    for beam in range(sequence.beams):
        row = Row(sequence, beam, start, end)
        _write_tokens(cache, step, row)
        for cycle in cache.paged:
            _fill_row(cache, step, row, cycle)
            row.reads.append(list(_segments(cache, row, cycle)))
        for cycle in cache.recurrent:
            _fill_state_row(cache, step, row, cycle)
        sequence.state_events[beam] = row.events[-1]
        step.rows.append(row)
    sequence.scheduled = end
    for source in sequence.sources.values():
        cache.release(source)
    sequence.sources.clear()


def drop_stale(cache: RunningCache, sequence: Sequence, cycle: CycleGeometry) -> None:
    """Release the blocks that no query can attend to any more."""
    end = cache.stale_end(cycle, sequence.history)
    for row in sequence.blocks[cycle.cycle]:
        for block in range(cycle.sink_blocks, min(end, len(row))):
            page = row[block]
            if page is not None:
                row[block] = None
                cache.release(page)
                cache.seen.add("window passed" if cycle.sink_blocks == 0 else "window passed behind sinks")


def _write_tokens(cache: RunningCache, step: Step, row: Row) -> None:
    """Number the tokens that a row writes, and the events of writing them."""
    sequence, beam = row.sequence, row.beam
    contents, events, origin = sequence.contents[beam], sequence.events[beam], sequence.origin[beam]
    forked = beam if sequence.beams > 1 else -1
    for position in range(row.start, row.end):
        if position >= len(contents):
            before = contents[-1] if contents else root_of(sequence.text)
            contents.append(cache.contents.next(before, token_of(sequence.text, position, forked)))
            origin.append(beam)
        event = cache.shadow.event(Event(sequence.request, beam, position, step.number, contents[position]))
        row.events.append(event)
        events.append(event)


def _fill_row(cache: RunningCache, step: Step, row: Row, cycle: CycleGeometry) -> None:
    """Fill a row of the table, compare it with where the pages really are, and mark what the step writes."""
    sequence = row.sequence
    blocks = sequence.blocks[cycle.cycle][row.beam]
    entries = cache.table_row(sequence, cycle.cycle, row.beam, blocks)
    where = [-1 if page is None else page.slot for page in blocks]
    if entries != where:
        _report_entries(cache, row, cycle, entries, where)
    step.table[cycle.cycle, row.seat] = entries
    for page in blocks:
        if page is not None:
            page.last_step = step.number
            if page.slot >= 0:
                cache.ledger.name(page, step.number)
    size = cache.block_tokens
    for block in range(row.start // size, div_up(row.end, size)):  # floor: the block of the first token
        page = blocks[block] if block < len(blocks) else None
        if page is None:
            cache.shadow.report(
                "capacity",
                f"step {step.number} writes token {max(row.start, block * size)} of request {sequence.request}, beam "
                f"{row.beam}, which has no page for it",
                "allocate every page before the step that writes it",
                (Where(group=cycle.group),),
            )
        else:
            cache.ledger.check_write(page, step.number, sequence.request)


def _report_entries(cache: RunningCache, row: Row, cycle: CycleGeometry, entries: list[int], where: list[int]) -> None:
    """Report a table that does not name the slots where the sequence's pages are."""
    slots = cache.geometry.groups[cycle.group].slots
    place = next((i for i, pair in enumerate(zip(entries, where, strict=False)) if pair[0] != pair[1]), len(where))
    found = entries[place] if place < len(entries) else None
    held = f"its page is in slot {where[place]}" if place < len(where) else "it has no such block"
    cache.shadow.report(
        "namespace",
        f"block {place} of request {row.sequence.request} is {found} in the page table, and {held}",
        "fill the table with where a page's memory is now, each time that it may have moved",
        (Where(group=cycle.group, slot=found),),
    )
    if any(entry >= slots for entry in entries):
        cache.shadow.report(
            "bounds",
            f"the page table names slot {max(entries)} of group {cycle.group}, which has {slots}",
            "fill the table with slot ids of the pool that it is used on",
            (Where(group=cycle.group, slot=max(entries)),),
        )


def _segments(cache: RunningCache, row: Row, cycle: CycleGeometry) -> Iterator[Segment]:
    """Yield what the first query of a row can attend to, and report what is no longer there."""
    sequence, size, start = row.sequence, cache.block_tokens, row.start
    first = 0 if cycle.window is None else max(0, start + 1 - cycle.window)
    sinks = min(cycle.sink_blocks * size, first)
    events, origin = sequence.events[row.beam], sequence.origin[row.beam]
    for low, high in ((0, sinks), (first, start)):
        place = low
        while place < high:
            beam = origin[place] if sequence.beams > 1 else row.beam
            end = place + 1
            if sequence.beams > 1:
                while end < high and origin[end] == beam:
                    end += 1
            else:
                end = high
            yield MAX_BEAMS * sequence.request + beam, place, events[place:end]
            _check_kept(cache, row, cycle, beam, place, end)
            place = end


def _check_kept(cache: RunningCache, row: Row, cycle: CycleGeometry, beam: int, low: int, high: int) -> None:
    size = cache.block_tokens
    blocks = row.sequence.blocks[cycle.cycle][beam]
    for block in range(low // size, div_up(high, size)):  # floor: the block of the first token
        if block >= len(blocks) or blocks[block] is None:
            window = "has no window" if cycle.window is None else f"has a window of {cycle.window}"
            cache.shadow.report(
                "window" if cycle.window is not None else "capacity",
                f"the query at position {row.start} of request {row.sequence.request} attends to position "
                f"{max(low, block * size)}, whose block {block} was dropped; the layer {window}",
                "drop a block only when its last token is outside the window of the next query",
                (Where(group=cycle.group),),
            )
            return


def _fill_state_row(cache: RunningCache, step: Step, row: Row, cycle: CycleGeometry) -> None:
    """Fill the row of a recurrent state: the slot that is read, and the one that is written."""
    sequence = row.sequence
    live = sequence.blocks[cycle.cycle][row.beam][0]
    source = sequence.sources.get(cycle.cycle)
    if live is None:
        return
    target = cache.state_target(cycle, source, live, row.end - row.start)
    cache.ledger.check_write(target, step.number, sequence.request)
    step.table[cycle.cycle, row.seat] = [(source or live).slot, target.slot]
    for page in (live, source, target):
        if page is not None:
            page.last_step = step.number
            if page.slot >= 0:
                cache.ledger.name(page, step.number)


def _check_padding(cache: RunningCache, step: Step, cycle: CycleGeometry) -> None:
    """A padding row's state must go to the slot that is kept for it."""
    slot = cache.padding_slot(cycle)
    owner = cache.ledger.owners[cycle.group][slot]
    if owner is not cache.dummies[cycle.cycle]:
        whose = "nobody holds" if owner is None else "a request or a snapshot holds"
        cache.shadow.report(
            "sentinel",
            f"a padding row of step {step.number} writes its state to slot {slot} of group {cycle.group}, which "
            f"{whose}; slot {cache.dummies[cycle.cycle].slot} is kept for it",
            "give padding rows a slot of their own, or let the kernel skip invalid indices",
            (Where(group=cycle.group, slot=slot),),
        )
    step.table[cycle.cycle, -1] = [slot, slot]
    cache.ledger.name(cache.dummies[cycle.cycle], step.number)


def complete_oldest(cache: RunningCache) -> None:
    """Run the oldest step in flight to its end."""
    if not cache.flight:
        raise Refused("no-step", "no step is in flight: dispatch one first")
    step = cache.flight.pop(0)
    shadow = cache.shadow
    for place, cycle in enumerate(cache.paged):
        codes: list[int] = []
        events: list[int] = []
        for row in step.rows:
            for seat, first, wanted in row.reads[place]:
                _collect(cache, step.table.get((cycle.cycle, seat), []), cycle, first, wanted, codes, events)
        if codes:
            shadow.read(cycle, codes, events, f"step {step.number}")
        codes, events = [], []
        for row in step.rows:
            entries = step.table.get((cycle.cycle, row.seat), [])
            _collect(cache, entries, cycle, row.start, row.events, codes, events)
        if codes:
            shadow.write(cycle, codes, events)
    for cycle in cache.recurrent:
        _run_states(cache, step, cycle)
    cache.ledger.complete(step.number)
    for row in step.rows:
        _settle(cache, row)


def complete_until(cache: RunningCache, number: int) -> None:
    """Run steps to their end up to step ``number``."""
    while cache.flight and cache.ledger.completed < number:
        complete_oldest(cache)


def _collect(
    cache: RunningCache,
    entries: list[int],
    cycle: CycleGeometry,
    first: int,
    wanted: list[int],
    codes: list[int],
    events: list[int],
) -> None:
    """Append the (slot, token) codes and events of neighbouring positions; those without a page are left out."""
    size, slots = cycle.tokens, cache.geometry.groups[cycle.group].slots
    for position, event in enumerate(wanted, first):
        block = position // size  # floor: the block of a position
        slot = entries[block] if block < len(entries) else -1
        if 0 <= slot < slots:
            codes.append(slot * size + position - block * size)
            events.append(event)


def _run_states(cache: RunningCache, step: Step, cycle: CycleGeometry) -> None:
    """Read and write the recurrent states of a step's rows, then those of its padding rows."""
    reads, states, writes, events = [], [], [], []
    for row in step.rows:
        entries = step.table.get((cycle.cycle, row.seat))
        if entries is None:
            continue
        if row.start > 0:
            reads.append(entries[0])
            states.append(row.state_event)
        writes.append(entries[1])
        events.append(row.events[-1])
    if reads:
        cache.shadow.read(cycle, reads, states, f"step {step.number}")
    if step.padding and (cycle.cycle, -1) in step.table:
        writes.append(step.table[cycle.cycle, -1][1])
        events.append(cache.shadow.event(Event(-1, 0, 0, step.number, 0)))
    if writes:
        cache.shadow.write(cycle, writes, events)


def _settle(cache: RunningCache, row: Row) -> None:
    """Count the tokens of a row as written, as far as its sequence still has them."""
    sequence = row.sequence
    if cache.sequences.get(sequence.request) is not sequence:
        return
    events = sequence.events[row.beam]
    end = row.start
    while end < row.end and end < len(events) and events[end] == row.events[end - row.start]:
        end += 1
    if end > row.start and sequence.done >= row.start:
        sequence.done = max(sequence.done, end)
    sequence.history = max(sequence.history, min(sequence.done, sequence.prompt))
