"""Copies carried out on flat torch tensors of bytes, on any device, and packed into messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import torch

from ...sim.transfer.execution import window
from ...sim.transfer.plan import ByteCopy, Copy, Slots, byte_copies
from ..pages.copying import Side, copy_between

MESSAGE_BYTES: Final = 16 << 20
"""Bytes of one message between two ranks at most."""
_WIDTHS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))


class Flat(msgspec.Struct, frozen=True):
    """A pool in memory: a tensor of bytes, where byte 0 of the pool lies in it, and the pool's size."""

    octets: Any
    before: int
    size_bytes: int


Flats: TypeAlias = Mapping[tuple[int, int], Flat]
"""Pools by (rank, pool)."""


def carry_out(copies: Sequence[Copy], slots: tuple[Slots, Slots], source: Flats, destination: Flats) -> int:
    """Carry out a plan between memories of one device, in its order; return the bytes written.

    What would reach past a pool is left out: the simulator has reported it, and memory must not be harmed. A GPU takes
    one launch for all blocks of a copy.
    """
    written = 0
    for copy in copies:
        one = source[copy.source_rank, copy.source_pool]
        other = destination[copy.destination_rank, copy.destination_pool]
        blocks = [block for block in byte_copies([copy], *slots) if inside(block, one, other)]
        written += len(blocks) * copy.size_bytes
        if not one.octets.is_cuda or len(copy.counts) > 2:
            for block in blocks:
                carry(block, one, other)
        elif blocks:
            launch(copy, blocks, one, other)
    return written


def launch(copy: Copy, blocks: Sequence[ByteCopy], source: Flat, destination: Flat) -> None:
    """Carry out one copy for all of its ``blocks`` with the kernel for pages; a block stands for a slot."""
    sides, numbers = [], []
    for flat, strides, step, first in (
        (source, copy.source_strides, copy.source_slot_stride, copy.source_offset),
        (destination, copy.destination_strides, copy.destination_slot_stride, copy.destination_offset),
    ):
        sides.append(Side(flat.octets, flat.before + first, (step, *strides, 1)))
        offsets = [block.source_offset if flat is source else block.destination_offset for block in blocks]
        slots = [(offset - first) // step if step else 0 for offset in offsets]  # floor: exact, whole slots
        numbers.append(torch.tensor(slots, dtype=torch.int32, device=flat.octets.device))
    copy_between((*copy.counts, copy.run_bytes), sides[0], sides[1], numbers[0], numbers[1], 1)


def inside(copy: ByteCopy, source: Flat, destination: Flat) -> bool:
    """Say whether a copy stays inside both pools."""
    for flat, offset, strides in (
        (source, copy.source_offset, copy.source_strides),
        (destination, copy.destination_offset, copy.destination_strides),
    ):
        span = copy.run_bytes + sum((count - 1) * step for count, step in zip(copy.counts, strides, strict=True))
        if offset < 0 or offset + span > flat.size_bytes:
            return False
    return True


def carry(copy: ByteCopy, source: Flat, destination: Flat) -> None:
    """Carry out one copy, which stays inside both pools: by NumPy on a host, by torch on a GPU."""
    (carry_by_torch if source.octets.is_cuda else carry_by_numpy)(copy, source, destination)


def carry_by_numpy(copy: ByteCopy, source: Flat, destination: Flat) -> None:
    """Carry out one copy in host memory; raise ``IndexError`` where it leaves the memory."""
    taken, given = (
        window(flat.octets.numpy(), flat.before + offset, copy.run_bytes, copy.counts, strides, 1)
        for flat, offset, strides in (
            (source, copy.source_offset, copy.source_strides),
            (destination, copy.destination_offset, copy.destination_strides),
        )
    )
    if taken is None or given is None:
        raise IndexError(f"{copy} reaches past the end of its memory")
    given[...] = taken


def carry_by_torch(copy: ByteCopy, source: Flat, destination: Flat) -> None:
    """Carry out one copy on any device, in the widest words that all of its numbers allow."""
    numbers = (
        source.before + copy.source_offset,
        destination.before + copy.destination_offset,
        copy.run_bytes,
        *copy.source_strides,
        *copy.destination_strides,
    )
    width, kind = _widest(numbers)
    taken = _strided(source, copy.source_offset, copy.source_strides, copy, width, kind)
    _strided(destination, copy.destination_offset, copy.destination_strides, copy, width, kind).copy_(taken)


def _widest(numbers: Iterable[int]) -> tuple[int, torch.dtype]:
    together = 0
    for number in numbers:
        together |= number
    return next((width, kind) for width, kind in _WIDTHS if not together % width)


def _strided(
    flat: Flat, offset: int, strides: tuple[int, ...], copy: ByteCopy, width: int, kind: torch.dtype
) -> torch.Tensor:
    """Return what a copy reaches of one side, as a view of the pool's memory."""
    octets = flat.octets
    words = octets[: octets.numel() - octets.numel() % width].view(kind)
    shape = (*copy.counts, copy.run_bytes // width)  # floor: the width divides all numbers
    steps = (*[stride // width for stride in strides], 1)  # floor: likewise
    start = (flat.before + offset) // width  # floor: likewise
    view: torch.Tensor = words.as_strided(shape, steps, start + words.storage_offset())
    return view


def messages(copies: Iterable[ByteCopy], limit_bytes: int = MESSAGE_BYTES) -> Iterator[list[ByteCopy]]:
    """Yield ``copies`` in order, together at most ``limit_bytes`` at a time; one that is larger is cut."""
    held: list[ByteCopy] = []
    size = 0
    for copy in copies:
        for part in _cut(copy, limit_bytes):
            if held and size + bytes_of(part) > limit_bytes:
                yield held
                held, size = [], 0
            held.append(part)
            size += bytes_of(part)
    if held:
        yield held


def bytes_of(copy: ByteCopy) -> int:
    """Return the bytes that a copy moves."""
    size = copy.run_bytes
    for count in copy.counts:
        size *= count
    return size


def _cut(copy: ByteCopy, limit_bytes: int) -> Iterator[ByteCopy]:
    """Yield pieces of at most ``limit_bytes`` that together are ``copy``."""
    if bytes_of(copy) <= limit_bytes:
        yield copy
    elif copy.counts:
        for index in range(copy.counts[0]):
            yield from _cut(_part(copy, index), limit_bytes)
    else:
        for start in range(0, copy.run_bytes, limit_bytes):
            size = min(limit_bytes, copy.run_bytes - start)
            ends = copy.source_offset + start, copy.destination_offset + start
            yield msgspec.structs.replace(copy, source_offset=ends[0], destination_offset=ends[1], run_bytes=size)


def _part(copy: ByteCopy, index: int) -> ByteCopy:
    return msgspec.structs.replace(
        copy,
        source_offset=copy.source_offset + index * copy.source_strides[0],
        destination_offset=copy.destination_offset + index * copy.destination_strides[0],
        counts=copy.counts[1:],
        source_strides=copy.source_strides[1:],
        destination_strides=copy.destination_strides[1:],
    )


def pack(copies: Sequence[ByteCopy], source: Flats, message: torch.Tensor) -> int:
    """Gather what ``copies`` read into the front of ``message``; return the bytes."""
    return _through(copies, message, lambda copy, parcel: carry(_to_parcel(copy), _source(copy, source), parcel))


def unpack(copies: Sequence[ByteCopy], message: torch.Tensor, destination: Flats) -> int:
    """Scatter the front of ``message`` to where ``copies`` write; return the bytes."""
    return _through(copies, message, lambda copy, parcel: carry(_from_parcel(copy), parcel, _target(copy, destination)))


def _through(copies: Sequence[ByteCopy], message: torch.Tensor, move: Any) -> int:
    at = 0
    for copy in copies:
        size = bytes_of(copy)
        move(copy, Flat(message, at, size))
        at += size
    return at


def _source(copy: ByteCopy, source: Flats) -> Flat:
    return source[copy.source_rank, copy.source_pool]


def _target(copy: ByteCopy, destination: Flats) -> Flat:
    return destination[copy.destination_rank, copy.destination_pool]


def _dense(copy: ByteCopy) -> tuple[int, ...]:
    strides, step = [], copy.run_bytes
    for count in reversed(copy.counts):
        strides.append(step)
        step *= count
    return tuple(reversed(strides))


def _to_parcel(copy: ByteCopy) -> ByteCopy:
    return msgspec.structs.replace(copy, destination_offset=0, destination_strides=_dense(copy))


def _from_parcel(copy: ByteCopy) -> ByteCopy:
    return msgspec.structs.replace(copy, source_offset=0, source_strides=_dense(copy))
