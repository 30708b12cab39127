"""``cache_specs``: every spec is valid, pins hold, and most specs are inside what their allocator supports."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.control import current_build_context

from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, HybridLayer, LatentLayer, RecurrentLayer, UncachedLayer
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Consumer, decode_spec, encode_spec
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected
from kvsan.strategies import FAMILIES, cache_specs, census, family_of, specs_for

ALLOCATORS = (
    "trtllm-v1",
    "trtllm-v2",
    "trtllm-v2-qsa-legacy",
    "trtllm-v2-qsa-packed",
    "trtllm-v2-qsa-packed-rank-local",
)


def attentions(spec: CacheSpec) -> list[AttentionLayer]:
    halves = [layer.attention if isinstance(layer, HybridLayer) else layer for layer in spec.layers]
    return [layer for layer in halves if isinstance(layer, AttentionLayer)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_spec_is_valid_and_has_one_canonical_text(family, examples):
    specs = examples(cache_specs(family=family), 120)
    assert len(specs) == 120, "no draw was thrown away"
    for spec in specs:
        assert decode_spec(encode_spec(spec)) == spec


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_four_in_five_specs_are_supported(allocator):
    counted = census(specs_for(allocator), examples=150, allocator=allocator)
    assert counted.support >= 0.8, counted


def test_names_choose_families():
    assert [family_of(name) for name in ALLOCATORS] == ["dense-v1", "dense", "qsa", "qsa", "qsa"]
    assert family_of("fault:whatever") == "qsa"
    assert family_of("vllm-e2") == "dense"
    assert family_of("package.module:allocate") == "any"


def test_an_example_takes_few_draws():
    drawn = []

    @settings(max_examples=200, derandomize=True, database=None, deadline=None)
    @given(st.data())
    def count(data):
        before = len(current_build_context().data.nodes)
        data.draw(cache_specs(family="qsa"))
        drawn.append(len(current_build_context().data.nodes) - before)

    count()
    assert sum(drawn) <= 30 * len(drawn)


@pytest.mark.parametrize(
    ("options", "holds"),
    [
        ({"kv_formats": st.just(ElementFormat.FP8)}, lambda spec: spec.kv_format is ElementFormat.FP8),
        ({"tokens_per_block": st.just(24)}, lambda spec: spec.tokens_per_block == 24),
        ({"min_layers": 5, "max_layers": 5}, lambda spec: len(spec.layers) == 5),
        ({"max_layers": 64}, lambda spec: len(spec.layers) <= 64),
        ({"draft_modes": ("none",)}, lambda spec: spec.draft.mode == "none"),
        ({"draft_modes": ("separate",)}, lambda spec: spec.draft.mode == "separate"),
        ({"draft_modes": ("folded",)}, lambda spec: spec.draft.mode == "folded"),
        ({"windows": False}, lambda spec: all(layer.window is None for layer in attentions(spec))),
        ({"heads": st.just(6)}, lambda spec: all(layer.kv_heads == 6 for layer in attentions(spec))),
        (
            {"head_dims": st.just(96), "kv_formats": st.just(ElementFormat.BF16)},
            lambda spec: all(layer.head_dim == 96 for layer in attentions(spec)),
        ),
        ({"parallel": st.just(ParallelLayout(tp=6))}, lambda spec: spec.parallel == ParallelLayout(tp=6)),
        ({"slots": st.just(7)}, lambda spec: spec.slots == 7),
        ({"quotas": False}, lambda spec: spec.quota_bytes is None),
        ({"consumers": st.just(Consumer(alignment_bytes=16))}, lambda spec: spec.consumer.alignment_bytes == 16),
        (
            {"state_formats": st.just(ElementFormat.FP32)},
            lambda spec: not spec.has_recurrent or spec.state_format is spec.conv_format is ElementFormat.FP32,
        ),
        (
            {"kinds": ("attention", "uncached")},
            lambda spec: all(isinstance(layer, AttentionLayer | UncachedLayer) for layer in spec.layers),
        ),
        (
            {"kinds": ("recurrent",)},
            lambda spec: all(isinstance(layer, RecurrentLayer) for layer in spec.layers),
        ),
        ({"kinds": ("hybrid",)}, lambda spec: all(isinstance(layer, HybridLayer) for layer in spec.layers)),
        (
            {"layer_formats": False},
            lambda spec: all(getattr(layer, "kv_format", None) is None for layer in spec.layers + spec.draft.layers),
        ),
        ({"sparse": False}, lambda spec: not any(getattr(layer, "side_planes", ()) for layer in spec.layers)),
    ],
)
@pytest.mark.parametrize("family", ["dense", "dense-v1", "qsa", "any"])
def test_pinned_axes_hold(family, options, holds, examples):
    for spec in examples(cache_specs(family=family, **options), 15):
        assert holds(spec), spec


def test_given_layers_get_layouts_that_fit(examples):
    """Recurrent heads divide over the ranks, and no stage is empty."""
    layers = (
        RecurrentLayer(algorithm="gdn", heads=6, head_dim=64, groups=3, state_dim=64),
        AttentionLayer(kv_heads=2, head_dim=64),
    )
    for spec in examples(cache_specs(layers=st.just(layers)), 150):
        assert spec.layers == layers
        assert spec.parallel.state_tp in (1, 2, 3, 6)
        assert spec.parallel.pp <= 2


def test_given_classes_are_all_a_model_consists_of(examples):
    classes = (AttentionLayer(kv_heads=8, head_dim=128), AttentionLayer(kv_heads=8, head_dim=128, window=1024))
    for spec in examples(cache_specs(layer_classes=st.just(classes)), 100):
        assert set(spec.layers) <= set(classes)


def test_sparse_models_have_a_class_with_side_planes(examples):
    for family, kind in (("qsa", AttentionLayer), ("dense", LatentLayer)):
        specs = examples(cache_specs(family=family, sparse=True, max_layers=4), 100)
        paged = [layer for spec in specs for layer in spec.layers if isinstance(layer, kind)]
        assert any(layer.side_planes for layer in paged)
        assert all(not isinstance(layer, AttentionLayer) for layer in paged) or family == "qsa"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"family": "sparse"}, "family"),
        ({"rare": "nothing of the kind"}, "rare"),
        ({"draft_modes": ("none", "shared")}, "draft_modes"),
        ({"kinds": ()}, "kinds"),
        ({"min_layers": 4, "max_layers": 3}, "max_layers"),
    ],
)
def test_bad_options_are_refused_at_once(options, field):
    with pytest.raises(SpecError, match=field):
        cache_specs(**options)


def test_refusals_by_the_allocator_are_explained(examples):
    """No spec of any family brings an allocator to an error of its own kind of silence."""
    for family in FAMILIES:
        for spec in examples(cache_specs(family=family), 25, number=3):
            for allocator in ("trtllm-v1", "trtllm-v2", "trtllm-v2-qsa-packed"):
                try:
                    allocate(spec, allocator)
                except Rejected as rejection:
                    assert rejection.rule == "rejected", rejection.message


def test_equal_seeds_draw_equal_specs(examples):
    assert examples(cache_specs(family="any"), 50, number=7) == examples(cache_specs(family="any"), 50, number=7)
    assert examples(cache_specs(family="any"), 50, number=7) != examples(cache_specs(family="any"), 50, number=8)
