"""``PoolMemory``: the bytes of one pool and the owner of every byte, round by round."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..layout import Layout
from .fewer_slots import CHUNK_BYTES
from .owners import OwnerTable, PoolOwners, Stamp
from .views import ByteView, Memory, Numbers, cell_place, claim, write


class PoolMemory:
    """One pool's bytes, all zero, and a shadow per round: the number of the owner that wrote each byte last."""

    def __init__(self, layout: Layout, table: OwnerTable, pool: int) -> None:
        self.table = table
        self.pool = pool
        self.size_bytes = max(0, layout.pools[pool].size_bytes)
        self.rounds = table.rounds[pool]
        self.bytes: Memory = np.zeros(self.size_bytes, dtype=np.uint8)
        self.shadows = [self.shadow(stamps) for stamps in self.rounds]

    @property
    def pool_owners(self) -> PoolOwners:
        """The pool's owners, without its memory."""
        return PoolOwners(self.table, self.pool, self.size_bytes)

    def cells(self, view: ByteView) -> range:
        """Return the cells of ``view`` that lie in the pool; the others are never touched."""
        return view.inside(self.size_bytes)

    def numbers(self, first: int, cells: range, step: int = 1) -> Numbers:
        """Return ``first + step * cell`` for each of ``cells``."""
        return numbers_of(self.table, first, cells, step)

    def shadow(self, stamps: tuple[Stamp, ...]) -> Numbers:
        """Return the number that each byte ends up with when owners claim their bytes in the order of ``stamps``."""
        shadow: Numbers = np.zeros(self.size_bytes, dtype=f"u{self.table.number_bytes}")
        for stamp in stamps:
            view = self.table.owners[stamp.owner].view
            cells = self.cells(view)
            claim(shadow, view, cells, self.numbers(stamp.first_number, cells))
        return shadow

    def stamp(self, round_index: int, digit: int) -> None:
        """Clear the pool, then write digit ``digit`` of every number of the round, in the order of the owners."""
        self.bytes[:] = 0
        for stamp in self.rounds[round_index]:
            view = self.table.owners[stamp.owner].view
            cells = self.cells(view)
            write(self.bytes, view, cells, digit_of(self.numbers(stamp.first_number, cells), digit))

    def predicted(self, round_index: int, digit: int) -> Iterator[Memory]:
        """Yield the bytes that the round's owners leave in the pool, padding 0, a chunk at a time from the base."""
        shadow = self.shadows[round_index]
        for start in range(0, self.size_bytes, CHUNK_BYTES):
            yield digit_of(shadow[start : start + CHUNK_BYTES], digit)

    def first_unpredicted(self, round_index: int, digit: int) -> int | None:
        """Return the first byte of the pool that differs from the prediction, None where all agree."""
        start = 0
        for chunk in self.predicted(round_index, digit):
            different = self.bytes[start : start + chunk.size] != chunk
            if different.any():
                return start + int(different.argmax())
            start += chunk.size
        return None

    def contested(self) -> NDArray[np.bool_]:
        """Return which bytes belong to two cells that may be live together: to a number and to the last writer's."""
        shared = np.zeros(self.size_bytes, dtype=np.bool_)
        for stamps, shadow in zip(self.rounds, self.shadows, strict=True):
            for stamp in stamps:
                view = self.table.owners[stamp.owner].view
                for cell in self.cells(view):
                    place = cell_place(view, cell)
                    shared[place] |= shadow[place] != stamp.first_number + cell
        return shared


def numbers_of(table: OwnerTable, first: int, cells: range, step: int = 1) -> Numbers:
    """Return ``first + step * cell`` for each of ``cells``."""
    values = np.arange(cells.start, cells.stop, dtype=np.int64) * step + first
    return values.astype(f"u{table.number_bytes}")


def digit_of(numbers: Numbers, digit: int) -> Memory:
    """Return digit ``digit`` (base 256, the lowest is 0) of each number."""
    return (numbers >> np.uint8(8 * digit)).astype(np.uint8)
