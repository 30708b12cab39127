"""The order of simplicity is total, prefers what the project prefers, and counts what a reader would count."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from kvsan.ci.minima import grid_specs
from kvsan.ci.simplicity import FORMAT_ORDER, dim_rank, simplicity_key, size
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import (
    AttentionLayer,
    AuxiliaryState,
    HybridLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    SidePlane,
    UncachedLayer,
)
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Consumer, Draft, decode_spec, encode_spec

INDEX = SidePlane(role="index_key", dim=128, format=ElementFormat.BF16)
POSITION = SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank")
PLAIN = AttentionLayer(kv_heads=1, head_dim=128)
MAMBA = RecurrentLayer(algorithm="mamba1", heads=1, state_dim=1)
BASE = CacheSpec(layers=(PLAIN,), slots=1, tokens_per_block=1)


def with_layer(**fields: Any) -> CacheSpec:
    return msgspec.structs.replace(BASE, layers=(msgspec.structs.replace(PLAIN, **fields),))


def with_fields(**fields: Any) -> CacheSpec:
    return msgspec.structs.replace(BASE, **fields)


LESS_SIMPLE = [
    with_fields(layers=(PLAIN, UncachedLayer())),
    with_fields(layers=(LatentLayer(latent_dim=128), UncachedLayer())),
    with_fields(kv_format="fp16"),
    with_layer(head_dim=64, value_dim=64),
    with_layer(kv_heads=2),
    with_fields(tokens_per_block=2),
    with_layer(window=1),
    with_fields(parallel=ParallelLayout(tp=2)),
    with_fields(parallel=ParallelLayout(tp=2), rank=1),
    with_fields(parallel=ParallelLayout(tp=1, attention_dp=True)),
    with_fields(draft=Draft(mode="folded", layers=(PLAIN,))),
    with_fields(slots=2),
    with_fields(slots=None, quota_bytes=1),
    with_fields(state_slots=1),
    with_fields(consumer=Consumer(kv_layout="NHD")),
    with_fields(consumer=Consumer(alignment_bytes=2)),
    with_fields(consumer=Consumer(index_bits=64)),
    with_fields(consumer=Consumer(offset_bits=32)),
    with_fields(max_sequence_tokens=1),
    with_fields(sparse_algorithm="qsa"),
    with_fields(state_format="fp16"),
    with_fields(conv_format="fp16"),
    with_layer(side_planes=(INDEX,)),
    with_layer(kv_format=ElementFormat.BF16),
    with_layer(tokens_per_block=1),
    with_fields(model="x"),
]


@pytest.mark.parametrize("spec", LESS_SIMPLE)
def test_every_departure_from_the_plainest_spec_is_less_simple(spec: CacheSpec) -> None:
    assert simplicity_key(BASE) < simplicity_key(spec)


def test_what_comes_first_decides() -> None:
    """Size before formats before head dims before heads before blocks before windows before ranks before slots."""
    ordered = [
        with_fields(slots=9),
        with_fields(parallel=ParallelLayout(tp=2)),
        with_layer(window=8),
        with_fields(tokens_per_block=2),
        with_layer(kv_heads=2),
        with_layer(head_dim=64, value_dim=64),
        with_fields(kv_format="fp8"),
        with_fields(layers=(LatentLayer(latent_dim=128), UncachedLayer())),
        with_fields(layers=(PLAIN, UncachedLayer())),
    ]
    keys = [simplicity_key(spec) for spec in ordered]
    assert keys == sorted(keys)


def test_what_a_layer_has_for_itself_is_less_simple_than_what_all_have() -> None:
    own, all_alike = with_layer(kv_format=ElementFormat.NVFP4), with_fields(kv_format="nvfp4")
    assert simplicity_key(all_alike) < simplicity_key(own)
    mamba = with_fields(layers=(msgspec.structs.replace(MAMBA, ssm_format=ElementFormat.FP32),))
    assert simplicity_key(with_fields(layers=(MAMBA,), state_format="fp32")) < simplicity_key(mamba)


def test_formats_and_dims_in_order() -> None:
    assert FORMAT_ORDER[0] is ElementFormat.BF16
    assert set(FORMAT_ORDER) == set(ElementFormat)
    dims = [128, 64, 256, 32, 512, 16, 1024, 1, 1 << 20, 3, 80, 96, 127, 129]
    assert sorted(dims, key=dim_rank) == dims


def test_equal_keys_mean_equal_specs() -> None:
    specs = [*itertools.islice(grid_specs(3), 400), *LESS_SIMPLE, BASE]
    by_key = {simplicity_key(spec): spec for spec in specs}
    assert all(by_key[simplicity_key(spec)] == spec for spec in specs)
    assert len(by_key) == len(set(specs))


def test_a_spec_read_back_has_the_same_key() -> None:
    assert all(simplicity_key(decode_spec(encode_spec(spec))) == simplicity_key(spec) for spec in LESS_SIMPLE)


def test_the_order_of_layers_counts_last() -> None:
    one, other = with_fields(layers=(PLAIN, MAMBA)), with_fields(layers=(MAMBA, PLAIN))
    assert simplicity_key(one) != simplicity_key(other)
    assert simplicity_key(one)[:-1] == simplicity_key(other)[:-1]


@pytest.mark.parametrize(
    ("layers", "kv_format", "expected"),
    [
        ((PLAIN,), "bf16", 3),
        ((PLAIN,), "nvfp4", 5),
        ((LatentLayer(latent_dim=128),), "bf16", 2),
        ((LatentLayer(latent_dim=128),), "nvfp4", 3),
        ((UncachedLayer(),), "bf16", 1),
        ((MAMBA,), "bf16", 3),
        ((RecurrentLayer(algorithm="short_conv", heads=1),), "bf16", 2),
        ((HybridLayer(attention=PLAIN, recurrent=MAMBA),), "fp8", 5),
        ((msgspec.structs.replace(PLAIN, side_planes=(INDEX, POSITION)),) * 3, "bf16", 3 * 4 + 1),
        (
            (
                msgspec.structs.replace(
                    MAMBA, auxiliary=(AuxiliaryState(role="a", shape=(1,), format=ElementFormat.INT64),)
                ),
            ),
            "bf16",
            4,
        ),
    ],
)
def test_size_counts_layers_and_the_buffers_that_they_ask_for(
    layers: tuple[Layer, ...], kv_format: str, expected: int
) -> None:
    spec = with_fields(layers=layers, kv_format=kv_format)
    assert size(spec) == simplicity_key(spec)[0] == expected


def test_draft_layers_count() -> None:
    assert size(with_fields(draft=Draft(mode="separate", layers=(PLAIN, PLAIN)))) == 9
