"""Known minima of the faults of transfers: the simplest pair on which one shows, by trying a stated grid in order.

The grid (``grid_pairs``): one layer, or two equal ones, or one behind a layer without a cache, out of attention of 1, 2
or 4 KV heads of dim 128 or 64; attention of 1 or 2 heads with an index plane of dim 128 or 64, or with an index and a
position plane; a gated delta net with as many key as value heads, its states in bf16 or fp32; and a latent layer of dim
128 or 64. Three layers of plain attention of one or two heads, or latent, or two and one without a cache among them.
In bf16, one or two tokens per block, HND or NHD on both sides, under every two of tp1, tp2, tp4 and pp2; with one
token per block and equal layouts also two tokens on the destination alone.

A pair is simpler than another when it has fewer layers and buffers on both sides together, then when its source is
simpler (``simplicity``), then its destination, then the lower attention-DP ranks and no allocators of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import msgspec

from ..model.errors import SpecError
from ..model.formats import ElementFormat
from ..model.layers import (
    INDEX_KEY,
    INDEX_POSITION,
    AttentionLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    SidePlane,
    UncachedLayer,
)
from ..model.parallel import ParallelLayout
from ..model.spec import CacheSpec, Consumer
from ..sim.transfer.faulty import method_named
from ..sim.transfer.pair import Pair, judge_pair
from .simplicity import simplicity_key, size

_PARALLEL: Final = (
    ParallelLayout(),
    ParallelLayout(tp=2),
    ParallelLayout(tp=4),
    ParallelLayout(pp=2),
)
_INDEX: Final = SidePlane(role=INDEX_KEY, dim=128, format=ElementFormat.BF16)
_SHORT_INDEX: Final = SidePlane(role=INDEX_KEY, dim=64, format=ElementFormat.BF16)
_POSITION: Final = SidePlane(role=INDEX_POSITION, dim=3, format=ElementFormat.INT32, scope="rank")
_DELTA: Final = RecurrentLayer(algorithm="gdn", heads=2, head_dim=1, groups=2, state_dim=1, conv_kernel=2)
_LAYERS: Final[tuple[Layer, ...]] = (
    *(AttentionLayer(kv_heads=heads, head_dim=dim) for heads in (1, 2, 4) for dim in (128, 64)),
    *(
        AttentionLayer(kv_heads=heads, head_dim=dim, side_planes=planes)
        for heads in (1, 2)
        for dim in (128, 64)
        for planes in ((_INDEX,), (_SHORT_INDEX,), (_INDEX, _POSITION))
    ),
    _DELTA,
    msgspec.structs.replace(_DELTA, ssm_format=ElementFormat.FP32),
    LatentLayer(latent_dim=128),
    LatentLayer(latent_dim=64),
)


def pair_size(pair: Pair) -> int:
    """Return layers plus buffers of both sides."""
    return size(pair.source) + size(pair.destination)


def pair_key(pair: Pair) -> tuple[object, ...]:
    """Return the place of ``pair`` in the order of simplicity."""
    own = pair.source_dp, pair.destination_dp, pair.source_allocator or "", pair.destination_allocator or ""
    return pair_size(pair), simplicity_key(pair.source), simplicity_key(pair.destination), own


def grid_pairs(max_layers: int = 3) -> list[Pair]:
    """Return the grid's pairs, the simplest first."""
    pairs = [pair for layers in _layer_tuples(max_layers) for pair in _pairs_of(layers)]
    return sorted(pairs, key=pair_key)


def _layer_tuples(max_layers: int) -> Iterator[tuple[Layer, ...]]:
    for count in range(1, max_layers + 1):
        for layer in _LAYERS if count < 3 else (_LAYERS[0], _LAYERS[2], _LAYERS[-2]):
            yield (layer,) * count
            if count == 2:
                yield UncachedLayer(), layer
            if count == 3:
                for place in range(count):
                    yield (layer,) * place + (UncachedLayer(),) + (layer,) * (count - 1 - place)


def _pairs_of(layers: tuple[Layer, ...]) -> Iterator[Pair]:
    consumers = Consumer(kv_layout="HND"), Consumer(kv_layout="NHD")
    for tokens, consumer in itertools.product((1, 2), consumers):
        spec = CacheSpec(layers=layers, tokens_per_block=tokens, slots=1, consumer=consumer)
        for one, other in itertools.product(_PARALLEL, repeat=2):
            if max(one.pp, other.pp) > len(layers):
                continue
            source = msgspec.structs.replace(spec, parallel=one)
            destination = msgspec.structs.replace(spec, parallel=other)
            yield Pair(source=source, destination=destination)
            if one == other and consumer.kv_layout == "HND" and tokens == 1:
                yield Pair(source=source, destination=msgspec.structs.replace(destination, tokens_per_block=2))


def triggers(name: str, rules: tuple[str, ...], pair: Pair) -> bool:
    """Say whether a faulty transfer breaks ``rules`` on a pair, and the sound one moves it or refuses it."""
    try:
        verdict = judge_pair(pair, method=method_named(name))
        fired = {finding.rule for finding in verdict.findings} if verdict.status == "findings" else set()
        return set(rules) <= fired and judge_pair(pair).status in ("clean", "refused")
    except SpecError:
        return False


def find_minimum(name: str, rules: tuple[str, ...], pairs: list[Pair]) -> Pair | None:
    """Return the first of ``pairs`` on which the fault called ``name`` breaks ``rules``."""
    return next((pair for pair in pairs if triggers(name, rules, pair)), None)
