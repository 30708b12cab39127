"""``Arena``: a layout laid out on NumPy bytes, what its memory must hold, and what is wrong with it."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...model.arithmetic import exact_div
from ..checking import FINDINGS_PER_RULE, check
from ..finding import Finding
from ..layout import Layout
from .fewer_slots import CHUNK_BYTES, with_fewer_slots
from .findings import find
from .fold import fold
from .memory import PoolMemory, digit_of, numbers_of
from .owners import OwnerTable, owner_table
from .views import Memory, access_bytes, write

DEFAULT_MAX_BYTES: Final = 256 << 20
"""NumPy memory that an arena takes at most, unless told otherwise, in bytes."""


class Arena:
    """The arena of ``layout``, which may have fewer slots than the layout that was asked for (its notes say so).

    Pools are laid out one at a time, whenever something is asked of them; nothing is kept but the table of owners.
    A *pass* is (round, digit), see ``owners``; pass ``p`` is digit ``p mod digits`` of round ``p / digits``.
    """

    def __init__(self, layout: Layout, table: OwnerTable) -> None:
        self.layout = layout
        self.table = table

    @classmethod
    def build(cls, layout: Layout, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Arena:
        """Return the arena of ``layout``, cut down to fewer slots where ``max_bytes`` of memory do not hold it.

        Raises ``SpecError`` where it cannot be cut down that far, or refers to pools or buffers that it does not have.
        """
        check(layout, rules=())
        smaller = with_fewer_slots(layout, max_bytes)
        return cls(smaller, owner_table(smaller))

    @property
    def passes(self) -> tuple[tuple[int, int], ...]:
        """The (round, digit) of every pass."""
        rounds, digits = self.table.round_count, self.table.digits
        return tuple([(number, digit) for number in range(rounds) for digit in range(digits)])

    def findings(self, *, limit: int = FINDINGS_PER_RULE) -> list[Finding]:
        """Return what is wrong: at most ``limit`` findings each of bounds, alias, op-address and replay-mismatch."""
        return find(self.layout, self.table, limit)

    def predicted_bytes(self, pass_index: int, pool: int) -> Memory:
        """Return what ``pool`` holds after a pass that began with zeros: a digit per byte, padding 0.

        Owners write in the order of their numbers. Where two of them share a byte, the later one's digit is given;
        ``contested`` says which bytes those are. A pool without that round holds zeros.
        """
        round_index, digit = self.passes[pass_index]
        memory = PoolMemory(self.layout, self.table, pool)
        start = 0
        for chunk in memory.predicted(round_index, digit) if round_index < len(memory.rounds) else ():
            memory.bytes[start : start + chunk.size] = chunk
            start += chunk.size
        return memory.bytes

    def consumer_bytes(self, consumer: str, pass_index: int, pool: int) -> Memory:
        """Return what ``pool`` holds after ``consumer`` alone wrote all its pages in it, each with its owner's digit.

        Accesses write in the order of the layout; cells outside the pool are left out.
        """
        round_index, digit = self.passes[pass_index]
        first_numbers: dict[tuple[int, int], int] = {}
        for rounds in self.table.rounds:
            for stamp in rounds[round_index] if round_index < len(rounds) else ():
                owner = self.table.owners[stamp.owner]
                first_numbers[owner.buffer, owner.part] = stamp.first_number
        size_bytes = self.layout.pools[pool].size_bytes
        held: Memory = np.zeros(size_bytes, dtype=np.uint8)
        for access in self.layout.accesses:
            number = first_numbers.get((access.buffer, access.part))
            if access.consumer == consumer and access.pool == pool and number is not None:
                view = access_bytes(access)
                cells = view.inside(size_bytes)
                numbers = numbers_of(self.table, number + access.first_slot, cells, access.slot_step)
                write(held, view, cells, digit_of(numbers, digit))
        return held

    def contested(self, pool: int) -> NDArray[np.bool_]:
        """Return which bytes of ``pool`` belong to two cells that may be live together."""
        return PoolMemory(self.layout, self.table, pool).contested()

    def digest(self) -> str:
        """Return one number for all predicted bytes, see ``digest_of_folds``."""
        folds: dict[tuple[int, int, int], int] = {}
        for pool in range(len(self.layout.pools)):
            memory = PoolMemory(self.layout, self.table, pool)
            for round_index in range(len(memory.rounds)):
                for digit in range(self.table.digits):
                    total, words = 0, 0
                    for chunk in memory.predicted(round_index, digit):
                        total += fold(chunk, words)
                        words += exact_div(CHUNK_BYTES, 4, "chunk in bytes")
                    folds[pool, round_index, digit] = total % (1 << 64)
        return digest_of_folds(self.layout, self.table, folds)


def digest_of_folds(layout: Layout, table: OwnerTable, folds: dict[tuple[int, int, int], int]) -> str:
    """Return the BLAKE2b-128 in hexadecimal of one line ``pool <number> <bytes> <round> <digit> <fold>`` for each fold.

    ``folds`` maps (pool, round, digit) to the fold (see ``fold``) of the pool's bytes after that pass. The lines go by
    pool, of each by its own rounds, of each by the digits from the lowest.
    """
    state = hashlib.blake2b(digest_size=16)
    for pool, rounds in enumerate(table.rounds):
        for round_index in range(len(rounds)):
            for digit in range(table.digits):
                size, value = max(0, layout.pools[pool].size_bytes), folds[pool, round_index, digit]
                state.update(f"pool {pool} {size} {round_index} {digit} {value:016x}\n".encode())
    return state.hexdigest()


def arena_findings(layout: Layout, *, max_bytes: int = DEFAULT_MAX_BYTES) -> list[Finding]:
    """Return what an arena of ``layout`` finds wrong; see ``Arena``."""
    return Arena.build(layout, max_bytes=max_bytes).findings()
