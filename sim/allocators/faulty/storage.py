"""Faults of the storage: pages on each other, pages too small, pages for too few heads."""

from __future__ import annotations

import msgspec

from ....model.formats import ElementFormat
from ....model.layers import AttentionLayer, HybridLayer, Layer
from ....model.rank import manager_layers
from ....model.spec import CacheSpec
from ...layout import KEY, SIDE_PLANES, VALUE, Buffer, HeadMap, Layout, Pool
from ...page import dense_page
from ..trtllm.allocators import allocate_dense, allocate_qsa_packed
from ..trtllm.heads import head_maps
from .bases import sound_layout


def allocate_canary(spec: CacheSpec) -> Layout:
    """Return the V2 layout with every V page on top of its K page."""
    layout = sound_layout(spec, "fault:canary", allocate_dense)
    key_offset: dict[tuple[str, int], int] = {}
    buffers = []
    for buffer in layout.buffers:
        if buffer.role == KEY:
            key_offset[buffer.manager, buffer.layer] = buffer.offset_bytes
        elif buffer.role == VALUE:
            buffer = msgspec.structs.replace(buffer, offset_bytes=key_offset[buffer.manager, buffer.layer])
        buffers.append(buffer)
    return msgspec.structs.replace(layout, allocator="fault:canary", buffers=tuple(buffers))


def allocate_drop_role_from_plane(spec: CacheSpec) -> Layout:
    """Return the packed QSA layout whose packed page has no room for its last role.

    Only a page with other roles in front can lose one; any other layout is the sound one.
    """
    layout = sound_layout(spec, "fault:drop-role-from-plane", allocate_qsa_packed)
    buffers, pools, pitches = list(layout.buffers), list(layout.pools), {}
    for index, buffer in enumerate(layout.buffers):
        forgotten = _last_role_bytes(buffer)
        if buffer.role != SIDE_PLANES or forgotten == buffer.page_bytes:
            continue
        buffers[index], pools[buffer.pool] = _without_last_bytes(buffer, pools[buffer.pool], forgotten)
        pitches[index] = buffers[index].slot_stride_bytes
    accesses = [
        msgspec.structs.replace(access, pitch_bytes=pitches[access.buffer]) if access.buffer in pitches else access
        for access in layout.accesses
    ]
    return msgspec.structs.replace(
        layout,
        allocator="fault:drop-role-from-plane",
        buffers=tuple(buffers),
        pools=tuple(pools),
        accesses=tuple(accesses),
    )


def _last_role_bytes(buffer: Buffer) -> int:
    """Return the bytes of a packed page that belong to the role of its last plane."""
    return sum(part.page.span_bytes for part in buffer.parts if part.role == buffer.parts[-1].role)


def _without_last_bytes(buffer: Buffer, pool: Pool, forgotten: int) -> tuple[Buffer, Pool]:
    """Return the packed page and its pool with ``forgotten`` bytes less."""
    page_bytes = buffer.page_bytes - forgotten
    page = dense_page(ElementFormat.UINT8, ("byte",), (page_bytes,))
    smaller = msgspec.structs.replace(pool, slot_bytes=page_bytes, size_bytes=page_bytes * pool.slot_count)
    return msgspec.structs.replace(buffer, slot_stride_bytes=page_bytes, page_bytes=page_bytes, page=page), smaller


def floored_heads(heads: int, ranks: int) -> int:
    """Return heads per rank rounded down, and at least one."""
    return max(1, heads // ranks)  # floor: this is the fault


def allocate_heads_floor(spec: CacheSpec) -> Layout:
    """Return the V2 layout of a model with only as many KV heads as rounding down leaves on all ranks together."""
    ranks = spec.parallel.attention_tp
    known: dict[Layer, Layer] = {}

    def fewer(layer: Layer) -> Layer:
        if layer not in known:
            known[layer] = _fewer_heads(layer, ranks)
        return known[layer]

    draft = msgspec.structs.replace(spec.draft, layers=tuple(map(fewer, spec.draft.layers)))
    poorer = msgspec.structs.replace(spec, layers=tuple(map(fewer, spec.layers)), draft=draft)
    layout = sound_layout(poorer, "fault:heads-floor", allocate_dense)
    maps = [_floored(entry) for manager in manager_layers(spec) for entry in head_maps(manager, spec)]
    return msgspec.structs.replace(layout, allocator="fault:heads-floor", spec=spec, head_maps=tuple(maps))


def _fewer_heads(layer: Layer, ranks: int) -> Layer:
    if isinstance(layer, HybridLayer):
        return msgspec.structs.replace(layer, attention=_fewer_heads(layer.attention, ranks))
    if not isinstance(layer, AttentionLayer) or layer.kv_heads < ranks:
        return layer
    return msgspec.structs.replace(layer, kv_heads=floored_heads(layer.kv_heads, ranks) * ranks)


def _floored(entry: HeadMap) -> HeadMap:
    """Return a head map with the heads per rank rounded down; replicated heads stay as they are."""
    ranks = len(entry.ranges)
    if entry.heads < ranks:
        return entry
    each = floored_heads(entry.heads, ranks)
    ranges = tuple([(rank * each, (rank + 1) * each) for rank in range(ranks)])
    return msgspec.structs.replace(entry, rank_heads=each, ranges=ranges)
