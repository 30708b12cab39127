"""Copies carried out on flat torch tensors of bytes, on any device, and packed into messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import torch

from ...sim.transfer.execution import window
from ...sim.transfer.plan import ByteCopy, Copy, Slots, byte_copies
from .runs import Launch, launches_of, runs_of

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


class Prepared:
    """Copies between memories of one device, ready to be carried out any number of times.

    On a GPU they are laid out as runs, for a few launches in all; on a host, and where their order counts, they are
    carried out one by one.
    """

    def __init__(self, moves: Sequence[tuple[ByteCopy, Flat, Flat]]) -> None:
        self.moves = moves
        self.size_bytes = sum(bytes_of(copy) for copy, _, _ in moves)
        self.launches: list[Launch] = []
        if moves and moves[0][1].octets.is_cuda:
            runs = runs_of((copy, address_of(one), address_of(other)) for copy, one, other in moves)
            if runs.disjoint:
                self.launches = launches_of(runs, moves[0][1].octets)

    def run(self) -> int:
        """Carry out the copies; return the bytes written."""
        for launch in self.launches:
            launch.run()
        if not self.launches:
            for copy, one, other in self.moves:
                carry(copy, one, other)
        return self.size_bytes


def prepare(copies: Sequence[Copy], slots: tuple[Slots, Slots], source: Flats, destination: Flats) -> Prepared:
    """Return a plan's copies, ready to be carried out between memories of one device, in its order.

    What would reach past a pool is left out: the simulator has reported it, and memory must not be harmed.
    """
    moves = []
    for copy in byte_copies(copies, *slots):
        one = source[copy.source_rank, copy.source_pool]
        other = destination[copy.destination_rank, copy.destination_pool]
        if inside(copy, one, other):
            moves.append((copy, one, other))
    return Prepared(moves)


def address_of(flat: Flat) -> int:
    """Return the address of byte 0 of a pool."""
    return int(flat.octets.data_ptr()) + flat.before


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


def packing(copies: Sequence[ByteCopy], source: Flats, message: torch.Tensor) -> Prepared:
    """Return what gathers all that ``copies`` read into the front of ``message``."""
    return Prepared([(_to_parcel(copy), _source(copy, source), parcel) for copy, parcel in _parcels(copies, message)])


def unpacking(copies: Sequence[ByteCopy], message: torch.Tensor, destination: Flats) -> Prepared:
    """Return what scatters the front of ``message`` to where ``copies`` write."""
    parcels = _parcels(copies, message)
    return Prepared([(_from_parcel(copy), parcel, _target(copy, destination)) for copy, parcel in parcels])


def _parcels(copies: Sequence[ByteCopy], message: torch.Tensor) -> Iterator[tuple[ByteCopy, Flat]]:
    """Yield copies, each with its place in a message."""
    at = 0
    for copy in copies:
        size = bytes_of(copy)
        yield copy, Flat(message, at, size)
        at += size


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
