"""Accesses tried alone: the slow and exact way, for those that a batch or a look at their places made suspects.

The storage writes a number into each of its cells and the access reads it, then the access writes and the storage
reads, as in ``kvsan.sim.arena``; no other access writes meanwhile. So whatever differs is the fault of this access.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ..sim.arena import ByteView
from ..sim.arena.reached import apart, elsewhere, stored_bytes, stray_cell
from ..sim.arena.views import access_bytes, holds
from ..sim.layout import Access, Layout
from .batch import Batch, target_rows
from .plan import Target
from .probe import launch
from .probe.launch import Uploaded
from .probe.rows import RowTable, placed
from .round_work import MAX_SINGLE_CELLS


class Stray(msgspec.Struct, frozen=True):
    """An access that reaches other bytes than its storage has.

    ``slot`` is the first slot in which it does, ``reached`` the first byte that it reaches there. Where memory showed
    it, ``byte`` of the pool held ``held`` instead of ``expected``.
    """

    slot: int
    reached: int
    byte: int | None = None
    held: int = 0
    expected: int = 0


def try_alone(batch: Batch, index: int) -> Stray | None:
    """Return how access number ``index`` of the batch's only layout strays, or None."""
    layout = batch.cases[0].plan.layout
    access = layout.accesses[index]
    reach, stored = access_bytes(access), stored_bytes(layout, access)
    odd = elsewhere(layout, access)
    if odd is not None:
        return Stray(*odd)
    size_bytes = layout.pools[access.pool].size_bytes
    cells = _cells_inside(reach, stored, size_bytes)
    found = _differing(batch, layout, access, reach, stored, cells)
    lone = apart(size_bytes, reach, stored)
    if lone is not None and (found is None or lone <= found[0]):
        return Stray(*stray_cell(access, lone))
    if found is None:
        return None
    return Stray(*stray_cell(access, found[0]), *found[1:])


def _cells_inside(one: ByteView, other: ByteView, size_bytes: int) -> range:
    first, second = one.inside(size_bytes), other.inside(size_bytes)
    start = max(first.start, second.start)
    return range(start, max(start, min(first.stop, second.stop)))


def _differing(
    batch: Batch, layout: Layout, access: Access, reach: ByteView, stored: ByteView, cells: range
) -> tuple[int, int, int, int] | None:
    """Return (cell, byte, held, expected) of the first cell that differs, or None.

    Cells that share bytes with each other are written and read one by one.
    """
    if not cells:
        return None
    together = reach.cells_apart and stored.cells_apart
    groups = [cells] if together else [range(cell, cell + 1) for cell in cells[:MAX_SINGLE_CELLS]]
    for group in groups:
        # numbers from 1 on, so that no cell looks like padding
        first_number = 1 - group.start
        own = Target(access.pool, stored, group, first_number)
        other = Target(access.pool, reach, group, first_number)
        found = [
            each
            for digit in range(len(group).bit_length() + 7 >> 3)
            for writer, reader in ((own, other), (other, own))
            if (each := _read_back(batch, writer, reader, digit)) is not None
        ]
        if found:
            return min(found)
    return None


def _read_back(batch: Batch, writer: Target, reader: Target, digit: int) -> tuple[int, int, int, int] | None:
    """Write one digit through ``writer``, read it through ``reader``; return the first cell that differs, as above."""
    batch.clear()
    launch.stamp(batch.anchor, batch.rows(target_rows(0, writer)), digit)
    tally = launch.new_tally(batch.device, 1)
    launch.verify(batch.anchor, batch.rows(rows := target_rows(0, reader), [0] * len(rows)), digit, tally)
    counts, lowest = tally.read()
    if not counts[0]:
        return None
    byte = int(lowest[0] - batch.bases[reader.pool])
    cell = min(cell for cell in holds(reader.view, int(batch.sizes[reader.pool]), byte) if cell in reader.cells)
    if reader.view.pitch_bytes < 0:
        cell, byte = _first_backwards(batch, reader, digit, (cell, byte))
    held = int(batch.device.download(batch.anchor.address + int(batch.bases[reader.pool]) + byte, 1)[0])
    return cell, byte, held, (reader.first_number + cell) >> (8 * digit) & 255


def _first_backwards(batch: Batch, reader: Target, digit: int, last: tuple[int, int]) -> tuple[int, int]:
    """Return the first cell that differs and its lowest byte, for a view whose cells run towards lower bytes.

    The lowest byte belongs to the last such cell; halving the cells finds the first one.
    """
    low, high = reader.cells.start, last[0] + 1
    best = last
    while low < high:
        middle = (low + high) // 2  # floor: any cell between
        part = msgspec.structs.replace(reader, cells=range(low, middle + 1))
        tally = launch.new_tally(batch.device, 1)
        launch.verify(batch.anchor, batch.rows(rows := target_rows(0, part), [0] * len(rows)), digit, tally)
        counts, lowest = tally.read()
        if counts[0]:
            byte = int(lowest[0] - batch.bases[reader.pool])
            cells = holds(reader.view, int(batch.sizes[reader.pool]), byte)
            best = (min(cell for cell in cells if cell in part.cells), byte)
            high = middle
        else:
            low = middle + 1
    return best


def try_narrow(batch: Batch, index: int) -> int:
    """Return how many bytes access ``index`` reads wrong when it computes byte offsets in 32 bits.

    The storage writes its numbers, the access reads at offsets that wrap at 2^31. A byte is counted once per digit.
    """
    layout = batch.cases[0].plan.layout
    access = layout.accesses[index]
    reach, stored = access_bytes(access), stored_bytes(layout, access)
    cells = _cells_inside(reach, stored, layout.pools[access.pool].size_bytes)
    if not cells:
        return 0
    first_number = 1 - cells.start
    own, other = (Target(access.pool, view, cells, first_number) for view in (stored, reach))
    rows = placed(target_rows(0, other), batch.bases, batch.sizes)
    places = np.zeros(len(rows), dtype=np.int64)
    uploaded: list[Uploaded] = launch.upload(batch.device, RowTable.build(rows, places, bytewise=True))
    tally = launch.new_tally(batch.device, 1)
    for digit in range(len(cells).bit_length() + 7 >> 3):
        batch.clear()
        launch.stamp(batch.anchor, batch.rows(target_rows(0, own)), digit)
        launch.verify_narrow(batch.anchor, uploaded, digit, tally)
    return int(tally.read()[0][0])
