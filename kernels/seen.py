"""``Seen``: what a replay saw of one plan, as plain data; ``findings`` makes sentences of it."""

from __future__ import annotations

import msgspec


class Misread(msgspec.Struct, frozen=True):
    """The lowest byte of a target that differed in a pass: its place in the pool, what it held and should have held."""

    byte: int
    held: int
    expected: int


class Seen(msgspec.Struct):
    """What a replay saw of one plan.

    ``owners[round]`` maps owners to the lowest byte they misread; ``mismatches`` are bytes of a pool that differ from
    the prediction, as (pool, byte relative to its base, held, predicted), -1 for what was not brought back; ``second``
    are (round, owner) on which the second pair of eyes disagrees; ``lanes`` are accesses that differ from their
    storage, in either direction; ``folds`` are the folds by (pool, round, digit); ``missing`` are the tables whose
    missing pages lead to bytes that are not 0.
    """

    owners: list[dict[int, Misread]]
    mismatches: list[tuple[int, int, int, int]]
    second: list[tuple[int, int]]
    lanes: list[int]
    folds: dict[tuple[int, int, int], int]
    missing: list[int]
    compared_on_host: bool = False

    @property
    def clean(self) -> bool:
        """Whether nothing differs."""
        return not (any(self.owners) or self.mismatches or self.second or self.lanes or self.missing)
