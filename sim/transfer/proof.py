"""``prove``: a plan carried out on tags, and every byte of the destination compared with what it should hold.

The source's pools are filled with the logical address of each byte (layer, role, position, head, byte of the row); the
copies are executed; then each pool of the destination must hold, where the request's slots lie, exactly the addresses
that one cache of a single rank would hold there, and nothing anywhere else. A counter beside each byte tells what was
written twice. Bytes that no number of the pools or of the copies tells apart (a granule) share one tag, which loses
nothing: offsets, strides, runs and rows are all multiples of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from ...model.arithmetic import div_up, exact_div
from ...model.errors import SpecError
from ...model.layers import paged_part
from ...model.spec import CacheSpec
from ..finding import Finding
from ..layout import Layout
from .execution import views
from .plan import ByteCopy, Copy, byte_copies
from .truth import NOTHING, Addresses, Name, Plane, Tags, planes_of, sizes_of, tags_of
from .verdicts import Wrong, findings_of

MAX_GRANULES = 1 << 26
"""Most tags of one pool that a proof keeps at once: 512 MiB of them."""

REQUESTS = 2
"""States that a proof moves, each in a slot of its own."""


class StagedRank(msgspec.Struct, frozen=True):
    """One rank of one side: its planes by pool, and the slots of the request by life cycle."""

    layout: Layout
    rank: int
    planes: dict[int, list[Plane]]
    slots: list[list[int]]


class Staging(msgspec.Struct, frozen=True):
    """Two sides with a request in the slots of each, and the addresses that they share.

    ``slots`` are those of the source and those of the destination, as ``byte_copies`` takes them.
    """

    senders: list[StagedRank]
    receivers: list[StagedRank]
    addresses: Addresses
    slots: tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int], list[int]]]


class Writes(msgspec.Struct, frozen=True):
    """A pool of the destination after the copies: what it holds, how often each granule was written, what it should
    hold, and the copies that reach past a pool."""

    held: Tags
    count: np.ndarray
    wanted: Tags
    stray: list[ByteCopy]


def slots_needed(source: CacheSpec, destination: CacheSpec) -> tuple[int, int]:
    """Return how many slots each side needs for ``prove``: for every life cycle of a group its own, and one to spare.

    Life cycles of one group draw slot ids from one allocator, so no two of them hold the same id; there are at most as
    many as there are different windows, and one for states.
    """
    positions = 2 * max(source.tokens_per_block, destination.tokens_per_block)
    needed = []
    for spec in (source, destination):
        paged = [paged_part(layer) for layer in dict.fromkeys(spec.layers + spec.draft.layers)]
        cycles = len({(layer.window, layer.sink_tokens) for layer in paged if layer is not None}) + spec.has_recurrent
        needed.append(max(1, cycles) * max(REQUESTS, div_up(positions, spec.tokens_per_block)) + 1)
    return needed[0], needed[1]


def prove(source: Sequence[Layout], destination: Sequence[Layout], copies: Sequence[Copy]) -> list[Finding]:
    """Return what is wrong in the destination's memory after ``copies``; nothing when every byte arrived once.

    The layouts are those of the ranks that hold the request, with at least ``slots_needed`` slots. Raises ``SpecError``
    for fewer slots, and for pools too large to be tagged.
    """
    staging = stage(source, destination)
    by_rank = {rank.rank: rank for rank in staging.senders}
    by_pool: dict[tuple[int, int], list[Copy]] = {}
    for copy in copies:
        by_pool.setdefault((copy.destination_rank, copy.destination_pool), []).append(copy)
    wrong: list[Wrong] = []
    for rank in staging.receivers:
        for pool in range(len(rank.layout.pools)):
            into = by_pool.get((rank.rank, pool), [])
            writes, granule = _writes(staging, by_rank, rank, pool, into)
            wrong += _compare(rank, pool, writes, staging.addresses, granule)
    return findings_of(wrong)


def stage(source: Sequence[Layout], destination: Sequence[Layout]) -> Staging:
    """Return both sides with a request in their slots; raises as ``prove`` does."""
    tokens = _tokens(source), _tokens(destination)
    counts = [div_up(2 * max(tokens), each) for each in tokens]  # of blocks; the last may be short on one side
    positions = max(count * each for count, each in zip(counts, tokens, strict=True))
    senders = [_rank(layout, counts[0], reverse=True) for layout in source]
    receivers = [_rank(layout, counts[1], reverse=False) for layout in destination]
    everyone = [*senders, *receivers]
    recurrent = {
        plane.name
        for rank in everyone
        for planes in rank.planes.values()
        for plane in planes
        if rank.layout.life_cycles[plane.life_cycle].recurrent
    }
    planes = [plane for rank in everyone for of_pool in rank.planes.values() for plane in of_pool]
    addresses = Addresses(planes, positions, REQUESTS, recurrent)
    slots = [
        {(rank.rank, cycle): slots for rank in side for cycle, slots in enumerate(rank.slots)}
        for side in (senders, receivers)
    ]
    return Staging(senders, receivers, addresses, (slots[0], slots[1]))


def predicted(staging: Staging, rank: StagedRank, pool: int, copies: Sequence[Copy]) -> tuple[Writes, int]:
    """Return what a pool of a destination's rank holds after ``copies`` (of the whole plan), and the bytes of a tag."""
    into = [copy for copy in copies if (copy.destination_rank, copy.destination_pool) == (rank.rank, pool)]
    return _writes(staging, {sender.rank: sender for sender in staging.senders}, rank, pool, into)


def source_tags(staging: Staging, rank: StagedRank, pool: int) -> tuple[Tags, int]:
    """Return the addresses that a pool of a source's rank holds, and the bytes of each."""
    granule = _granule(rank, pool, (), {})
    return _filled(rank, pool, staging.addresses, granule), granule


def _writes(
    staging: Staging, by_rank: dict[int, StagedRank], rank: StagedRank, pool: int, into: Sequence[Copy]
) -> tuple[Writes, int]:
    granule = _granule(rank, pool, into, by_rank)
    absolute = list(byte_copies(into, *staging.slots))
    return _write(rank, pool, absolute, by_rank, staging.addresses, granule), granule


def _tokens(layouts: Sequence[Layout]) -> int:
    spec = layouts[0].spec
    if spec is None:
        raise SpecError("layout", "has no spec, needs one to say what its bytes stand for")
    return spec.tokens_per_block


def _rank(layout: Layout, blocks: int, *, reverse: bool) -> StagedRank:
    """Return one rank with slots for a request of ``blocks``: not in order, and not from slot 0 on both sides."""
    planes: dict[int, list[Plane]] = {}
    for plane in planes_of(layout):
        planes.setdefault(plane.pool, []).append(plane)
    slots = []
    taken: dict[tuple[str, int], int] = {}
    for cycle in layout.life_cycles:
        count = REQUESTS if cycle.recurrent else blocks
        group = (cycle.manager, cycle.group)
        first = taken.get(group, 0 if reverse else 1)
        taken[group] = first + count
        ordered = list(range(count))[::-1] if reverse else [(slot + 1) % count for slot in range(count)]
        slots.append([first + slot for slot in ordered])
    for pool in layout.pools:
        needed = taken.get((pool.manager, pool.group), 0) + reverse
        if pool.slot_count < needed:
            raise SpecError("slots", f"found {pool.slot_count}, needs at least {needed} to prove a transfer")
    return StagedRank(layout, 0 if layout.spec is None else layout.spec.rank, planes, slots)


def _granule(rank: StagedRank, pool: int, copies: Sequence[Copy], senders: dict[int, StagedRank]) -> int:
    """Return the largest number of bytes that stays together in all that has to do with one pool."""
    sizes = [size for plane in rank.planes.get(pool, ()) for size in sizes_of(plane)]
    for key in {(copy.source_rank, copy.source_pool) for copy in copies}:
        sizes += [size for plane in senders[key[0]].planes.get(key[1], ()) for size in sizes_of(plane)]
    for copy in copies:
        sizes += (copy.source_slot_stride, copy.source_offset, copy.destination_slot_stride, copy.destination_offset)
        sizes += (copy.run_bytes, *copy.source_strides, *copy.destination_strides)
    return math.gcd(*sizes) or 1


def _filled(rank: StagedRank, pool: int, addresses: Addresses, granule: int) -> Tags:
    """Return a pool's tags, with the request's slots filled and everything else empty."""
    size_bytes = rank.layout.pools[pool].size_bytes
    granules = div_up(size_bytes, granule)
    if granules > MAX_GRANULES:
        problem = f"makes {granules} tags in one pool, needs at most {MAX_GRANULES}: give fewer tokens per block"
        raise SpecError("tokens_per_block", problem)
    tags: Tags = np.zeros(granules, dtype=np.uint64)
    known: dict[tuple[int, int, int], Tags] = {}
    for plane in rank.planes.get(pool, ()):
        geometry = (id(plane.steps), plane.first_byte, plane.row_bytes)  # alike planes share one object of steps
        start = addresses.start_of[plane.name]
        first = known.get(geometry)
        if first is None:
            first = known[geometry] = tags_of(plane, addresses, granule) - np.uint64(start)
        shape = first.shape
        strides = (*[_units(step, granule) * 8 for step in plane.page.stride_bytes[:-1]], 8)
        for block, slot in enumerate(rank.slots[plane.life_cycle]):
            first_byte = plane.offset_bytes + slot * plane.slot_stride_bytes
            offset = _units(first_byte, granule)
            if first_byte < 0 or first_byte + plane.page.span_bytes > size_bytes:
                raise SpecError("layout", f"layer {plane.name[0]}'s {plane.name[1]} leaves its pool; check it first")
            target = np.ndarray(shape, np.uint64, tags.data, offset * 8, strides)
            address = start + block * plane.block_positions * plane.position_bytes
            np.add(first, np.uint64(address), out=target)
    return tags


def _units(size_bytes: int, granule: int) -> int:
    return exact_div(size_bytes, granule, "bytes in granules")


def _write(
    rank: StagedRank,
    pool: int,
    copies: Sequence[ByteCopy],
    senders: dict[int, StagedRank],
    addresses: Addresses,
    granule: int,
) -> Writes:
    """Return a pool of the destination after the copies into it."""
    wanted = _filled(rank, pool, addresses, granule)
    held: Tags = np.zeros_like(wanted)
    count = np.zeros(wanted.size, dtype=np.uint16)
    sources: dict[tuple[int, int], Tags] = {}
    stray = []
    for copy in copies:
        key = (copy.source_rank, copy.source_pool)
        if key not in sources:
            sources[key] = _filled(senders[key[0]], key[1], addresses, granule)
        reached = views(copy, sources[key], {(rank.rank, pool): held}, granule)
        counted = views(copy, sources[key], {(rank.rank, pool): count}, granule)
        if reached is None or counted is None:
            stray.append(copy)
            continue
        reached[1][...] = reached[0]
        counted[1][...] += np.uint16(1)
    return Writes(held, count, wanted, stray)


def _compare(rank: StagedRank, pool: int, writes: Writes, addresses: Addresses, granule: int) -> Iterator[Wrong]:
    """Yield what is wrong in one pool."""
    for copy in writes.stray:
        yield Wrong("past", rank.layout, pool, copy.destination_offset, copy.run_bytes, None, None)
    if not writes.stray and np.array_equal(writes.held, writes.wanted):
        expected = writes.wanted != NOTHING
        if np.array_equal(writes.count, expected):
            return
    differs = np.flatnonzero((writes.held != writes.wanted) | (writes.count > 1))
    for index in _samples(differs, writes):
        held, wanted, times = int(writes.held[index]), int(writes.wanted[index]), int(writes.count[index])
        found = None if held == NOTHING else addresses.decode(held)
        needed = None if wanted == NOTHING else addresses.decode(wanted)
        yield Wrong(
            "written" if held == wanted and times > 1 else "differs",
            rank.layout,
            pool,
            int(index) * granule,
            granule,
            needed,
            found,
            times,
        )


def _samples(differs: np.ndarray, writes: Writes) -> np.ndarray:
    """Return the granules to report on: all, or where there are many, some from every part of the pool."""
    most = 4096
    if differs.size <= most:
        return differs
    step = div_up(int(differs.size), most)
    return differs[::step]


__all__ = [
    "MAX_GRANULES",
    "REQUESTS",
    "Name",
    "StagedRank",
    "Staging",
    "Writes",
    "predicted",
    "prove",
    "slots_needed",
    "source_tags",
    "stage",
]
