"""The parts of a spec: formats, layers, planes, patterns, layouts, drafts, consumers."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from kvsan.model.formats import KV_FORMATS, STATE_FORMATS, ElementFormat
from kvsan.model.layers import AttentionLayer, HybridLayer, LatentLayer, RecurrentLayer, SidePlane
from kvsan.model.parallel import ParallelLayout, pipeline_stages
from kvsan.strategies import (
    attention_layers,
    consumers,
    drafts,
    hybrid_layers,
    kv_formats,
    latent_layers,
    layer_classes,
    layer_patterns,
    parallel_layouts,
    raw_layouts,
    recurrent_layers,
    side_planes,
    state_formats,
)
from kvsan.strategies.geometry import plane_of_bytes


def test_formats_are_those_of_the_model(examples):
    assert set(examples(kv_formats(), 100)) == set(KV_FORMATS)
    assert set(examples(kv_formats(block_scaled=False), 100)) == set(KV_FORMATS) - {ElementFormat.NVFP4}
    assert set(examples(state_formats(), 100)) == set(STATE_FORMATS)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_attention_dims_are_legal_for_the_format(kv_format, examples):
    layers = examples(attention_layers(kv_format=kv_format, layer_formats=True), 80)
    for layer in layers:
        assert 1 <= layer.kv_heads <= 256
        assert 1 <= layer.head_dim <= 1024
        if (layer.kv_format or kv_format) is ElementFormat.NVFP4:
            assert layer.head_dim % 16 == 0
        assert layer.window is not None or layer.sink_tokens == 0
    assert len({layer.kv_format for layer in layers}) == len(KV_FORMATS)


def test_extremes_of_attention_are_reachable(minimum):
    assert minimum(attention_layers(), lambda layer: layer.kv_heads > 64).kv_heads == 65
    assert minimum(attention_layers(), lambda layer: layer.head_dim > 600).head_dim == 601
    sink = minimum(attention_layers(), lambda layer: layer.sink_tokens > 0)
    assert (sink.window, sink.sink_tokens) == (128, 1)


def test_latent_rows_are_legal_for_the_format(examples):
    for layer in examples(latent_layers(kv_format=ElementFormat.NVFP4, side_planes=side_planes(position=False)), 80):
        assert isinstance(layer, LatentLayer)
        assert layer.row_dim % 16 == 0
        assert [plane.role for plane in layer.side_planes] == ["index_key"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 12])
def test_recurrent_states_divide_over_the_ranks(ranks, examples):
    layers = examples(recurrent_layers(ranks=ranks, auxiliary=True, state_formats=True), 100)
    for layer in layers:
        assert layer.heads % ranks == 0
        assert layer.conv_channels % ranks == 0
    assert {layer.algorithm for layer in layers} == {"gdn", "kda", "mamba1", "mamba2", "short_conv"}
    assert any(layer.auxiliary for layer in layers)
    assert any(layer.ssm_format is not None for layer in layers)


def test_hybrid_layers_are_made_of_what_is_given(examples):
    attention = attention_layers(heads=st.just(2), head_dims=st.just(64), windows=False)
    for layer in examples(hybrid_layers(attention=attention), 50):
        assert isinstance(layer, HybridLayer)
        assert layer.attention == AttentionLayer(kv_heads=2, head_dim=64)


def test_side_planes_are_published_ones_or_any(examples):
    planes = examples(side_planes(), 300)
    assert {(128, ElementFormat.BF16), (132, ElementFormat.UINT8)} <= {(own[0].dim, own[0].format) for own in planes}
    assert {len(own) for own in planes} == {1, 2}
    assert all(own[1].scope == "rank" for own in planes if len(own) == 2)
    pinned = examples(side_planes(position=False, dims=st.just(20), formats=st.just(ElementFormat.FP16)), 10)
    assert set(pinned) == {(SidePlane(role="index_key", dim=20, format=ElementFormat.FP16),)}


@pytest.mark.parametrize("token_bytes", [1, 2, 7, 132, 256, 1 << 20, 1 << 23])
def test_a_plane_of_given_bytes_has_them(token_bytes):
    for variant in range(4):
        plane = plane_of_bytes("index_key", token_bytes, variant)
        assert plane is not None
        assert plane.token_bytes == token_bytes


def test_a_plane_without_bytes_or_of_too_many_is_none():
    assert plane_of_bytes("index_key", 0) is None
    assert plane_of_bytes("index_key", 1 << 30) is None


def test_patterns_draw_the_length_first(examples, minimum):
    for pattern in examples(layer_patterns(3, min_layers=2, max_layers=20), 150):
        assert 2 <= len(pattern) <= 20
        assert set(pattern) <= {0, 1, 2}
    assert minimum(layer_patterns(3), lambda pattern: 2 in pattern and 1 in pattern) in ((1, 2), (2, 1))
    assert minimum(layer_patterns(2, max_layers=10_000), lambda pattern: len(pattern) > 5) == (0,) * 6
    assert minimum(layer_patterns(1, max_layers=10_000), lambda pattern: len(pattern) > 126) == (0,) * 10_000


def test_a_reference_pattern_is_reachable(minimum):
    """Three recurrent layers to each attention layer, twelve times: the pattern of the hybrid models."""
    found = minimum(layer_patterns(2, max_layers=48), lambda pattern: pattern == (0, 0, 0, 1) * (len(pattern) >> 2))
    assert found == (0, 0, 0, 1)


def test_classes_have_the_geometry_of_the_first(examples):
    """Twins are what merges life cycles: many classes differ from the first in one thing alone."""
    twins = 0
    for classes in examples(layer_classes(family="dense"), 200):
        first = classes[0]
        assert isinstance(first, AttentionLayer | LatentLayer)
        for other in classes[1:]:
            if isinstance(first, AttentionLayer) and isinstance(other, AttentionLayer):
                same = (first.kv_heads, first.head_dim) == (other.kv_heads, other.head_dim)
                twins += same and first.window != other.window
    assert twins > 10


def test_layouts_fit_the_layers(examples):
    layouts = examples(parallel_layouts(layers=5), 400)
    for layout in layouts:
        assert layout.pp <= 4
        assert layout.tp % layout.ep == 0
        stages = pipeline_stages(5, layout.pp, layout.pp_partition)
        assert all(len(stage) for stage in stages)
    assert {layout.name for layout in layouts} >= {"tp1", "tp2", "tep4", "adp2", "tp3", "tp1pp2"}
    assert any(layout.pp_partition and sum(layout.pp_partition) < 5 for layout in layouts), (
        "a surplus for the last stage"
    )
    assert any(layout.cp > 1 for layout in layouts)


def test_layouts_can_be_restricted(examples):
    assert set(examples(parallel_layouts(layers=1, max_tp=1, kinds=("tp",)), 20)) == {ParallelLayout()}
    kinds = examples(parallel_layouts(layers=4, kinds=("adp",), uneven=False), 60)
    assert all(layout.attention_dp or layout.tp == 1 for layout in kinds)
    assert all(layout.pp_partition is None for layout in kinds)
    state = RecurrentLayer(algorithm="mamba1", heads=4, state_dim=16)
    assert {layout.state_tp for layout in examples(parallel_layouts(layers=1, state_layers=(state,)), 100)} == {1, 2, 4}


def test_drafts_hold_layers_where_there_is_a_mode(examples):
    for draft in examples(drafts(layers=latent_layers()), 60):
        assert bool(draft.layers) == (draft.mode != "none")
        assert all(isinstance(layer, LatentLayer) for layer in draft.layers)
    assert {draft.mode for draft in examples(drafts(modes=("folded",)), 10)} == {"folded"}


def test_consumers_demand_nothing_unless_asked(examples):
    assert {consumer.alignment_bytes for consumer in examples(consumers(), 30)} == {1}
    demanding = examples(consumers(demanding=True), 100)
    assert {consumer.alignment_bytes for consumer in demanding} >= {1, 16, 128}
    assert {consumer.offset_bits for consumer in demanding} == {32, 64}


def test_strategies_compose():
    """A part goes wherever Hypothesis takes a strategy."""
    pairs = st.tuples(attention_layers(), parallel_layouts()).map(lambda pair: pair[0].kv_heads * pair[1].tp)
    assert isinstance(pairs, st.SearchStrategy)
    assert isinstance(st.lists(raw_layouts(), max_size=2), st.SearchStrategy)
