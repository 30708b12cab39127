"""One order of simplicity on specs: what "the smallest case" means, everywhere.

``simplicity_key(spec)`` is a tuple of whole numbers; the smaller the key, the simpler the spec. The order is strictly
total: two specs have one key if and only if they are equal, so "the minimum" is always a single spec. The entries, most
important first:

==  ================================================================================================================
 1  size: layers (draft layers and layers without a cache included) plus buffers (``size``)
 2  layers
 3  kinds, summed over layers: attention 0, uncached 1, latent 2, recurrent 3, hybrid 4
 4  layers with a KV format of their own; then the KV format: bf16 first, then ``FORMAT_ORDER``
 5  head dims, summed over layers: 128 first, then the powers of two by distance (64, 256, 32, 512, ...), then the
    others ascending; then value dims unlike the head dim, and rope dims
 6  KV heads, summed over layers
 7  layers with tokens per block of their own; then the tokens per block
 8  windows: layers that have one, their tokens, their sink tokens (full attention first)
 9  parallel layout: tp, pp, ep, cp, attention-DP, pp_partition (none first); then the rank
10  draft: none, folded, separate; then draft layers
11  quota (slots given first), slots, slots of the states
12  consumer: HND before NHD, alignment, 32-bit indices, 64-bit offsets
13  longest sequence (none first), sparse algorithm (none first)
14  recurrent layers with state formats of their own; then the state formats: temporal, convolution (bf16 first)
15  side planes, summed: formats, dims (128 first), heads, per-rank ones, roles (index keys first)
16  recurrent layers, summed: algorithm, heads, head dims, groups, state dims, taps, auxiliary states
17  different layers, the model's name
18  the canonical JSON text: the shorter first, then byte by byte
==  ================================================================================================================

All entries but the last are sums over layers, so lowering any number of any layer gives a simpler spec.
"""

from __future__ import annotations

import functools
from typing import Final

from ..model.formats import ElementFormat
from ..model.layers import (
    INDEX_KEY,
    INDEX_POSITION,
    RECURRENT_KINDS,
    AttentionLayer,
    AuxiliaryState,
    HybridLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    SidePlane,
    UncachedLayer,
    paged_part,
    recurrent_part,
)
from ..model.parallel import ParallelLayout
from ..model.spec import CacheSpec, encode_spec

FORMAT_ORDER: Final = (
    ElementFormat.BF16,
    ElementFormat.FP16,
    ElementFormat.FP32,
    ElementFormat.FP8,
    ElementFormat.FP8_E5M2,
    ElementFormat.INT8,
    ElementFormat.NVFP4,
    ElementFormat.INT32,
    ElementFormat.INT64,
    ElementFormat.UINT8,
)
"""Element formats, simplest first."""

KIND_ORDER: Final[tuple[type, ...]] = (AttentionLayer, UncachedLayer, LatentLayer, RecurrentLayer, HybridLayer)
"""Layer kinds, simplest first."""

_FORMAT_RANK: Final = {format: rank for rank, format in enumerate(FORMAT_ORDER)}
_KIND_RANK: Final = {kind: rank for rank, kind in enumerate(KIND_ORDER)}
_ALGORITHM_ORDER: Final = ("short_conv", "mamba1", "mamba2", "gdn", "kda")
_ALGORITHM_RANK: Final = {name: rank for rank, name in enumerate(_ALGORITHM_ORDER)}
_ROLE_RANK: Final = {INDEX_KEY: 0, INDEX_POSITION: 1}
_DRAFT_RANK: Final = {"none": 0, "folded": 1, "separate": 2}
_OTHER_DIMS: Final = 64

if set(_ALGORITHM_RANK) != set(RECURRENT_KINDS) or set(_FORMAT_RANK) != set(ElementFormat):
    raise RuntimeError("the order of simplicity does not rank every recurrent algorithm and element format")


def format_rank(format: ElementFormat) -> int:
    """Return the place of a format in the order of simplicity."""
    return _FORMAT_RANK[format]


def dim_rank(dim: int) -> int:
    """Return the place of a dim in the order of simplicity: 128, 64, 256, 32, 512, ..., then all others ascending."""
    if dim & (dim - 1):
        return _OTHER_DIMS + dim
    distance = dim.bit_length() - (128).bit_length()
    return 2 * distance if distance >= 0 else -2 * distance - 1


def size(spec: CacheSpec) -> int:
    """Return layers plus buffers of the whole model, from the spec alone, so that refused specs have a size too.

    A layer has a K page, a V page (unless latent), block scales for each with a block-scaled format, and its per-layer
    side planes; a recurrent layer has its states. A per-rank plane counts once per role.
    """
    total = 0
    rank_roles: set[str] = set()
    for layer, count in _counted_layers(spec).items():
        total += count * (1 + _buffers(layer, spec.kv_format))
        rank_roles |= _rank_roles(layer)
    return total + len(rank_roles)


def simplicity_key(spec: CacheSpec) -> tuple[int, ...]:
    """Return the place of ``spec`` in the order of simplicity; see the module's text."""
    counts = _counted_layers(spec)
    sums = [0] * _ENTRY_COUNT
    total = len(spec.layers) + len(spec.draft.layers)
    buffers = 0
    rank_roles: set[str] = set()
    for layer, count in counts.items():
        buffers += count * _buffers(layer, spec.kv_format)
        rank_roles |= _rank_roles(layer)
        for index, value in enumerate(_layer_entries(layer)):
            sums[index] += count * value
    kinds, own_formats, dims, odd_dims, heads, own_tokens, windowed, windows, sinks, own_states, *rest = sums
    sequence, quota = spec.max_sequence_tokens, spec.quota_bytes
    consumer = spec.consumer
    return (
        total + buffers + len(rank_roles),
        total,
        kinds,
        own_formats,
        _FORMAT_RANK[spec.kv_format],
        dims,
        odd_dims,
        heads,
        own_tokens,
        spec.tokens_per_block,
        windowed,
        windows,
        sinks,
        *_parallel_entries(spec.parallel),
        spec.rank,
        _DRAFT_RANK[spec.draft.mode],
        len(spec.draft.layers),
        0 if quota is None else 1 + quota,
        spec.slots or 0,
        spec.state_slots or 0,
        int(consumer.kv_layout != "HND"),
        consumer.alignment_bytes,
        consumer.index_bits - 32,
        64 - consumer.offset_bits,
        0 if sequence is None else 1 + sequence,
        int(spec.sparse_algorithm is not None),
        own_states,
        _FORMAT_RANK[spec.state_format],
        _FORMAT_RANK[spec.conv_format],
        *rest,
        len(counts),
        len(spec.model),
        int.from_bytes(encode_spec(spec)),
    )


def _counted_layers(spec: CacheSpec) -> dict[Layer, int]:
    """Return how often each different layer occurs, draft layers included."""
    counts: dict[Layer, int] = {}
    for layer in spec.layers + spec.draft.layers:
        counts[layer] = counts.get(layer, 0) + 1
    return counts


def _parallel_entries(parallel: ParallelLayout) -> tuple[int, ...]:
    partition = 0 if parallel.pp_partition is None else 1
    return parallel.tp, parallel.pp, parallel.ep, parallel.cp, int(parallel.attention_dp), partition


@functools.lru_cache(maxsize=4096)
def _rank_roles(layer: Layer) -> frozenset[str]:
    paged = paged_part(layer)
    return frozenset(plane.role for plane in paged.side_planes if plane.scope == "rank") if paged else frozenset()


@functools.lru_cache(maxsize=4096)
def _buffers(layer: Layer, kv_format: ElementFormat) -> int:
    """Return the buffers that one layer asks for, per-rank planes left out."""
    total = 0
    paged = paged_part(layer)
    if paged is not None:
        lanes = 2 if isinstance(paged, AttentionLayer) else 1
        total += 2 * lanes if (paged.kv_format or kv_format).block_scaled else lanes
        total += sum(plane.scope == "layer" for plane in paged.side_planes)
    recurrent = recurrent_part(layer)
    if recurrent is not None:
        total += 1 + (recurrent.state_dim > 0) + len(recurrent.auxiliary)
    return total


@functools.lru_cache(maxsize=4096)
def _layer_entries(layer: Layer) -> tuple[int, ...]:
    """Return what one layer adds to the sums: kinds to sink tokens, own state formats, side planes, recurrent parts."""
    paged, recurrent = paged_part(layer), recurrent_part(layer)
    return (
        _KIND_RANK[type(layer)],
        *(_paged_entries(paged) if paged else (0,) * 8),
        _own_state_formats(recurrent) if recurrent else 0,
        *(_plane_entries(paged.side_planes) if paged else (0,) * 5),
        *(_recurrent_entries(recurrent) if recurrent else (0,) * 9),
    )


def _paged_entries(layer: AttentionLayer | LatentLayer) -> tuple[int, ...]:
    if isinstance(layer, LatentLayer):
        dims, odd, heads = dim_rank(layer.latent_dim), layer.rope_dim, 0
    else:
        odd = 0 if layer.value_dim == layer.head_dim else 1 + dim_rank(layer.value_dim)
        dims, heads = dim_rank(layer.head_dim), layer.kv_heads
    return (
        0 if layer.kv_format is None else 1 + _FORMAT_RANK[layer.kv_format],
        dims,
        odd,
        heads,
        layer.tokens_per_block or 0,
        int(layer.window is not None),
        layer.window or 0,
        layer.sink_tokens,
    )


def _plane_entries(planes: tuple[SidePlane, ...]) -> tuple[int, ...]:
    return (
        sum(_FORMAT_RANK[plane.format] for plane in planes),
        sum(dim_rank(plane.dim) for plane in planes),
        sum(plane.heads for plane in planes),
        sum(plane.scope == "rank" for plane in planes),
        sum(_ROLE_RANK.get(plane.role, 2) for plane in planes),
    )


def _own_state_formats(layer: RecurrentLayer) -> int:
    return sum(0 if own is None else 1 + _FORMAT_RANK[own] for own in (layer.ssm_format, layer.conv_format))


def _recurrent_entries(layer: RecurrentLayer) -> tuple[int, ...]:
    return (
        _ALGORITHM_RANK[layer.algorithm],
        layer.heads,
        layer.head_dim,
        layer.groups,
        layer.state_dim,
        layer.conv_kernel,
        *_auxiliary_entries(layer.auxiliary),
    )


def _auxiliary_entries(states: tuple[AuxiliaryState, ...]) -> tuple[int, ...]:
    return (
        sum(len(state.shape) for state in states),
        sum(size for state in states for size in state.shape),
        sum(_FORMAT_RANK[state.format] for state in states),
    )


_ENTRY_COUNT: Final = 1 + 8 + 1 + 5 + 9
