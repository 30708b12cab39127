"""A foreign allocator: a slab per attention window; in it a slot per block of tokens; in that, per layer, K and V."""

from __future__ import annotations

import kvsan
from kvsan.model.arithmetic import round_up
from kvsan.model.layers import AttentionLayer, Layer
from kvsan.model.parallel import rank_heads
from kvsan.model.rank import manager_layers
from kvsan.sim.layout import Buffer, LifeCycle, Pool
from kvsan.sim.page import Page, kv_page


def allocate(spec: kvsan.CacheSpec) -> kvsan.Layout:
    """Return where every K and V page of this rank lies."""
    slots, align = spec.slots, max(16, spec.consumer.alignment_bytes)
    if slots is None:
        raise kvsan.Rejected("slabs are sized in slots, not in bytes", "give --slots", supported=False)
    pools: list[Pool] = []
    life_cycles: list[LifeCycle] = []
    buffers: list[Buffer] = []
    for manager in manager_layers(spec):
        slabs: dict[int | None, list[tuple[int, AttentionLayer]]] = {}
        for held in manager.layers:
            layer = supported(held.layer, spec)
            slabs.setdefault(layer.window, []).append((held.index, layer))
        for group, (window, layers) in enumerate(slabs.items()):
            placed, slot_bytes = [], 0
            for index, layer in layers:
                page = page_of(layer, spec)
                pair_bytes = round_up(2 * page.span_bytes, align)
                value_at = pair_bytes // 2 // align * align  # V in the second half, aligned for vector loads
                placed.append((index, "key", slot_bytes, value_at, page))
                placed.append((index, "value", slot_bytes + value_at, pair_bytes - value_at, page))
                slot_bytes += pair_bytes
            for index, role, offset, page_bytes, page in placed:
                where = len(life_cycles), len(pools), offset, slot_bytes, slots
                buffers.append(Buffer(manager.name, index, role, *where, page_bytes, page))
            pools.append(Pool(manager.name, group, 0, slots, slot_bytes, slots * slot_bytes, align))
            life_cycles.append(LifeCycle(manager.name, group, window=window))
    return kvsan.Layout(
        allocator="slab", pools=tuple(pools), life_cycles=tuple(life_cycles), buffers=tuple(buffers), spec=spec
    )


def page_of(layer: AttentionLayer, spec: kvsan.CacheSpec) -> Page:
    """Return the K page, or the V page, of one block of tokens on one rank."""
    heads = rank_heads(layer.kv_heads, spec.parallel.attention_tp)
    element, order = layer.kv_format or spec.kv_format, spec.consumer.kv_layout
    return kv_page(element, heads, spec.tokens_per_block, layer.head_dim, order)


def supported(layer: Layer, spec: kvsan.CacheSpec) -> AttentionLayer:
    """Return a layer that slabs can hold; refuse any other, naming the way out."""
    if not isinstance(layer, AttentionLayer) or layer.side_planes or layer.sink_tokens:
        raise kvsan.Rejected("slabs hold K and V pages only", "use plain attention layers", supported=False)
    if (layer.kv_format or spec.kv_format).block_scaled or layer.tokens_per_block:
        raise kvsan.Rejected("slabs have no block scales and one block size", "use --kv-dtype fp8", supported=False)
    if layer.value_dim != layer.head_dim:
        raise kvsan.Rejected("K and V pages must be of one size", "pad the smaller head dim", supported=False)
    return layer
