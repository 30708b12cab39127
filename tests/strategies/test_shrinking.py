"""Shrink quality: what a failing predicate is reduced to is the simplest spec that fails it, with nothing else left."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, Layer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec
from kvsan.sim.verdict import judge
from kvsan.strategies import cache_specs, classes_of

INDEX = (SidePlane(role="index_key", dim=128, format=ElementFormat.BF16),)
HEAD = AttentionLayer(kv_heads=1, head_dim=128)
SPARSE = AttentionLayer(kv_heads=1, head_dim=128, side_planes=INDEX)
WINDOWED = AttentionLayer(kv_heads=1, head_dim=128, window=128)


def simplest(*layers: Layer, **fields: object) -> CacheSpec:
    """Return the spec that a shrunk one equals: one token per block, one slot, one rank unless said."""
    return CacheSpec(layers=layers, tokens_per_block=1, slots=1, **fields)  # type: ignore[arg-type]


def attentions(spec: CacheSpec) -> list[AttentionLayer]:
    return [layer for layer in spec.layers if isinstance(layer, AttentionLayer)]


def colliding_pair(spec: CacheSpec) -> bool:
    """Two sparse layers whose index page equals their K page."""
    bits = spec.kv_format.bits
    heads = [-(-layer.kv_heads // spec.parallel.attention_tp) for layer in attentions(spec)]
    return (
        sum(
            any(plane.token_bytes * 8 == own * layer.head_dim * bits for plane in layer.side_planes)
            for own, layer in zip(heads, attentions(spec), strict=True)
        )
        >= 2
    )


CASES: list[tuple[str, str, Callable[[CacheSpec], bool], CacheSpec]] = [
    ("index page equals K page twice", "qsa", colliding_pair, simplest(SPARSE, SPARSE, sparse_algorithm="qsa")),
    (
        "legacy refuses",
        "qsa",
        lambda spec: judge(spec, "trtllm-v2-qsa-legacy").status == "rejected",
        simplest(SPARSE, SPARSE, sparse_algorithm="qsa"),
    ),
    (
        "nvfp4 with three layers",
        "dense",
        lambda spec: spec.kv_format is ElementFormat.NVFP4 and len(spec.layers) >= 3,
        simplest(HEAD, HEAD, HEAD, kv_format=ElementFormat.NVFP4),
    ),
    (
        "more ranks than KV heads",
        "dense",
        lambda spec: any(layer.kv_heads < spec.parallel.attention_tp for layer in attentions(spec)),
        simplest(HEAD, parallel=ParallelLayout(tp=2)),
    ),
    (
        "sinks and two heads",
        "dense",
        lambda spec: any(layer.sink_tokens and layer.kv_heads > 1 for layer in attentions(spec)),
        simplest(AttentionLayer(kv_heads=2, head_dim=128, window=128, sink_tokens=1)),
    ),
    (
        "a large head dim in fp8",
        "dense",
        lambda spec: (
            spec.kv_format is ElementFormat.FP8 and sum(layer.head_dim == 256 for layer in attentions(spec)) > 1
        ),
        simplest(*[AttentionLayer(kv_heads=1, head_dim=256)] * 2, kv_format=ElementFormat.FP8),
    ),
    (
        "merged life cycles",
        "dense",
        lambda spec: "life cycles merged" in classes_of(spec) and len(set(attentions(spec))) > 1,
        simplest(HEAD, WINDOWED),
    ),
    (
        "merged life cycles of different pages",
        "dense",
        lambda spec: "life cycles merged with different page sizes" in classes_of(spec),
        simplest(AttentionLayer(kv_heads=2, head_dim=128), WINDOWED, WINDOWED),
    ),
    (
        "a scale page in a K/V pool",
        "dense",
        lambda spec: "scale page equal to another page" in classes_of(spec),
        simplest(AttentionLayer(kv_heads=8, head_dim=128), HEAD, kv_format=ElementFormat.NVFP4),
    ),
]


@pytest.mark.parametrize(("name", "family", "predicate", "expected"), CASES, ids=[case[0] for case in CASES])
def test_shrinks_to_the_simplest_spec(name, family, predicate, expected, minimum):
    """One of three starting points leads there; a local minimum is left to the structural reducer."""
    found = []
    for number in (1, 2, 3):
        found.append(minimum(cache_specs(family=family), predicate, number=number))
        if found[-1] == expected:
            return
    assert expected in found
