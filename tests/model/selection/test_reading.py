"""Inputs read from a model: geometry, recurrent layers, parallelism; and the bytes that a decision is priced with."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, LatentLayer, RecurrentLayer, UncachedLayer
from kvsan.model.loading import load
from kvsan.model.parallel import ParallelLayout, rank_heads
from kvsan.model.selection import CONSISTENT, inputs_of, priced, select
from kvsan.model.selection.reading import has_variable_geometry
from kvsan.model.spec import CacheSpec
from kvsan.sim.rules.manager import check_manager
from kvsan.strategies import geometry_specs

DENSE = AttentionLayer(kv_heads=2, head_dim=64)
STATE = RecurrentLayer(algorithm="gdn", heads=2, head_dim=64, groups=2, state_dim=64)


@pytest.mark.parametrize(
    ("layers", "variable"),
    [
        ((DENSE, DENSE), False),
        ((DENSE, msgspec.structs.replace(DENSE, window=64)), False),
        ((DENSE, msgspec.structs.replace(DENSE, kv_format=ElementFormat.FP8)), False),
        ((DENSE, UncachedLayer(), STATE), False),
        ((DENSE, AttentionLayer(kv_heads=2, head_dim=128)), True),
        ((DENSE, AttentionLayer(kv_heads=1, head_dim=64)), True),
        ((LatentLayer(latent_dim=512, rope_dim=64), LatentLayer(latent_dim=576)), False),
        ((LatentLayer(latent_dim=512), LatentLayer(latent_dim=256)), True),
    ],
)
def test_geometry_varies_with_heads_and_dims_alone(layers, variable) -> None:
    assert has_variable_geometry(CacheSpec(layers=layers)) == variable


def test_the_reference_model(root) -> None:
    spec = load(root / "examples" / "qwen3.8-flash-next" / "config.json", layout="adp4")
    inputs = inputs_of(spec)
    assert (inputs.sparse, inputs.hybrid, inputs.geometry, inputs.attention_dp) == ("qsa", "some", "uniform", True)
    decision = select(inputs)
    assert (decision.manager, decision.seats) == ("v2-hybrid-qsa", 8)
    assert decision.held is not None
    assert decision.held.allocator == "trtllm-v2-qsa-packed"


def test_what_is_given_wins_over_the_model() -> None:
    assert inputs_of(CacheSpec(layers=(DENSE,)), geometry="variable", sparse="rocket", pp=3).pp == 3
    assert inputs_of(CacheSpec(layers=(DENSE,))).sparse == "none"


def test_a_stage_without_recurrent_layers_has_zero_of_them() -> None:
    spec = CacheSpec(layers=(STATE, DENSE), parallel=ParallelLayout(pp=2))
    assert inputs_of(spec).hybrid == "some"
    assert inputs_of(msgspec.structs.replace(spec, rank=1)).hybrid == "zero"
    assert inputs_of(CacheSpec(layers=(DENSE,))).hybrid == "no"


def test_fp4_latents_are_seen() -> None:
    layer = LatentLayer(latent_dim=512, rope_dim=64)
    assert inputs_of(CacheSpec(layers=(layer,), kv_format="nvfp4")).fp4_mla
    assert not inputs_of(CacheSpec(layers=(layer,), kv_format="fp8")).fp4_mla
    assert not inputs_of(CacheSpec(layers=(DENSE,), kv_format="nvfp4")).fp4_mla


def test_bytes_per_token_and_budget() -> None:
    spec = CacheSpec(layers=(DENSE, DENSE), slots=None, quota_bytes=10_000)
    numbers = {number.name: number.value for number in priced(select(inputs_of(spec)), spec).numbers}
    assert numbers["bytes per token"] == 2 * 2 * 2 * 64 * 2
    assert numbers["budget"] == 9
    assert numbers["warm-up"] is None


@settings(max_examples=150, deadline=None)
@given(geometry_specs())
def test_geometries_and_budgets_of_any_kind(spec: CacheSpec) -> None:
    """The geometry decides the manager under either flag, and prices are the sum over the layers."""
    shapes = {(layer.kv_heads, layer.head_dim) for layer in spec.layers}
    for flag in ("true", "false", "auto"):
        decision = select(inputs_of(spec, v2=flag), CONSISTENT)
        assert decision.manager == ("v2" if flag == "true" or len(shapes) > 1 else "v1")
        assert list(check_manager(decision)) == []
    heads = [rank_heads(layer.kv_heads, spec.parallel.attention_tp) for layer in spec.layers]
    bits = (
        sum(2 * count * layer.head_dim for count, layer in zip(heads, spec.layers, strict=True)) * spec.kv_format.bits
    )
    if spec.kv_format.value == "nvfp4":
        bits += bits // 8  # one byte of scale for 16 elements of 4 bits
    numbers = {number.name: number for number in priced(decision, spec).numbers}
    assert numbers["bytes per token"].value == bits // 8
    assert numbers["budget"].value == spec.quota_bytes // (bits // 8)
    assert {number.manager for name, number in numbers.items() if name != "seats"} == {decision.manager}
