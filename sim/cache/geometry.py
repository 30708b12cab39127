"""``Geometry``: the bytes of a layout in one flat array, by life cycle, slot and token.

All pools lie one after the other with guard bytes between them, and behind them the host tier: an image of every slot
of every group, as many as the device has. Writers find a token's bytes by the address of the consumer that writes the
role (attention op, side-plane view, state view), readers by the view that reads it; both are tables of indices into the
flat array, so that a write or a read of many tokens is one gather.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...model.errors import SpecError
from ..layout import Access, Buffer, Layout
from ..page import Page

GUARD_BYTES: Final = 64
"""Bytes between two pools that nobody may write."""
MAX_BYTES: Final = 16 << 20
"""Bytes of device and host memory that traces run on at most."""

Indices = NDArray[np.intp]
Cells = NDArray[np.int64]

_WRITERS: Final = ("attention-op", "side-plane-view", "state-view")
_READERS: Final = ("kv-view", "block-scale-view", "side-plane-view", "state-view")


class Target(msgspec.Struct, frozen=True):
    """What is stored: a buffer, or a part of a packed one (``part`` -1: none); ``name`` is for messages."""

    buffer: int
    part: int
    layer: int
    role: str


class CycleGeometry(msgspec.Struct, frozen=True):
    """One life cycle: ``tokens`` per slot (1 for recurrent states, whose page is per request).

    ``write`` and ``read`` have a row for each (slot, token), ``slot * tokens + token``: the flat indices of its bytes
    over all layers and roles; ``write_cells`` and ``read_cells`` say for each column which target it belongs to.
    ``inside`` says that no write leaves its pool. ``clears`` are the pages of slot 0: flat start, bytes, pitch to the
    next slot, and pool.
    """

    cycle: int
    group: int
    recurrent: bool
    window: int | None
    sink_blocks: int
    tokens: int
    conv_taps: int
    kv_planes: int
    write: Indices
    write_cells: Cells
    read: Indices
    read_cells: Cells
    inside: bool
    clears: tuple[tuple[int, int, int, int], ...]


class GroupGeometry(msgspec.Struct, frozen=True):
    """Slots with one allocator of ids: ``device`` and ``host`` have a row of flat indices for each slot."""

    manager: str
    slots: int
    device: Indices
    host: Indices


class Geometry(msgspec.Struct, frozen=True):
    """A layout for a running cache. ``pool_starts`` are the flat places of the pools, ``size_bytes`` is all of it."""

    layout: Layout
    tokens_per_block: int
    cycles: tuple[CycleGeometry, ...]
    groups: tuple[GroupGeometry, ...]
    targets: tuple[Target, ...]
    pool_starts: tuple[int, ...]
    host_start: int
    size_bytes: int


def geometry_of(layout: Layout) -> Geometry:
    """Return the geometry of ``layout``; raise ``SpecError`` where traces cannot run on it."""
    spec = layout.spec
    if spec is None:
        raise SpecError("trace", "found a layout without a spec, needs one")
    if not layout.life_cycles or not layout.buffers:
        raise SpecError("spec.layers", "found no layer with a cache on this rank, needs one for a trace")
    starts, size = [], GUARD_BYTES
    for pool in layout.pools:
        starts.append(size)
        size += pool.size_bytes + GUARD_BYTES
    if 2 * size > MAX_BYTES:
        raise SpecError("spec.slots", f"found a layout of {size} B, traces run on at most {MAX_BYTES >> 1} B")
    keys = list(dict.fromkeys((cycle.manager, cycle.group) for cycle in layout.life_cycles))
    host_start = size
    groups = []
    for manager, group in keys:
        device = _slot_rows(layout, manager, group, starts)
        count, width = device.shape
        host = size + np.arange(count * width, dtype=np.intp).reshape(count, width)
        size += count * width
        groups.append(GroupGeometry(manager, count, device, host))
    targets = _targets(layout)
    cycles = []
    for index, cycle in enumerate(layout.life_cycles):
        group = keys.index((cycle.manager, cycle.group))
        cycles.append(_cycle(layout, targets, index, group, groups[group].slots, starts, spec.tokens_per_block))
    return Geometry(
        layout, spec.tokens_per_block, tuple(cycles), tuple(groups), targets, tuple(starts), host_start, size
    )


def _targets(layout: Layout) -> tuple[Target, ...]:
    found = []
    for index, buffer in enumerate(layout.buffers):
        if buffer.parts:
            found += [Target(index, number, part.layer, part.role) for number, part in enumerate(buffer.parts)]
        else:
            found.append(Target(index, -1, buffer.layer, buffer.role))
    return tuple(found)


def _slot_rows(layout: Layout, manager: str, group: int, starts: list[int]) -> Indices:
    """Return the flat indices of all bytes of each slot of a group, padding included where a slot is contiguous."""
    cycles = {
        index for index, cycle in enumerate(layout.life_cycles) if (cycle.manager, cycle.group) == (manager, group)
    }
    pools = [index for index, pool in enumerate(layout.pools) if (pool.manager, pool.group) == (manager, group)]
    members = [buffer for buffer in layout.buffers if buffer.life_cycle in cycles]
    pools = sorted({*pools, *(buffer.pool for buffer in members)})
    slots = min([layout.pools[index].slot_count for index in pools], default=0)
    if slots == 0:
        raise SpecError("spec.slots", "found a group of pools without a slot, needs one for a trace")
    columns: list[Indices] = []
    for index in pools:
        pool, held = layout.pools[index], [buffer for buffer in members if buffer.pool == index]
        if all(buffer.slot_stride_bytes == pool.slot_bytes for buffer in held):
            first = starts[index] + np.arange(pool.slot_bytes, dtype=np.intp)
            columns.append(first[None] + np.arange(slots, dtype=np.intp)[:, None] * pool.slot_bytes)
            continue
        for buffer in held:
            first = starts[index] + buffer.offset_bytes + np.arange(buffer.page_bytes, dtype=np.intp)
            columns.append(first[None] + np.arange(slots, dtype=np.intp)[:, None] * buffer.slot_stride_bytes)
    return np.concatenate(columns, axis=1)


def _cycle(
    layout: Layout,
    targets: tuple[Target, ...],
    index: int,
    group: int,
    slots: int,
    starts: list[int],
    tokens_per_block: int,
) -> CycleGeometry:
    cycle = layout.life_cycles[index]
    tokens = 1 if cycle.recurrent else tokens_per_block
    numbers = [number for number, target in enumerate(targets) if layout.buffers[target.buffer].life_cycle == index]
    if not numbers:
        raise SpecError("trace", "found a life cycle without a buffer, needs one for a trace")
    by_target: dict[tuple[int, int], list[Access]] = {}
    for access in layout.accesses:
        by_target.setdefault((access.buffer, access.part), []).append(access)
    tables = []
    for consumers in (_WRITERS, _READERS):
        columns, cells = [], []
        for number in numbers:
            target = targets[number]
            accesses = by_target.get((target.buffer, target.part), [])
            name = next((name for name in consumers if any(entry.consumer == name for entry in accesses)), None)
            chosen = [entry for entry in accesses if entry.consumer == name]
            rows = _rows(layout, target, chosen, slots, tokens, starts)
            columns.append(rows)
            cells.append(np.full(rows.shape[1], number, dtype=np.int64))
        tables += [np.concatenate(columns, axis=1), np.concatenate(cells)]
    buffers = [buffer for buffer in layout.buffers if buffer.life_cycle == index]
    clears = tuple([(starts[b.pool] + b.offset_bytes, b.page_bytes, b.slot_stride_bytes, b.pool) for b in buffers])
    taps = [shape for b in buffers if b.role == "conv_state" for shape in b.page.shape[-1:]]
    planes = 2 if any(b.role == "value" for b in buffers) else 1
    return CycleGeometry(
        index,
        group,
        cycle.recurrent,
        cycle.window,
        cycle.sink_blocks,
        tokens,
        max(taps, default=0),
        planes,
        tables[0],
        tables[1],
        tables[2],
        tables[3],
        bool((tables[0] > 0).all()),
        clears,
    )


def _rows(
    layout: Layout, target: Target, accesses: list[Access], slots: int, tokens: int, starts: list[int]
) -> Indices:
    """Return the flat indices of a target's bytes for every (slot, token), as its consumer reaches them.

    A slot that the consumer does not reach is found where the storage has it; a byte outside of the pool is guard
    byte 0, which nobody may write.
    """
    buffer = layout.buffers[target.buffer]
    stored = buffer.page if target.part < 0 else buffer.parts[target.part].page
    shift = 0 if target.part < 0 else buffer.parts[target.part].offset_bytes
    page, pool = (accesses[0].page, accesses[0].pool) if accesses else (stored, buffer.pool)
    first = [buffer.offset_bytes + shift + slot * buffer.slot_stride_bytes for slot in range(slots)]
    for access in accesses:
        for cell in range(access.cell_count):
            slot = access.first_slot + cell * access.slot_step
            if 0 <= slot < slots:
                first[slot] = access.offset_bytes + cell * access.pitch_bytes
    inner = _token_rows(page, buffer, tokens)
    places = np.array(first, dtype=np.intp)[:, None, None] + inner[None]
    outside = (places < 0) | (places >= layout.pools[pool].size_bytes)
    flat = np.where(outside, 0, places + starts[pool])
    rows: Indices = flat.reshape(slots * tokens, -1).astype(np.intp)
    return rows


def _token_rows(page: Page, buffer: Buffer, tokens: int) -> Indices:
    """Return a row of byte offsets from the page's start for each token of a block."""
    offsets = np.zeros((1,) * len(page.shape), dtype=np.intp)
    for axis, (size, stride) in enumerate(zip(page.shape, page.stride_bytes, strict=True)):
        shape = [1] * len(page.shape)
        shape[axis] = size
        offsets = offsets + (np.arange(size, dtype=np.intp) * stride).reshape(shape)
    containers = offsets[..., None] + np.arange(page.format.container_bytes, dtype=np.intp)
    if tokens == 1 and "token" not in page.axes:
        rows: Indices = containers.reshape(1, -1)
        return rows
    if "token" not in page.axes:
        raise SpecError("trace", f"layer {buffer.layer}'s {buffer.role} has no token axis, needs one for a trace")
    leading = [page.axes.index("page")] if "page" in page.axes else []
    axes = [*leading, page.axes.index("token")]
    moved = np.moveaxis(containers, axes, range(len(axes)))
    held = int(np.prod(moved.shape[: len(axes)]))
    if held != tokens:
        problem = f"layer {buffer.layer}'s {buffer.role} has pages of {held} tokens, needs {tokens} for a trace"
        raise SpecError("trace", problem)
    return moved.reshape(tokens, -1)
