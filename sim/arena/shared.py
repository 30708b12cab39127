"""``alias`` seen on memory: every owner writes its number into its cells, pass by pass, and reads it back."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding
from ..layout import Layout
from ..rules.rule import buffer_name, place_of, pool_name
from .memory import PoolMemory, digit_of
from .owners import Owner, PoolOwners
from .views import first_byte, shared_element, unlike

Cell = tuple[int, int]
"""An owner, by its place in the table, and a slot."""


def shared_elements(layout: Layout) -> Iterator[Finding]:
    """Yield pages of which two elements share a byte without saying so."""
    for index, buffer in enumerate(layout.buffers):
        page = buffer.page
        shared = None if page.self_overlap or buffer.slot_count == 0 else shared_element(page)
        if shared is not None:
            byte = buffer.offset_bytes + shared[0]
            first, second = (f"slot 0 element {index_of}" for index_of in shared[1:])
            yield Finding(
                rule="alias",
                message=f"{buffer_name(buffer)} overlaps itself: {first} and {second} "
                f"share byte {byte} of {pool_name(layout.pools[buffer.pool])}",
                remedy="step by at least one page per slot, or declare the overlap when it is meant",
                where=(place_of(layout, index, slot=0, byte=byte),),
            )


def shared_cells(layout: Layout, memory: PoolMemory) -> Iterator[Finding]:
    """Yield the pairs of owners of which one reads the other's number back, each with the lowest such byte."""
    lowest_by_round: list[dict[int, Cell]] = []
    for round_index in range(len(memory.rounds)):
        lowest: dict[int, Cell] = {}
        for digit in range(memory.table.digits):
            memory.stamp(round_index, digit)
            byte = memory.first_unpredicted(round_index, digit)
            if byte is not None:
                yield _mismatch(layout, memory, byte)
            for owner, (place, slot) in _misread(memory, round_index, digit):
                lowest[owner] = min(lowest.get(owner, (place, slot)), (place, slot))
        lowest_by_round.append(lowest)
    yield from alias_findings(layout, memory.pool_owners, lowest_by_round)


def alias_findings(layout: Layout, pool: PoolOwners, lowest_by_round: list[dict[int, Cell]]) -> Iterator[Finding]:
    """Yield the pairs of owners that share bytes, from what was misread.

    ``lowest_by_round`` gives in each round, by owner, the lowest byte that was misread and the slot it belongs to.
    """
    pairs: dict[tuple[int, int], None] = {}
    for lowest in lowest_by_round:
        for owner, (byte, slot) in lowest.items():
            partner = _partner(pool, owner, slot, byte)
            pair = (min(owner, partner[0]), max(owner, partner[0]))
            if pair not in pairs:
                pairs[pair] = None
                yield _alias(layout, pool, (owner, slot), partner, byte)


def _misread(memory: PoolMemory, round_index: int, digit: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each owner that reads back something else than it wrote, with the lowest such byte and its slot."""
    for stamp in memory.rounds[round_index]:
        view = memory.table.owners[stamp.owner].view
        cells = memory.cells(view)
        wrong = unlike(memory.bytes, view, cells, digit_of(memory.numbers(stamp.first_number, cells), digit))
        found = first_byte(view, cells, wrong) if wrong.any() else None
        if found is not None:
            yield stamp.owner, found


def _partner(pool: PoolOwners, owner: int, slot: int, byte: int) -> Cell:
    """Return another cell that holds ``byte`` and may be live together with the one given."""
    cycle = pool.table.owners[owner].life_cycle
    for other, slots in pool.holders(byte):
        for other_slot in slots:
            same = other == owner and other_slot == slot
            their_cycle = pool.table.owners[other].life_cycle
            if not same and pool.table.may_both_live(cycle, slot, their_cycle, other_slot):
                return other, other_slot
    return owner, slot


def _alias(layout: Layout, owners: PoolOwners, first: Cell, second: Cell, byte: int) -> Finding:
    (one, slot), (other, other_slot) = sorted((first, second))
    owner, mate = owners.table.owners[one], owners.table.owners[other]
    pool = pool_name(layout.pools[owners.pool])
    where = [place_of(layout, cell.buffer, slot=held, byte=byte) for cell, held in ((owner, slot), (mate, other_slot))]
    name, other_name = owner_name(layout, owner), owner_name(layout, mate)
    if one == other:
        message = f"{name} overlaps itself: slot {slot} and slot {other_slot} share byte {byte} of {pool}"
        remedy = "step by at least one page per slot, or declare the overlap when it is meant"
        return Finding(rule="alias", message=message, remedy=remedy, where=tuple(where[:1]))
    message = (
        f"{name} (slot {slot}) and {other_name} (slot {other_slot}) share byte {byte} of {pool}, and both may be live"
    )
    remedy = "give every role of every layer bytes of its own in the slot"
    return Finding(rule="alias", message=message, remedy=remedy, where=tuple(where))


def owner_name(layout: Layout, owner: Owner) -> str:
    """Return how a message calls an owner: a buffer, or the plane that a part holds."""
    buffer = layout.buffers[owner.buffer]
    if owner.part < 0:
        return buffer_name(buffer)
    part = buffer.parts[owner.part]
    return f"layer {part.layer}'s {part.role}"


def _mismatch(layout: Layout, memory: PoolMemory, byte: int) -> Finding:
    """Return that memory differs from the prediction, which no layout can bring about."""
    return Finding(
        rule="replay-mismatch",
        message=f"byte {byte} of {pool_name(layout.pools[memory.pool])} holds {int(memory.bytes[byte])} after its "
        "owners wrote, which is not what the table of owners predicts",
        remedy="report this case: the arena's strides and its table of owners disagree",
    )
