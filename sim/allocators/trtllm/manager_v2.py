"""TensorRT-LLM KVCacheManagerV2 and the QSA managers on top of it.

A policy says how side planes are registered and how a layer's mapping offset is computed; everything else is common:
layers register
their buffers (``registration``), equal sizes coalesce into pools (``storage``), and consumers are given pointers,
tables and views
(``consumers``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from ....model.arithmetic import div_up
from ....model.cost import block_bytes
from ....model.layers import LatentLayer, Layer, paged_part, recurrent_part
from ....model.rank import ManagerLayers, manager_layers, model_layers, stage_layers
from ....model.spec import CacheSpec
from ...layout import Access, Buffer, HeadMap, Layout, LifeCycle, PageTable, Pool
from .consumers import Mapping, Stored, consumers_of, exact_mapping
from .heads import head_maps, head_notes
from .registration import Registration, register_paged, register_states
from .side_planes import packed_planes, separate_planes, side_page_may_collide
from .slots import slots_for_quota
from .storage import RECURRENT_KEY, LifeCycleKey, Storage, StorageLayer, coalesce
from .support import common_reasons, distinct_paged, manager_names, refuse_unsupported

POOL_ALIGNMENT_BYTES = 2 << 20
"""Pool bases are multiples of the smallest physical chunk."""


class PolicyV2(msgspec.Struct, frozen=True):
    """What tells one V2 manager from another.

    ``side_planes``: ``unsupported`` beside K/V (plain V2), ``separate`` (QSA before packing), or packed where a side
    page could match
    another, asked for any head count (``packed-any-heads``) or for this rank's (``packed-rank-local``). ``mapping``
    computes the
    mapping offset of a layer in its op pool.
    """

    name: str
    side_planes: Literal["unsupported", "separate", "packed-any-heads", "packed-rank-local"]
    mapping: Mapping = exact_mapping


def allocate_v2(spec: CacheSpec, policy: PolicyV2) -> Layout:
    """Return the layout of one rank under ``policy``; raise ``Rejected`` with the cause and the way out."""
    refuse_unsupported(_reasons(spec, policy))
    pools: list[Pool] = []
    cycles: list[LifeCycle] = []
    buffers: list[Buffer] = []
    tables: list[PageTable] = []
    accesses: list[Access] = []
    maps: list[HeadMap] = []
    estimates = []
    notes = head_notes(spec)
    managers = manager_layers(spec)
    quotas = _quotas(spec, managers)
    for manager, quota_bytes in zip(managers, quotas, strict=True):
        planes, packed = _side_planes(manager, spec, policy)
        if packed:
            notes.append(
                f"{manager.name}: a side page could match a K, V or scale page, so all side planes share one buffer"
            )
        storage = coalesce(_storage_layers(manager, spec, planes))
        slots = _slots(storage, spec, quota_bytes)
        stored = _store(manager.name, storage, slots, len(pools), len(cycles), len(buffers))
        pools += stored.pools
        cycles += stored.life_cycles
        buffers += stored.buffers
        consumed = consumers_of(stored, policy.mapping)
        tables += consumed.tables
        accesses += consumed.accesses
        maps += head_maps(manager, spec)
        estimates.append((manager.name, block_bytes(manager, spec)))
    return Layout(
        allocator=policy.name,
        pools=tuple(pools),
        life_cycles=tuple(cycles),
        buffers=tuple(buffers),
        tables=tuple(tables),
        accesses=tuple(accesses),
        head_maps=tuple(maps),
        stages=tuple([tuple(stage) for stage in stage_layers(spec)]),
        block_bytes=tuple(estimates),
        spec=spec,
        notes=tuple(notes),
    )


def _reasons(spec: CacheSpec, policy: PolicyV2) -> Iterator[tuple[str, str]]:
    """Yield why ``policy`` does not support ``spec``."""
    yield from common_reasons(spec)
    for manager in manager_names(spec):
        layers = distinct_paged(spec, manager)
        with_planes = [layer for layer in layers if layer.side_planes]
        overrides = {layer.tokens_per_block or spec.tokens_per_block for layer in layers}
        if len(overrides) > 1:
            yield (
                (
                    f"layers of {' and '.join(map(str, sorted(overrides)))} tokens per block in one manager need page "
                    "tables of their own"
                ),
                "give all layers the same tokens per block, or keep the odd ones in a separate draft manager",
            )
        if policy.side_planes == "unsupported":
            if any(not isinstance(layer, LatentLayer) for layer in with_planes):
                yield (
                    "side planes beside K/V pages need a sparse-attention manager, which plain V2 is not",
                    "use --allocator trtllm-v2-qsa-packed",
                )
            continue
        if any(isinstance(layer, LatentLayer) for layer in layers):
            yield "QSA needs V pages, and a latent (K-only) cache has none", "use --allocator trtllm-v2"
        if with_planes and overrides != {spec.tokens_per_block}:
            yield "QSA views need the manager's own tokens per block", "drop the layers' tokens_per_block"
        if len({_page_geometry(layer, spec) for layer in (layers if with_planes else ())}) > 1:
            yield (
                (
                    "QSA needs one attention pool for all its layers, and layers of different windows, heads, dims "
                    "or KV formats have several"
                ),
                "give all attention layers of the model one geometry",
            )


def _page_geometry(layer: Layer, spec: CacheSpec) -> tuple[object, ...]:
    """Return what decides a K/V layer's life cycle and K page: layers that differ in it need pools of their own."""
    kv_format = getattr(layer, "kv_format", None) or spec.kv_format
    return life_cycle_key(layer, spec), getattr(layer, "kv_heads", 1), getattr(layer, "head_dim", 0), kv_format


def life_cycle_key(layer: Layer, spec: CacheSpec) -> LifeCycleKey:
    """Return the life-cycle key of a layer with pages; a window of the longest sequence or more is no window."""
    window = getattr(layer, "window", None)
    if window is None or (spec.max_sequence_tokens is not None and window >= spec.max_sequence_tokens):
        return False, None, 0
    return False, window, div_up(getattr(layer, "sink_tokens", 0), spec.tokens_per_block)


def _side_planes(
    manager: ManagerLayers, spec: CacheSpec, policy: PolicyV2
) -> tuple[dict[int, tuple[Registration, ...]], bool]:
    """Return the side-plane registrations by global layer, and whether they are packed."""
    if policy.side_planes.startswith("packed"):
        whole_model = model_layers(spec, manager.name)
        if side_page_may_collide(whole_model, spec, any_heads=policy.side_planes == "packed-any-heads"):
            packed = packed_planes(manager.layers, spec)
            return packed, bool(packed)
    return separate_planes(manager.layers, spec), False


def _storage_layers(
    manager: ManagerLayers, spec: CacheSpec, planes: dict[int, tuple[Registration, ...]]
) -> list[StorageLayer]:
    """Return what each layer registers, in order; a hybrid layer registers its attention half first."""
    known: dict[Layer, list[tuple[LifeCycleKey, tuple[Registration, ...]]]] = {}
    registered = []
    for rank_layer in manager.layers:
        layer = rank_layer.layer
        halves = known.get(layer)
        if halves is None:
            halves = known[layer] = list(_halves(layer, spec))
        side = planes.get(rank_layer.index)
        for key, registrations in halves:
            if side is not None and key is not RECURRENT_KEY:
                registrations += side
            registered.append(StorageLayer(rank_layer, key, registrations))
    return registered


def _halves(layer: Layer, spec: CacheSpec) -> Iterator[tuple[LifeCycleKey, tuple[Registration, ...]]]:
    paged = paged_part(layer)
    if paged is not None:
        yield life_cycle_key(paged, spec), register_paged(paged, spec)
    recurrent = recurrent_part(layer)
    if recurrent is not None:
        yield RECURRENT_KEY, register_states(recurrent, spec)


def _quotas(spec: CacheSpec, managers: tuple[ManagerLayers, ...]) -> list[int | None]:
    """Return each manager's share of the byte quota, in proportion to the bytes that it keeps per block."""
    if spec.quota_bytes is None:
        return [None] * len(managers)
    weights = [max(1, block_bytes(manager, spec)) for manager in managers]
    whole = sum(weights)
    shares = [spec.quota_bytes * weight // whole for weight in weights]  # floor: the target gets what is left over
    return [spec.quota_bytes - sum(shares[1:]), *shares[1:]]


def _slots(storage: Storage, spec: CacheSpec, quota_bytes: int | None) -> list[int]:
    """Return the slots of each pool group: given, or as many as the quota holds."""
    if quota_bytes is not None:
        return slots_for_quota(storage, quota_bytes, spec.tokens_per_block)
    paged = {cycle.group for cycle in storage.life_cycles if cycle.key is not RECURRENT_KEY}
    slots = spec.slots or 1
    return [slots if group in paged else spec.state_slots or slots for group in range(len(storage.groups))]


def _store(
    manager: str, storage: Storage, slots: list[int], first_pool: int, first_cycle: int, first_buffer: int
) -> Stored:
    """Return the pools, life cycles and buffers of one manager; the numbers given are those already taken."""
    pools: list[Pool] = []
    group_pools = []
    for group, slot_sizes in enumerate(storage.groups):
        group_pools.append(first_pool + len(pools))
        for index, slot_bytes in enumerate(slot_sizes):
            size_bytes = slots[group] * slot_bytes
            pools.append(Pool(manager, group, index, slots[group], slot_bytes, size_bytes, POOL_ALIGNMENT_BYTES))
    cycles = [
        LifeCycle(manager, cycle.group, cycle.key is RECURRENT_KEY, cycle.key[1], cycle.key[2])
        for cycle in storage.life_cycles
    ]
    base_pool = [group_pools[cycle.group] for cycle in storage.life_cycles]
    buffers = []
    for place in storage.placements:
        pool = base_pool[place.life_cycle] + place.pool
        holder = pools[pool - first_pool]
        entry = place.registration
        buffers.append(
            Buffer(
                manager,
                place.layer.index,
                entry.role,
                first_cycle + place.life_cycle,
                pool,
                place.offset_bytes,
                holder.slot_bytes,
                holder.slot_count,
                entry.size_bytes,
                entry.page,
                entry.parts,
            )
        )
    return Stored(manager, first_pool, first_cycle, first_buffer, storage, pools, cycles, buffers)
