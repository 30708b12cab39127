"""TensorRT-LLM KVCacheManager (V1): block pools by window and KV head count, recurrent states layer by layer.

Attention: one block manager per attention window, with block ids of its own; inside it one pool per KV head count,
ascending,

    [blocks, layers of the pool, kv_factor, block bytes]          block bytes = heads * tokens * dim * bits / 8

so that block b of the pool's j-th layer starts at ``(b * layers + j) * kv_factor * block bytes``. NVFP4 has a scale
pool beside each data pool and
an indexer pool holds DSA's index keys, both with the same block ids and layer ordinals.

Recurrent states: one pool, layer-major, ``[layers, blocks, temporal bytes + convolution bytes]``.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ....model.cost import block_bytes
from ....model.layers import AttentionLayer, LatentLayer, paged_part, recurrent_part
from ....model.rank import ManagerLayers, RankLayer, manager_layers, stage_layers
from ....model.spec import CacheSpec
from ...layout import KEY, KEY_SCALE, VALUE, Access, Buffer, Layout, LifeCycle, PageTable, Pool
from ...rejection import Rejected
from .heads import head_maps, head_notes
from .registration import Registration, register_paged, register_side_plane, register_states
from .slots import DEFAULT_CAPACITY_TOKENS
from .support import common_reasons, distinct_paged, manager_names, refuse_unsupported

POOL_ALIGNMENT_BYTES = 256
"""Device allocations of the V1 manager are at least this aligned."""


class BlockPool(msgspec.Struct, frozen=True):
    """One V1 pool: ``registrations`` (the fields of a block of one layer, all of one size) for each of ``layers``."""

    layers: tuple[RankLayer, ...]
    registrations: tuple[Registration, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block id in this pool, over all layers."""
        return len(self.layers) * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block of one layer, over all fields."""
        return sum(entry.size_bytes for entry in self.registrations)


class Group(msgspec.Struct, frozen=True):
    """Pools that share block ids: those of one window (``recurrent`` False), or the recurrent states' one pool."""

    recurrent: bool
    window: int | None
    pools: tuple[BlockPool, ...]


class _Build(msgspec.Struct):
    """What has been laid out so far, over all managers."""

    pools: list[Pool] = []
    life_cycles: list[LifeCycle] = []
    buffers: list[Buffer] = []
    tables: list[PageTable] = []
    accesses: list[Access] = []


def allocate_v1(spec: CacheSpec) -> Layout:
    """Return the layout of ``trtllm-v1``; raise ``Rejected`` with the cause and the way out."""
    refuse_unsupported(_reasons(spec))
    build = _Build()
    maps = []
    estimates = []
    managers = manager_layers(spec)
    for manager in managers:
        groups = [*_window_groups(manager, spec), *_recurrent_group(manager, spec)]
        slots = _slots(groups, spec, len(managers))
        for index, (group, count) in enumerate(zip(groups, slots, strict=True)):
            build.life_cycles.append(LifeCycle(manager.name, index, group.recurrent, group.window))
            if group.recurrent:
                _lay_out_states(build, manager.name, index, group.pools[0], count)
            else:
                _lay_out_blocks(build, manager.name, index, group, count)
        maps += head_maps(manager, spec)
        estimates.append((manager.name, block_bytes(manager, spec)))
    return Layout(
        allocator="trtllm-v1",
        pools=tuple(build.pools),
        life_cycles=tuple(build.life_cycles),
        buffers=tuple(build.buffers),
        tables=tuple(build.tables),
        accesses=tuple(build.accesses),
        head_maps=tuple(maps),
        stages=tuple([tuple(stage) for stage in stage_layers(spec)]),
        block_bytes=tuple(estimates),
        spec=spec,
        notes=tuple(head_notes(spec)),
    )


def _reasons(spec: CacheSpec) -> Iterator[tuple[str, str]]:
    """Yield why V1 does not support ``spec``."""
    yield from common_reasons(spec)
    for manager in manager_names(spec):
        dims: dict[int | None, set[int]] = {}
        for layer in distinct_paged(spec, manager):
            if layer.tokens_per_block not in (None, spec.tokens_per_block):
                yield (
                    "V1 has one number of tokens per block for all layers",
                    "drop the layers' tokens_per_block, or use trtllm-v2",
                )
            if layer.kv_format not in (None, spec.kv_format):
                yield "V1 has one KV format for all layers", "drop the layers' kv_format, or use trtllm-v2"
            if layer.side_planes and (isinstance(layer, AttentionLayer) or len(layer.side_planes) > 1):
                yield "V1 has no side planes beside K/V", "use --allocator trtllm-v2-qsa-packed"
            dim = layer.row_dim if isinstance(layer, LatentLayer) else layer.head_dim
            dims.setdefault(_window(layer, spec), set()).add(dim)
        for found in dims.values():
            if len(found) > 1:
                yield (
                    (
                        "V1 has one head dim per window, and layers of head dims "
                        f"{', '.join(map(str, sorted(found)))} share one"
                    ),
                    "use --allocator trtllm-v2",
                )
    states = dict.fromkeys(layer for layer in map(recurrent_part, spec.layers) if layer is not None)
    if any(layer.auxiliary for layer in states):
        yield "V1 keeps no auxiliary states beside recurrent ones", "use --allocator trtllm-v2"


def _window(layer: AttentionLayer | LatentLayer, spec: CacheSpec) -> int | None:
    """Return the layer's window in tokens, None for full attention; V1 clips windows at the longest sequence."""
    if layer.window is None or (spec.max_sequence_tokens is not None and layer.window >= spec.max_sequence_tokens):
        return None
    return layer.window


def _window_groups(manager: ManagerLayers, spec: CacheSpec) -> Iterator[Group]:
    """Yield a group per window, ascending with full attention last: data pools by KV heads, then scales, then index
    keys."""
    windows: dict[int | None, dict[int, list[RankLayer]]] = {}
    registered: dict[tuple[int | None, int], tuple[Registration, ...]] = {}
    indexed: dict[int | None, list[RankLayer]] = {}
    for rank_layer in manager.layers:
        paged = paged_part(rank_layer.layer)
        if paged is None:
            continue
        window = _window(paged, spec)
        entries = register_paged(paged, spec)
        size = entries[0].size_bytes  # one dim and format per window: ascending size is ascending KV heads
        registered[window, size] = entries
        windows.setdefault(window, {}).setdefault(size, []).append(rank_layer)
        if paged.side_planes:
            indexed.setdefault(window, []).append(rank_layer)
    for window in sorted(windows, key=lambda tokens: (tokens is None, tokens or 0)):
        pools = []
        scales = []
        for size, layers in sorted(windows[window].items()):
            entries = registered[window, size]
            data = tuple([entry for entry in entries if entry.role in (KEY, VALUE)])
            pools.append(BlockPool(tuple(layers), data))
            if len(data) < len(entries):
                scales.append(BlockPool(tuple(layers), entries[len(data) :]))
        if window in indexed:
            scales.append(_index_pool(indexed[window], spec))
        yield Group(False, window, (*pools, *scales))


def _index_pool(layers: list[RankLayer], spec: CacheSpec) -> BlockPool:
    """Return the indexer pool of the layers with an index plane, which must be of one size."""
    planes = dict.fromkeys(paged_part(layer.layer).side_planes[0] for layer in layers)  # type: ignore[union-attr]
    if len(planes) > 1:
        raise Rejected(
            "V1 has one index-key size, and the layers have several", "use --allocator trtllm-v2", supported=False
        )
    return BlockPool(tuple(layers), (register_side_plane(next(iter(planes)), spec),))


def _recurrent_group(manager: ManagerLayers, spec: CacheSpec) -> Iterator[Group]:
    """Yield the recurrent states' group, where there are any: temporal state first, then convolution state."""
    states = [(layer, part) for layer in manager.layers if (part := recurrent_part(layer.layer)) is not None]
    if not states:
        return
    kinds = {register_states(part, spec): None for part in dict.fromkeys(part for _, part in states)}
    if len(kinds) > 1:
        raise Rejected(
            "V1 keeps the recurrent states of all layers in one pool, and the layers' states differ in size",
            "use --allocator trtllm-v2",
            supported=False,
        )
    pool = BlockPool(tuple([layer for layer, _ in states]), next(iter(kinds)))
    start = 0
    for entry in pool.registrations:
        element = entry.page.format.container_bytes
        for size, what in ((start, f"{entry.role} starts"), (pool.layer_bytes, "a layer's states take")):
            if size % element:
                raise Rejected(
                    f"{what} {size} B in a V1 state block, which is not a multiple of a {entry.page.format.value} "
                    f"element ({element} B)",
                    "choose state formats of one width, or use --allocator trtllm-v2",
                    supported=False,
                )
        start += entry.size_bytes
    yield Group(True, None, (pool,))


def _slots(groups: list[Group], spec: CacheSpec, managers: int) -> list[int]:
    """Return the blocks of each group: given, or the quota shared in proportion to the bytes of one long request."""
    if spec.quota_bytes is None:
        return [spec.state_slots or spec.slots or 1 if group.recurrent else spec.slots or 1 for group in groups]
    quota = spec.quota_bytes // managers  # floor: a share of the quota
    slot_bytes = [sum(pool.slot_bytes for pool in group.pools) for group in groups]
    longest = spec.max_sequence_tokens or DEFAULT_CAPACITY_TOKENS
    tokens = [spec.tokens_per_block if group.recurrent else min(group.window or longest, longest) for group in groups]
    weights = [size * count for size, count in zip(slot_bytes, tokens, strict=True)]
    whole = sum(weights)
    counts = [
        quota * weight // (whole * size)  # floor: whole blocks
        for weight, size in zip(weights, slot_bytes, strict=True)
    ]
    if 0 in counts:
        raise Rejected(
            f"a quota of {quota} B leaves no block for one of {len(groups)} block managers (a block of each takes "
            f"{sum(slot_bytes)} B)",
            "give a larger quota",
            supported=False,
        )
    return counts


def _lay_out_blocks(build: _Build, manager: str, group_index: int, group: Group, count: int) -> None:
    """Add the pools of one window: buffers, page tables and views."""
    cycle = len(build.life_cycles) - 1
    first_pool = len(build.pools)
    scales_of = {
        block_pool.layers: (first_pool + index, block_pool.registrations[0].size_bytes)
        for index, block_pool in enumerate(group.pools)
        if block_pool.registrations[0].role == KEY_SCALE
    }
    for index, block_pool in enumerate(group.pools):
        pool = first_pool + index
        slot_bytes = block_pool.slot_bytes
        build.pools.append(
            Pool(manager, group_index, index, count, slot_bytes, count * slot_bytes, POOL_ALIGNMENT_BYTES)
        )
        first, offset = len(build.buffers), 0
        for layer in block_pool.layers:
            for entry in block_pool.registrations:
                size = entry.size_bytes
                build.buffers.append(
                    Buffer(manager, layer.index, entry.role, cycle, pool, offset, slot_bytes, count, size, entry.page)
                )
                offset += size
        if block_pool.registrations[0].role == KEY:
            scales = scales_of.get(block_pool.layers)
            build.tables.append(_table(manager, cycle, pool, block_pool, first, scales))
        _add_accesses(build, pool, block_pool, first)


def _table(
    manager: str, cycle: int, pool: int, block_pool: BlockPool, first: int, scales: tuple[int, int] | None
) -> PageTable:
    """Return a data pool's page table: the mapping offset of a layer is its ordinal in the pool.

    ``scales`` are the number of the scale pool beside it and the bytes of a scale page.
    """
    fields = len(block_pool.registrations)
    layers = block_pool.layers
    return PageTable(
        manager=manager,
        life_cycle=cycle,
        layers=tuple([layer.index for layer in layers]),
        key_buffers=tuple(range(first, first + fields * len(layers), fields)),
        mapping_offsets=tuple(range(len(layers))),
        pool=pool,
        pointer_bytes=0,
        page_bytes=block_pool.registrations[0].size_bytes,
        index_scale=fields * len(layers),
        kv_factor=fields,
        kv_offset=fields - 1,
        scale_pool=None if scales is None else scales[0],
        scale_page_bytes=0 if scales is None else scales[1],
        scale_index_scale=0 if scales is None else fields * len(layers),
    )


def _add_accesses(build: _Build, pool: int, block_pool: BlockPool, first: int) -> None:
    """Add what the consumers of one pool reach: block b of layer j, field f, at ``((b * layers + j) * fields + f)``
    pages."""
    fields = len(block_pool.registrations)
    page_bytes = block_pool.registrations[0].size_bytes
    pitch = len(block_pool.layers) * fields * page_bytes
    role = block_pool.registrations[0].role
    consumers = ("attention-op", "kv-view") if role == KEY else ("attention-op",)
    if role not in (KEY, VALUE) and fields == 1 and not role.endswith("scale"):
        consumers = ("side-plane-view",)
    count = build.pools[pool].slot_count
    for ordinal in range(len(block_pool.layers)):
        for field in range(fields):
            buffer = first + ordinal * fields + field
            offset = (ordinal * fields + field) * page_bytes
            page = block_pool.registrations[field].page
            build.accesses.extend([Access(name, buffer, pool, offset, pitch, count, page) for name in consumers])


def _lay_out_states(build: _Build, manager: str, group_index: int, block_pool: BlockPool, count: int) -> None:
    """Add the recurrent pool, layer-major: a layer's blocks lie side by side, so a slot is scattered over the pool."""
    cycle = len(build.life_cycles) - 1
    pool = len(build.pools)
    block = block_pool.layer_bytes
    size_bytes = count * block_pool.slot_bytes
    build.pools.append(Pool(manager, group_index, 0, count, block_pool.slot_bytes, size_bytes, POOL_ALIGNMENT_BYTES))
    for ordinal, rank_layer in enumerate(block_pool.layers):
        offset = ordinal * count * block
        for entry in block_pool.registrations:
            build.accesses.append(Access("state-view", len(build.buffers), pool, offset, block, count, entry.page))
            build.buffers.append(
                Buffer(
                    manager,
                    rank_layer.index,
                    entry.role,
                    cycle,
                    pool,
                    offset,
                    block,
                    count,
                    entry.size_bytes,
                    entry.page,
                )
            )
            offset += entry.size_bytes
