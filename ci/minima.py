"""Known minima: the simplest spec on which a fault shows, by trying every spec of a stated grid in order of simplicity.

The grid (``grid_specs``):

- one layer: every kind. Attention of 1 to 4 KV heads and head dim 128, 64 or 256, with no side plane, one (index key of
  dim 128 or 64, 1 or 2 heads, bf16 or fp8, per layer or per rank) or two (the index key and one of four position
  planes); a latent layer of dim 128 or 64; a convolution state; a recurrent layer with a temporal state; an attention
  layer beside a convolution state; a layer without a cache;
- two layers: every pair of those, attention layers of one geometry with at most one plane each, of dim 128 or 64 and 1
  or 2 heads;
- three layers: every triple of plain attention (with or without an index key), a latent layer, a convolution state and
  a layer without a cache;
- each with the defaults (bf16, one token per block, one rank, one slot, HND, no draft, full attention), and with every
  choice of at most two other options (one for three layers) out of: another KV format (fp16, fp32, fp8, nvfp4), 2 or 4
  tokens per block, a parallel layout (tp2, tp3, tp4, adp2, cp2, either rank of pp2), 2 slots, NHD, a folded or a
  separate draft layer, a window on the first layer, a KV format of the first layer's own (fp8, nvfp4).

Everything simpler than a minimum that lies in the grid is tried before it, and shows nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import msgspec

from ..model.errors import SpecError
from ..model.formats import ElementFormat
from ..model.layers import (
    INDEX_KEY,
    INDEX_POSITION,
    AttentionLayer,
    HybridLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    SidePlane,
    UncachedLayer,
)
from ..model.parallel import ParallelLayout
from ..model.spec import CacheSpec, Consumer, Draft
from .faults import Fault, triggers
from .simplicity import simplicity_key, size

MAX_SIZE: Final = 7
"""Layers plus buffers up to which the grid is tried: the largest minimum in the table."""

Option: TypeAlias = tuple[str, Any]
"""The name of an axis and a value off its default."""

_PARALLEL: Final = (
    (ParallelLayout(tp=2), 0),
    (ParallelLayout(tp=3), 0),
    (ParallelLayout(tp=4), 0),
    (ParallelLayout(tp=2, attention_dp=True), 0),
    (ParallelLayout(cp=2), 0),
    (ParallelLayout(pp=2), 0),
    (ParallelLayout(pp=2), 1),
)
_OPTIONS: Final[tuple[Option, ...]] = (
    *(("kv_format", name) for name in ("fp16", "fp32", "fp8", "nvfp4")),
    *(("tokens_per_block", tokens) for tokens in (2, 4)),
    *(("parallel", place) for place in _PARALLEL),
    ("slots", 2),
    ("consumer", Consumer(kv_layout="NHD")),
    *(("draft", mode) for mode in ("folded", "separate")),
    ("window", 64),
    *(("own_format", format) for format in (ElementFormat.FP8, ElementFormat.NVFP4)),
)
_PLAIN: Final = AttentionLayer(kv_heads=1, head_dim=128)
_INDEX: Final = SidePlane(role=INDEX_KEY, dim=128, format=ElementFormat.BF16)
_CONVOLUTION: Final = RecurrentLayer(algorithm="short_conv", heads=1, conv_kernel=2)
_NO_KV: Final[tuple[Layer, ...]] = (
    UncachedLayer(),
    LatentLayer(latent_dim=128),
    LatentLayer(latent_dim=64),
    _CONVOLUTION,
    RecurrentLayer(algorithm="mamba1", heads=1, state_dim=1, conv_kernel=2),
    HybridLayer(attention=_PLAIN, recurrent=_CONVOLUTION),
)
_TRIPLED: Final[tuple[Layer, ...]] = (
    UncachedLayer(),
    LatentLayer(latent_dim=128),
    _CONVOLUTION,
    _PLAIN,
    msgspec.structs.replace(_PLAIN, side_planes=(_INDEX,)),
)


def grid_specs(max_size: int = MAX_SIZE, max_options: int = 2) -> Iterator[CacheSpec]:
    """Yield every spec of the grid with at most ``max_size`` layers and buffers, simplest first.

    ``max_options`` bounds the options off their defaults, for a smaller grid.
    """
    shells: dict[int, dict[CacheSpec, None]] = {}
    for layers, options in _layer_choices():
        if size(CacheSpec(layers=layers)) > max_size:
            continue  # an option adds buffers, never takes any
        for count in range(min(options, max_options) + 1):
            for chosen in itertools.combinations(_OPTIONS, count):
                spec = _built(layers, dict(chosen)) if len(dict(chosen)) == count else None
                if spec is not None and (shell := size(spec)) <= max_size:
                    shells.setdefault(shell, {})[spec] = None
    for shell in sorted(shells):
        yield from sorted(shells[shell], key=simplicity_key)


def find_minimum(
    fault: Fault,
    max_size: int = MAX_SIZE,
    max_options: int = 2,
    test: Callable[[Fault, CacheSpec], bool] = triggers,
) -> CacheSpec | None:
    """Return the simplest spec of the grid that passes ``test`` for ``fault``, None where there is none."""
    return next((spec for spec in grid_specs(max_size, max_options) if test(fault, spec)), None)


def _layer_choices() -> Iterator[tuple[tuple[Layer, ...], int]]:
    """Yield the layers of a spec, and how many options may be off their defaults with them."""
    for layer in (*_attention_layers(), *_NO_KV):
        yield (layer,), 2
    paired = [_with_planes(heads, dim, planes) for heads, dim in _geometries() for planes in _few_planes()]
    for first, second in itertools.product((*paired, *_NO_KV), repeat=2):
        one, other = _geometry(first), _geometry(second)
        if one is None or other is None or one == other:
            yield (first, second), 2
    for triple in itertools.product(_TRIPLED, repeat=3):
        yield triple, 1


def _geometries() -> Iterator[tuple[int, int]]:
    return itertools.product((1, 2, 3, 4), (128, 64, 256))


def _geometry(layer: Layer) -> tuple[int, int] | None:
    return (layer.kv_heads, layer.head_dim) if isinstance(layer, AttentionLayer) else None


def _with_planes(heads: int, dim: int, planes: tuple[SidePlane, ...]) -> AttentionLayer:
    return AttentionLayer(kv_heads=heads, head_dim=dim, side_planes=planes)


def _few_planes() -> Iterator[tuple[SidePlane, ...]]:
    yield ()
    for dim, heads in itertools.product((128, 64), (1, 2)):
        yield (msgspec.structs.replace(_INDEX, dim=dim, heads=heads),)


def _attention_layers() -> Iterator[AttentionLayer]:
    """Yield single attention layers with every choice of side planes."""
    index_keys = [
        SidePlane(role=INDEX_KEY, dim=dim, heads=heads, format=format, scope=scope)
        for dim in (128, 64)
        for heads in (1, 2)
        for format in (ElementFormat.BF16, ElementFormat.FP8)
        for scope in ("layer", "rank")
    ]
    position = SidePlane(role=INDEX_POSITION, dim=128, format=ElementFormat.BF16)
    positions = [
        position,
        msgspec.structs.replace(position, scope="rank"),
        msgspec.structs.replace(position, dim=64),
        msgspec.structs.replace(position, dim=3, format=ElementFormat.INT32, scope="rank"),
    ]
    for heads, dim in _geometries():
        yield _with_planes(heads, dim, ())
        for index_key in index_keys:
            yield _with_planes(heads, dim, (index_key,))
            for other in positions:
                yield _with_planes(heads, dim, (index_key, other))


def _built(layers: tuple[Layer, ...], options: dict[str, Any]) -> CacheSpec | None:
    """Return the spec of some layers with some options off their defaults; None where there is no such spec."""
    fields: dict[str, Any] = {"slots": 1, "tokens_per_block": 1, **options}
    own = {"window": fields.pop("window", None), "kv_format": fields.pop("own_format", None)}
    draft, place = fields.pop("draft", None), fields.pop("parallel", None)
    if any(value is not None for value in own.values()):
        if not isinstance(layers[0], AttentionLayer | LatentLayer):
            return None
        layers = (msgspec.structs.replace(layers[0], **own), *layers[1:])
    if draft is not None:
        drafted = layers[-1] if isinstance(layers[-1], AttentionLayer | LatentLayer) else _PLAIN
        fields["draft"] = Draft(mode=draft, layers=(drafted,))
    if place is not None:
        fields["parallel"], fields["rank"] = place
    try:
        return CacheSpec(layers=layers, **fields)
    except SpecError:
        return None
