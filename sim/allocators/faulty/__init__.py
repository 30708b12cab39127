"""Allocators that are wrong on purpose: each a small variation of a sound one, to measure what finds it.

The table below is all that the registry reads, so naming a fault imports nothing else. What a fault breaks, its
smallest case and where it happened are told in ``kvsan.ci.faults`` and ``docs/faults.md``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_HERE: Final = "kvsan.sim.allocators.faulty"
_LEGACY: Final = "trtllm-v2-qsa-legacy"
_PACKED: Final = "trtllm-v2-qsa-packed"
_V2: Final = "trtllm-v2"


class FaultyAllocator(NamedTuple):
    """A row of the table: ``base`` is the sound allocator that it varies, ``target`` is ``module:function``."""

    name: str
    base: str
    target: str
    summary: str


FAULTY: Final[tuple[FaultyAllocator, ...]] = (
    FaultyAllocator(
        "fault:canary",
        _V2,
        f"{_HERE}.storage:allocate_canary",
        "V pages lie on their K pages: wrong in every layer with K and V, so any campaign must find it at once",
    ),
    FaultyAllocator(
        "fault:coalesce-by-size",
        _LEGACY,
        f"{_HERE}.mapping:allocate_coalesce_by_size",
        "the QSA manager before packing with mapping offsets rounded down, as stripped assertions leave them",
    ),
    FaultyAllocator(
        "fault:bare-assert",
        _LEGACY,
        f"{_HERE}.mapping:allocate_bare_assert",
        "the QSA manager before packing, refusing with an AssertionError that explains nothing",
    ),
    FaultyAllocator(
        "fault:dense-plane-pitch",
        _V2,
        f"{_HERE}.views:allocate_dense_plane_pitch",
        "a K/V view steps from slot to slot by one page, as if K and V were planes of their own",
    ),
    FaultyAllocator(
        "fault:v-is-k-plus-one",
        _V2,
        f"{_HERE}.tables:allocate_v_is_k_plus_one",
        "the V index of a missing page is the invalid K index plus one, which is page 0",
    ),
    FaultyAllocator(
        "fault:block-size-from-dim1",
        _V2,
        f"{_HERE}.views:allocate_block_size_from_dim1",
        "the 4-bit kernel takes axis 1 of a head-major page for its tokens",
    ),
    FaultyAllocator(
        "fault:drop-role-from-plane",
        _PACKED,
        f"{_HERE}.storage:allocate_drop_role_from_plane",
        "the size of the packed side planes forgets the last role in them",
    ),
    FaultyAllocator(
        "fault:layer-ordinal-off-by-one",
        _V2,
        f"{_HERE}.mapping:allocate_layer_ordinal_off_by_one",
        "mapping offsets count the layers from one",
    ),
    FaultyAllocator(
        "fault:swap-kv-lanes",
        _V2,
        f"{_HERE}.views:allocate_swap_kv_lanes",
        "the attention op takes the V lane for K and the K lane for V",
    ),
    FaultyAllocator(
        "fault:scale-is-pairs",
        _V2,
        f"{_HERE}.tables:allocate_scale_is_pairs",
        "the index scale counts K/V pairs per slot instead of pages",
    ),
    FaultyAllocator(
        "fault:ledger-tokens",
        _V2,
        f"{_HERE}.tables:allocate_ledger_tokens",
        "the attention op sizes a page by the ledger's tokens (times the context-parallel size), not the physical ones",
    ),
    FaultyAllocator(
        "fault:heads-floor",
        _V2,
        f"{_HERE}.storage:allocate_heads_floor",
        "KV heads per rank are rounded down where tensor parallelism does not divide them",
    ),
    FaultyAllocator(
        "fault:scale-pool-uses-data-scale",
        _V2,
        f"{_HERE}.tables:allocate_scale_pool_uses_data_scale",
        "the attention op walks the NVFP4 scale pool with the data pool's page size",
    ),
    FaultyAllocator(
        "fault:v-offset-from-k-only",
        _V2,
        f"{_HERE}.tables:allocate_v_offset_from_k_only",
        "the distance from K to V is taken from a K-only cache: 0",
    ),
    FaultyAllocator(
        "fault:global-id-for-extras",
        _PACKED,
        f"{_HERE}.views:allocate_global_id_for_extras",
        "a side plane is looked up by its layer's number in the model instead of its number on the stage",
    ),
)
"""All faulty allocators, the canary first."""


def base_of(allocator: str) -> str:
    """Return the sound allocator that a faulty one varies, and any other name as it is.

    >>> base_of("fault:bare-assert"), base_of("trtllm-v1")
    ('trtllm-v2-qsa-legacy', 'trtllm-v1')
    """
    return next((entry.base for entry in FAULTY if entry.name == allocator), allocator)
