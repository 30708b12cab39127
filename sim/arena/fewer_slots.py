"""The arena's memory, bounded before it is taken: ``arena_bytes``, and ``with_fewer_slots`` for what does not fit.

A layout is cut down in one of two ways. Where its allocator is one of ours and really gives this layout for its spec,
the allocator is asked again for fewer slots: offsets that depend on the number of slots (states laid out layer by
layer) come out right. Any other layout keeps its offsets and strides, and only its slot-major groups lose slots: every
buffer steps by the slot's bytes there, so that the pool's tail is its last slots. Pools that are not slot-major stay
whole.
"""

from __future__ import annotations

import msgspec

from ...model.errors import SpecError
from ..layout import Access, Buffer, Layout, Pool
from ..registry import ALLOCATORS, allocate
from ..rejection import Rejected
from ..rules.rule import pool_name
from .owners import GroupKey, OwnerTable, owner_table
from .views import ByteView, access_bytes

OFFSET_BYTES = 24
"""Bytes of index arithmetic per byte of a page with gaps: a place, its sorted order, and one being copied."""
CELL_BYTES = 24
"""Bytes of arithmetic per cell of a view: its number, a digit of it, and a distance."""
CHUNK_BYTES = 1 << 18
"""Bytes of a pool that are compared with their prediction at a time."""


class _Cost(msgspec.Struct, frozen=True):
    """Bytes of arena that a pool takes: per byte, per slot for the largest view, per byte of a chunk, and once."""

    per_byte: int
    per_slot: int
    per_chunk_byte: int
    once: int

    def slots(self, slot_bytes: int, max_bytes: int) -> int:
        """Return how many slots of ``slot_bytes`` fit; a chunk is no larger than the pool, nor than ``CHUNK_BYTES``."""
        left, each = max_bytes - self.once, slot_bytes * self.per_byte + self.per_slot
        with_chunk = (left - self.per_chunk_byte * CHUNK_BYTES) // max(1, each)  # floor: only whole slots
        small = left // max(1, each + slot_bytes * self.per_chunk_byte)  # floor: only whole slots
        return max(with_chunk, small)


def arena_bytes(layout: Layout) -> int:
    """Return the most NumPy memory in bytes that an arena of ``layout`` takes at a time: pools go one by one."""
    table = owner_table(layout)
    pool_views = _views(layout, table)
    most = 0
    for pool, cost, views in zip(layout.pools, _costs(table, pool_views), pool_views, strict=True):
        checked = 0
        for view in views:
            cells = view.inside(pool.size_bytes)
            checked = max(checked, (cells.stop - cells.start) * (view.cell_bytes + CELL_BYTES))
        chunk = cost.per_chunk_byte * min(CHUNK_BYTES, pool.size_bytes)
        most = max(most, pool.size_bytes * cost.per_byte + checked + chunk + cost.once)
    return most


def with_fewer_slots(layout: Layout, max_bytes: int) -> Layout:
    """Return ``layout`` with as many slots as an arena of ``max_bytes`` holds: itself where it fits.

    A note says what was cut. Raises ``SpecError`` where not even one slot fits, or nothing can be cut.
    """
    if arena_bytes(layout) <= max_bytes:
        return layout
    slots = _slots_that_fit(layout, max_bytes)
    cut = with_slots(layout, slots, f"an arena of {max_bytes} B")
    needed = arena_bytes(cut)
    if needed > max_bytes:
        raise SpecError("layout", f"found pools whose bytes need {needed} B of arena, needs at most {max_bytes} B")
    return cut


def with_slots(layout: Layout, slots: dict[GroupKey, int], memory: str) -> Layout:
    """Return ``layout`` with at most ``slots`` slots in each (manager, group), where that can be cut.

    A note says what was cut, and that ``memory`` is why.
    """
    cut = _allocated_again(layout, slots)
    if cut is None:
        cut = _cut(layout, slots)
    counts = [
        f"{pool_name(now)} has {now.slot_count} slots instead of {pool.slot_count}"
        for pool, now in zip(layout.pools, cut.pools, strict=True)
        if now.slot_count != pool.slot_count
    ]
    note = f"{memory} holds fewer slots than asked for: {', '.join(counts)}"
    return msgspec.structs.replace(cut, notes=(*cut.notes, note))


def _costs(table: OwnerTable, pool_views: list[set[ByteView]]) -> list[_Cost]:
    """Return what an arena of each pool takes: a shadow per round, the bytes, and what checking one view copies."""
    costs = []
    for views, rounds in zip(pool_views, table.rounds, strict=True):
        cell = max([view.cell_bytes for view in views], default=0)
        gaps = max([view.cell_bytes for view in views if view.axes], default=0)
        per_byte = 1 + table.number_bytes * max(1, len(rounds))
        costs.append(_Cost(per_byte, cell + CELL_BYTES, 2 + table.number_bytes, OFFSET_BYTES * gaps))
    return costs


def _views(layout: Layout, table: OwnerTable) -> list[set[ByteView]]:
    """Return the views that are written or read in each pool."""
    views: list[set[ByteView]] = [set() for _ in layout.pools]
    for view in (*[owner.view for owner in table.owners], *[access_bytes(access) for access in layout.accesses]):
        views[view.pool].add(view)
    return views


def _slots_that_fit(layout: Layout, max_bytes: int) -> dict[GroupKey, int]:
    """Return the slots that every pool of a group has room for; at least 1."""
    slots: dict[GroupKey, int] = {}
    table = owner_table(layout)
    for pool, cost in zip(layout.pools, _costs(table, _views(layout, table)), strict=True):
        fit = min(pool.slot_count, cost.slots(pool.slot_bytes, max_bytes))
        if fit < 1:
            raise SpecError(
                "layout",
                f"found {pool_name(pool)} with slots of {pool.slot_bytes} B, and not one fits {max_bytes} B of arena",
            )
        key = (pool.manager, pool.group)
        slots[key] = min(slots.get(key, fit), fit)
    return slots


def _allocated_again(layout: Layout, slots: dict[GroupKey, int]) -> Layout | None:
    """Return what the allocator gives for fewer slots, or None where it is not ours or did not give this layout."""
    spec = layout.spec
    if spec is None or layout.allocator not in [entry.name for entry in ALLOCATORS]:
        return None
    recurrent = {(cycle.manager, cycle.group): True for cycle in layout.life_cycles if cycle.recurrent}
    recurrent.update({(cycle.manager, cycle.group): False for cycle in layout.life_cycles if not cycle.recurrent})
    paged = min([count for key, count in slots.items() if not recurrent.get(key)], default=None)
    states = min([count for key, count in slots.items() if recurrent.get(key)], default=None)
    cut = msgspec.structs.replace(spec, slots=paged or states or 1, state_slots=states, quota_bytes=None)
    try:
        if allocate(spec, layout.allocator) != layout:
            return None
        return allocate(cut, layout.allocator)
    except Rejected:
        return None


def _cut(layout: Layout, slots: dict[GroupKey, int]) -> Layout:
    """Return ``layout`` with fewer slots in the groups whose pools are all slot-major, offsets unchanged."""
    rigid = {
        (pool.manager, pool.group) for pool in layout.pools if pool.size_bytes != pool.slot_count * pool.slot_bytes
    }
    for buffer in layout.buffers:
        pool = layout.pools[buffer.pool]
        if buffer.slot_stride_bytes != pool.slot_bytes or buffer.offset_bytes < 0:
            rigid.add((pool.manager, pool.group))
    counts = [
        pool.slot_count if (pool.manager, pool.group) in rigid else slots[pool.manager, pool.group]
        for pool in layout.pools
    ]
    pools = tuple([_cut_pool(pool, count) for pool, count in zip(layout.pools, counts, strict=True)])
    buffers = tuple([_cut_buffer(buffer, layout.pools[buffer.pool], counts[buffer.pool]) for buffer in layout.buffers])
    cut = [_cut_access(access, layout.buffers[access.buffer], buffers[access.buffer]) for access in layout.accesses]
    accesses = tuple([access for access in cut if access.cell_count])
    return msgspec.structs.replace(layout, pools=pools, buffers=buffers, accesses=accesses)


def _cut_pool(pool: Pool, count: int) -> Pool:
    lost = (pool.slot_count - count) * pool.slot_bytes
    return msgspec.structs.replace(pool, slot_count=count, size_bytes=pool.size_bytes - lost)


def _cut_buffer(buffer: Buffer, pool: Pool, count: int) -> Buffer:
    """Return ``buffer`` with the pool's slots; slots that the pool never had are a fault, and stay."""
    beyond = max(0, buffer.slot_count - pool.slot_count)
    return msgspec.structs.replace(buffer, slot_count=min(buffer.slot_count, count + beyond))


def _cut_access(access: Access, before: Buffer, after: Buffer) -> Access:
    """Return ``access`` with the cells of slots that are left, and as many beyond the buffer's as it had."""
    if before.slot_count == after.slot_count or access.slot_step <= 0:
        return access
    had = len(range(access.first_slot, before.slot_count, access.slot_step))
    left = len(range(access.first_slot, after.slot_count, access.slot_step))
    beyond = max(0, access.cell_count - had)
    return msgspec.structs.replace(access, cell_count=min(access.cell_count - beyond, left) + beyond)
