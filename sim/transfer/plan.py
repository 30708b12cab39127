"""``Plan``: what one transfer moves, as plain numbers that any executor can follow.

A ``Copy`` holds for every block; ``byte_copies`` turns it into absolute places once the slots are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from ..finding import Finding

Slots: TypeAlias = Mapping[tuple[int, int], Sequence[int]]
"""The slots of a request by (rank, life cycle), in the order of its blocks; one slot for a state."""


class Copy(msgspec.Struct, frozen=True, gc=False):
    """``run_bytes`` at a time from one pool to another, repeated along ``counts`` with the strides of each side.

    Offsets count from the pool's base in slot 0. Every ``source_blocks`` blocks of the source hold the tokens of
    ``destination_blocks`` blocks of the destination; the copy is about number ``source_block`` and
    ``destination_block`` of them. ``label`` names what is moved, for the reader of a plan.
    """

    source_rank: int
    source_pool: int
    source_life_cycle: int
    source_slot_stride: int
    source_offset: int
    destination_rank: int
    destination_pool: int
    destination_life_cycle: int
    destination_slot_stride: int
    destination_offset: int
    run_bytes: int
    counts: tuple[int, ...] = ()
    source_strides: tuple[int, ...] = ()
    destination_strides: tuple[int, ...] = ()
    source_block: int = 0
    destination_block: int = 0
    source_blocks: int = 1
    destination_blocks: int = 1
    label: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes that one execution moves."""
        size = self.run_bytes
        for count in self.counts:
            size *= count
        return size


class ByteCopy(msgspec.Struct, frozen=True, gc=False):
    """A copy between absolute places: offsets count from the base of the two pools."""

    source_rank: int
    source_pool: int
    source_offset: int
    destination_rank: int
    destination_pool: int
    destination_offset: int
    run_bytes: int
    counts: tuple[int, ...]
    source_strides: tuple[int, ...]
    destination_strides: tuple[int, ...]


class Plan(msgspec.Struct, frozen=True):
    """The copies of a transfer, or why there is none. ``refusals`` and ``copies`` are never both there."""

    copies: tuple[Copy, ...] = ()
    refusals: tuple[Finding, ...] = ()


def byte_copies(copies: Sequence[Copy], source: Slots, destination: Slots) -> Iterator[ByteCopy]:
    """Yield the copies of a request, block by block, that holds ``source`` slots and is given ``destination`` slots.

    Where one side has fewer blocks, what has no counterpart is left out: a last block may be short.
    """
    for copy in copies:
        held = source[copy.source_rank, copy.source_life_cycle]
        given = destination[copy.destination_rank, copy.destination_life_cycle]
        froms = held[copy.source_block :: copy.source_blocks]
        tos = given[copy.destination_block :: copy.destination_blocks]
        for from_slot, to_slot in zip(froms, tos, strict=False):  # a last block may be short
            yield ByteCopy(
                copy.source_rank,
                copy.source_pool,
                copy.source_offset + from_slot * copy.source_slot_stride,
                copy.destination_rank,
                copy.destination_pool,
                copy.destination_offset + to_slot * copy.destination_slot_stride,
                copy.run_bytes,
                copy.counts,
                copy.source_strides,
                copy.destination_strides,
            )


def merged(copies: list[Copy]) -> tuple[Copy, ...]:
    """Return ``copies`` with neighbours that continue each other on both sides made one."""
    result: list[Copy] = []
    for copy in sorted(copies, key=_order):
        last = result[-1] if result else None
        if last is not None and _continues(last, copy):
            size = last.run_bytes + copy.run_bytes
            label = last.label if last.label.endswith(" ...") else f"{last.label} ..."
            result[-1] = msgspec.structs.replace(last, run_bytes=size, label=label)
        else:
            result.append(copy)
    return tuple(result)


def _order(copy: Copy) -> tuple[int, ...]:
    return (
        copy.source_rank,
        copy.destination_rank,
        copy.source_pool,
        copy.destination_pool,
        copy.source_block,
        copy.destination_block,
        copy.source_offset,
        copy.destination_offset,
    )


def _continues(last: Copy, copy: Copy) -> bool:
    return (
        not last.counts
        and not copy.counts
        and last.source_offset + last.run_bytes == copy.source_offset
        and last.destination_offset + last.run_bytes == copy.destination_offset
        and last.source_slot_stride == copy.source_slot_stride
        and last.destination_slot_stride == copy.destination_slot_stride
        and (last.source_life_cycle, last.destination_life_cycle)
        == (copy.source_life_cycle, copy.destination_life_cycle)
        and (last.source_blocks, last.destination_blocks) == (copy.source_blocks, copy.destination_blocks)
        and _order(last)[:6] == _order(copy)[:6]
    )
