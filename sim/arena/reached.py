"""``op-address`` seen on memory: each access is tried alone with the storage that it stands for.

The storage writes a number per slot and the access reads it, then the access writes and the storage reads: whatever
differs is a byte that one reaches and the other does not. What a stray access reaches of others' live cells is an
alias.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import TypeAlias

import msgspec
import numpy as np

from ..finding import Finding
from ..layout import Access, Layout
from ..rules.rule import access_name, place_of, pool_name, stored_place
from .memory import PoolMemory, digit_of
from .owners import PoolOwners, Stamp
from .shared import Cell, owner_name
from .views import ByteView, access_bytes, buffer_bytes, cell_offsets, cell_place, unlike, write

Stray: TypeAlias = tuple[int, int]
"""A slot, and the first byte that an access reaches for it."""


def reached_findings(layout: Layout, memory: PoolMemory) -> Iterator[Finding]:
    """Yield the accesses to one pool that stray, each with the first live cell of somebody else that it reaches.

    The memory must be zero, and is zero again afterwards.
    """
    tried: dict[Access, Stray | None] = {}
    for access in layout.accesses:
        if access.pool != memory.pool:
            continue
        key = msgspec.structs.replace(access, consumer="")
        if key not in tried:
            tried[key] = _stray(layout, memory, access)
        stray = tried[key]
        if stray is not None:
            yield op_address_finding(layout, memory.pool_owners, access, *stray)
            yield from trespass_findings(layout, memory, access)


def _stray(layout: Layout, memory: PoolMemory, access: Access) -> Stray | None:
    """Return the first cell that strays, or None. The memory must be zero, and is zero again afterwards."""
    reach, stored = access_bytes(access), stored_bytes(layout, access)
    if reach.count == 0:
        return None
    if elsewhere(layout, access) is not None:
        return elsewhere(layout, access)
    strays = [
        cell
        for cell in (apart(memory.size_bytes, reach, stored), _differing(memory, reach, stored))
        if cell is not None
    ]
    return stray_cell(access, min(strays)) if strays else None


def stored_bytes(layout: Layout, access: Access) -> ByteView:
    """Return the storage of the cells that ``access`` stands for, cell by cell."""
    own = buffer_bytes(layout.buffers[access.buffer], access.part)
    return msgspec.structs.replace(
        own,
        offset_bytes=own.start(access.first_slot),
        pitch_bytes=own.pitch_bytes * access.slot_step,
        count=access.cell_count,
    )


def stray_cell(access: Access, cell: int) -> Stray:
    """Return the slot that a cell of ``access`` stands for, and the first byte that it reaches."""
    return access.first_slot + cell * access.slot_step, access_bytes(access).start(cell)


def elsewhere(layout: Layout, access: Access) -> Stray | None:
    """Return the first cell of an access to another pool, or to slots that the buffer does not have; else None."""
    buffer = layout.buffers[access.buffer]
    if access.pool != buffer.pool:
        return stray_cell(access, 0)
    for cell in (0, access.cell_count - 1):
        if not 0 <= access.first_slot + cell * access.slot_step < buffer.slot_count:
            return stray_cell(access, cell)
    return None


def apart(size_bytes: int, reach: ByteView, stored: ByteView) -> int | None:
    """Return the first cell of which just one of the access and the storage lies in a pool of ``size_bytes``."""
    one, other = reach.inside(size_bytes), stored.inside(size_bytes)
    if one == other or not (one or other):
        return None
    return _first_in_one(one, other)


def _first_in_one(one: range, other: range) -> int:
    """Return the least number that lies in just one of two different ranges."""
    if not one or not other:
        return (one or other).start
    return min(one.start, other.start) if one.start != other.start else min(one.stop, other.stop)


def _differing(memory: PoolMemory, reach: ByteView, stored: ByteView) -> int | None:
    """Return the first cell whose bytes differ between access and storage, of those inside the pool on both sides."""
    one, other = memory.cells(reach), memory.cells(stored)
    cells = range(max(one.start, other.start), min(one.stop, other.stop))
    if reach.cells_apart and stored.cells_apart:
        return _first_unlike(memory, reach, stored, cells)
    # cells that share bytes with each other are tried one by one
    for cell in cells:
        if _first_unlike(memory, reach, stored, range(cell, cell + 1)) is not None:
            return cell
    return None


def _first_unlike(memory: PoolMemory, reach: ByteView, stored: ByteView, cells: range) -> int | None:
    """Write through the storage and read through the access, then the reverse; return the first cell that differs."""
    if not cells:
        return None
    numbers = memory.numbers(1, range(len(cells)))
    zeros = np.zeros_like(numbers)
    found = []
    for digit in range(memory.table.digits):
        values = digit_of(numbers, digit)
        for writer, reader in ((stored, reach), (reach, stored)):
            write(memory.bytes, writer, cells, values)
            wrong = unlike(memory.bytes, reader, cells, values)
            if wrong.any():
                found.append(int(wrong.reshape(len(cells), -1).any(axis=1).argmax()))
            write(memory.bytes, writer, cells, zeros)
    return cells.start + min(found) if found else None


def op_address_finding(layout: Layout, pool: PoolOwners, access: Access, slot: int, reached: int) -> Finding:
    """Return that ``access`` reaches byte ``reached`` of ``pool`` for a slot, and what it should have reached."""
    start, pitch, page = stored_place(layout, access)
    cell = 0 if access.slot_step == 0 else (slot - access.first_slot) // access.slot_step  # floor: exact, a whole step
    right = start + cell * pitch
    buffer = layout.buffers[access.buffer]
    if not 0 <= slot < buffer.slot_count:
        what = f"slot {slot} of a buffer that has {buffer.slot_count} slots"
    elif reached == right and access.pool == buffer.pool:
        what = f"a page of {access.page.span_bytes} B, where the storage has one of {page.span_bytes} B"
    else:
        what = f"byte {reached} of {pool_name(layout.pools[access.pool])} in slot {slot}, where the storage has it at "
        what += f"byte {right} of {pool_name(layout.pools[buffer.pool])}" + _holder(layout, pool, reached)
    return Finding(
        rule="op-address",
        message=f"the {access_name(layout, access)} reaches {what}",
        remedy="derive the pointer, mapping offset and pages per slot from the storage that was really built",
        where=(place_of(layout, access.buffer, slot=slot, consumer=access.consumer),),
    )


def _holder(layout: Layout, pool: PoolOwners, byte: int) -> str:
    """Return whose page ``byte`` lies in, as the end of a sentence."""
    for number, slots in pool.holders(byte):
        owner = pool.table.owners[number]
        return f": a byte of {owner_name(layout, owner)} in slot {slots[0]}"
    return ": nobody's page"


def trespass_findings(layout: Layout, memory: PoolMemory, access: Access) -> Iterator[Finding]:
    """Yield what a stray access reaches of somebody else's live cells; only the memory's owners are looked at."""
    found = _trespass(layout, memory, access)
    if found is not None:
        yield _trespass_finding(layout, memory, access, *found)


def _trespass(layout: Layout, memory: PoolMemory, access: Access) -> tuple[int, Cell, int] | None:
    """Return (slot, victim, byte) of the first live cell of somebody else that a stray access reaches."""
    table, own_cycle = memory.table, layout.buffers[access.buffer].life_cycle
    reach = access_bytes(access)
    offsets = cell_offsets(reach)
    # where there are several rounds, the last one has the numbers of slot ids; those before it name everybody
    count = max(1, len(memory.rounds) - 1)
    for cell in memory.cells(reach):
        slot = access.first_slot + cell * access.slot_step
        for stamps, shadow in zip(memory.rounds[:count], memory.shadows, strict=False):
            held = shadow[cell_place(reach, cell)]
            for number in np.unique(held[held != 0]):
                victim, victim_slot = _cell_of(stamps, int(number))
                owner = table.owners[victim]
                mine = owner.buffer == access.buffer and access.part in (-1, owner.part) and victim_slot == slot
                if not mine and table.may_both_live(own_cycle, slot, owner.life_cycle, victim_slot):
                    byte = reach.start(cell) + int(offsets[held == number].min())
                    return slot, (victim, victim_slot), byte
    return None


def _cell_of(stamps: tuple[Stamp, ...], number: int) -> Cell:
    """Return the cell with a number of its own; first numbers ascend."""
    stamp = stamps[bisect.bisect_right(stamps, number, key=lambda each: each.first_number) - 1]
    return stamp.owner, number - stamp.first_number


def _trespass_finding(
    layout: Layout, memory: PoolMemory, access: Access, slot: int, victim: Cell, byte: int
) -> Finding:
    owner = memory.table.owners[victim[0]]
    return Finding(
        rule="alias",
        message=f"the {access_name(layout, access)} in slot {slot} reaches byte {byte} of "
        f"{pool_name(layout.pools[memory.pool])}, which belongs to {owner_name(layout, owner)} in slot {victim[1]}",
        remedy="derive the pointer, mapping offset and pages per slot from the storage that was really built",
        where=(
            place_of(layout, access.buffer, slot=slot, byte=byte, consumer=access.consumer),
            place_of(layout, owner.buffer, slot=victim[1], byte=byte),
        ),
    )
