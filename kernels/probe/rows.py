"""Rows: what one launch of a probe kernel works on, a table of integers with a row per view.

A row says which bytes (``offset`` from an anchor address, cells, pitch, up to ``AXES`` axes of size and byte stride,
and an item of consecutive bytes) and which number each cell carries (``first_number + cell * number_step``). All
columns are int64; a kernel compiled once serves every layout.

Rows fall into classes by the widest access that all their addresses allow (16, 4 or 1 bytes) and by whether an item is
long enough to fill tiles by itself, since a kernel is compiled for each class.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...sim.arena import ByteView

AXES: Final = 6
"""Axes of a row besides its cells and the bytes of its item."""
OFFSET, CELLS, PITCH, ITEM, FIRST_NUMBER, NUMBER_STEP, POOL_OFFSET, POOL_BYTES, AXIS = range(9)
"""Columns; from ``AXIS`` on size and stride of each axis, outermost first."""
COLUMNS: Final = AXIS + 2 * AXES
LONG_ITEM_BYTES: Final = 1024
"""Items of at least so many bytes are cut into tiles; shorter ones share tiles."""

_NO_AXES: Final = (1, 0) * AXES

Row: TypeAlias = tuple[int, ...]
Integers = NDArray[np.int64]


class RowClass(msgspec.Struct, frozen=True, order=True):
    """Rows that one compiled kernel serves: bytes per access (16, 4 or 1; short items: 4 or 1), and axes in use."""

    word_bytes: int
    long_items: bool
    axes: int


ROW_CLASSES: Final = tuple(
    [RowClass(word_bytes, True, axes) for axes in (0, AXES) for word_bytes in (16, 4, 1)]
    + [RowClass(word_bytes, False, axes) for axes in (0, AXES) for word_bytes in (4, 1)]
)


def rows_of(view: ByteView, cells: range, pool: int, first_number: int, step: int = 1) -> list[Row]:
    """Return the rows of ``cells`` (consecutive) of ``view``, offsets counted from the base of pool number ``pool``.

    ``first_number`` belongs to cell 0 of the view, of which ``cells`` may be a part. Usually one row; a view with more
    than ``AXES`` axes has one for every index along the outer ones. Rows without axes end before ``AXIS``. ``placed``
    turns rows into addresses.
    """
    if not cells or view.item_bytes == 0:
        return []
    first = cells.start
    start, number = view.offset_bytes + first * view.pitch_bytes, first_number + first * step
    if not view.axes:
        return [(start, len(cells), view.pitch_bytes, view.item_bytes, number, step, pool, 0)]
    axes = view.axes[::-1]
    outer, inner = axes[: max(0, len(axes) - AXES)], axes[max(0, len(axes) - AXES) :]
    flat = [value for axis in ((1, 0),) * (AXES - len(inner)) + inner for value in axis]
    starts = [start]
    for size, stride in outer:
        starts = [start + index * stride for start in starts for index in range(size)]
    return [(start, len(cells), view.pitch_bytes, view.item_bytes, number, step, pool, 0, *flat) for start in starts]


def placed(rows: list[Row], bases: Integers, sizes: Integers) -> Integers:
    """Return ``rows`` as a table of shape (n, COLUMNS), with offsets counted from the anchor.

    ``bases`` and ``sizes`` in bytes are those of the pools, by their number.
    """
    table: Integers = np.empty((len(rows), COLUMNS), dtype=np.int64)
    if rows:
        table[:, :AXIS] = np.array([row[:AXIS] for row in rows], dtype=np.int64)
        table[:, AXIS:] = _NO_AXES
        with_axes = [index for index, row in enumerate(rows) if len(row) > AXIS]
        if with_axes:
            table[with_axes, AXIS:] = np.array([rows[index][AXIS:] for index in with_axes], dtype=np.int64)
    pools = table[:, POOL_OFFSET].copy()
    table[:, OFFSET] += bases[pools]
    table[:, POOL_OFFSET] = bases[pools]
    table[:, POOL_BYTES] = sizes[pools]
    return table


class RowTable(msgspec.Struct, frozen=True):
    """Rows in their classes, each with the place where its results are added up."""

    classes: tuple[tuple[RowClass, Integers, Integers], ...]
    """(class, rows of shape (n, COLUMNS), places of shape (n,))."""

    @classmethod
    def build(cls, table: Integers, places: Integers | None = None, *, bytewise: bool = False) -> RowTable:
        """Return the rows of ``table``, of shape (n, COLUMNS), sorted into classes.

        Results of row i are added up in place ``places[i]``, or in place i. ``bytewise`` puts all rows into the class
        of short items, of single bytes and with axes, for kernels that know only that.
        """
        if not len(table):
            return cls(())
        if places is None:
            places = np.arange(len(table), dtype=np.int64)
        if bytewise:
            return cls(((RowClass(1, False, AXES), table, places),))
        multiples = np.gcd.reduce(
            np.concatenate([table[:, [OFFSET, PITCH, ITEM, POOL_OFFSET]], table[:, AXIS + 1 :: 2]], axis=1), axis=1
        )
        long_items = table[:, ITEM] >= LONG_ITEM_BYTES
        plain = (table[:, AXIS::2] == 1).all(axis=1)
        classes = []
        for kind in ROW_CLASSES:
            wide = multiples % kind.word_bytes == 0
            widest = 16 if kind.long_items else 4
            if kind.word_bytes < widest:
                wide &= multiples % (kind.word_bytes * 4) != 0
            chosen = np.flatnonzero(wide & (long_items == kind.long_items) & (plain == (kind.axes == 0)))
            if chosen.size:
                classes.append((kind, np.ascontiguousarray(table[chosen]), places[chosen]))
        return cls(tuple(classes))


def tile_ends(kind: RowClass, rows: Integers, block_words: int) -> Integers:
    """Return the number of tiles of ``block_words`` words up to and with each row.

    A long item has tiles of its own; of a row with short items all words together are cut into tiles.
    """
    unit = min(4, kind.word_bytes)
    words = rows[:, ITEM] // unit  # floor: exact, the class divides it
    repeats = rows[:, CELLS] * np.prod(rows[:, AXIS::2], axis=1)
    tiles = repeats * -(-words // block_words) if kind.long_items else -(-(repeats * words) // block_words)  # floor: up
    return np.cumsum(tiles)
