"""Rare classes: what is in each and what is just outside, and that recipes and families reach them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, LatentLayer, Layer, RecurrentLayer, SidePlane, UncachedLayer
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Draft
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected
from kvsan.strategies import CLASSES, FAMILIES, FITTING, RECIPES, cache_specs, census, classes_of, observe
from kvsan.strategies.rare import nearness

BF16, FP8, NVFP4 = ElementFormat.BF16, ElementFormat.FP8, ElementFormat.NVFP4


def kv(heads: int = 1, dim: int = 128, **fields: object) -> AttentionLayer:
    return msgspec.structs.replace(AttentionLayer(kv_heads=heads, head_dim=dim), **fields)


def sparse(heads: int, dim: int, index_bytes: int) -> AttentionLayer:
    plane = SidePlane(role="index_key", dim=index_bytes, format=ElementFormat.UINT8)
    return kv(heads, dim, side_planes=(plane,))


def latent(row: int, index_bytes: int = 0) -> LatentLayer:
    planes = (SidePlane(role="index_key", dim=index_bytes, format=ElementFormat.UINT8),) if index_bytes else ()
    return LatentLayer(latent_dim=row, side_planes=planes)


def spec(*layers: Layer, **fields: object) -> CacheSpec:
    return CacheSpec(layers=layers, **fields)  # type: ignore[arg-type]


def tp(size: int) -> ParallelLayout:
    return ParallelLayout(tp=size)


GDN = RecurrentLayer(algorithm="mamba1", heads=64, state_dim=16)

INSIDE_AND_OUTSIDE = [
    # bf16, 1 head x 128: a K page takes 256 B per token
    ("index plane in its own layer's K/V pool", spec(sparse(1, 128, 256)), spec(sparse(1, 128, 255))),
    ("index plane in its own layer's K/V pool", spec(sparse(4, 128, 256), parallel=tp(4)), spec(sparse(4, 128, 256))),
    ("index plane in another layer's pool", spec(latent(64, 256), latent(128)), spec(latent(128, 256), latent(64))),
    # K and V of one layer: 512 B per token; a second size with as many bytes
    ("tie of two size classes", spec(sparse(1, 128, 512)), spec(sparse(1, 128, 511))),
    ("tie of two size classes", spec(kv(2), kv(1), kv(1)), spec(kv(2), kv(1))),
    ("tie of two size classes", spec(kv(2), kv(1), kv(1)), spec(kv(2), kv(1), kv(1, window=64))),
    ("life cycles merged", spec(kv(), kv(window=64)), spec(kv(), kv(window=64), kv())),
    ("life cycles merged", spec(kv(), kv(window=64)), spec(kv(), kv(window=64), max_sequence_tokens=64)),
    (
        "life cycles merged with different page sizes",
        spec(kv(2), kv(window=64), kv(window=64)),
        spec(kv(), kv(window=64)),
    ),
    # nvfp4: a scale page is an eighth of the data page
    ("scale page equal to another page", spec(kv(8), kv(1), kv_format=NVFP4), spec(kv(7), kv(1), kv_format=NVFP4)),
    ("scale page equal to another page", spec(sparse(1, 128, 8), kv_format=NVFP4), spec(kv(1), kv_format=NVFP4)),
    ("KV heads = TP", spec(kv(4), parallel=tp(4)), spec(kv(1))),
    ("heads replicated", spec(kv(2), parallel=tp(4)), spec(kv(2), parallel=ParallelLayout(tp=4, attention_dp=True))),
    ("heads padded", spec(kv(5), parallel=tp(4)), spec(kv(8), parallel=tp(4))),
    ("one local sparse layer", spec(sparse(2, 64, 9), kv(2, 64)), spec(sparse(2, 64, 9), sparse(2, 64, 9))),
    (
        "one local sparse layer",
        spec(sparse(2, 64, 9), sparse(2, 64, 9), parallel=ParallelLayout(pp=2)),
        spec(sparse(2, 64, 9), kv(2, 64), parallel=ParallelLayout(pp=2), rank=1),
    ),
    ("two KV formats in one life cycle", spec(kv(), kv(kv_format=FP8)), spec(kv(), kv(kv_format=BF16))),
    ("two KV formats in one life cycle", spec(kv(), kv(kv_format=FP8)), spec(kv(), kv(kv_format=FP8, window=9))),
    (
        "uneven PP",
        spec(kv(), kv(), UncachedLayer(), parallel=ParallelLayout(pp=2)),
        spec(kv(), kv(), parallel=ParallelLayout(pp=2)),
    ),
    (
        "ssm bytes == conv bytes",
        spec(RecurrentLayer(algorithm="mamba1", heads=8, state_dim=3, conv_kernel=4)),
        spec(RecurrentLayer(algorithm="mamba1", heads=8, state_dim=3, conv_kernel=4), state_format=ElementFormat.FP32),
    ),
    ("window group", spec(kv(window=64)), spec(kv(window=64), max_sequence_tokens=64)),
    (
        "draft folded",
        spec(kv(), draft=Draft(mode="folded", layers=(kv(),))),
        spec(kv(), kv(), draft=Draft(mode="folded", layers=(kv(),)), parallel=ParallelLayout(pp=2)),
    ),
    (
        "draft separate",
        spec(kv(), draft=Draft(mode="separate", layers=(kv(),))),
        spec(kv(), draft=Draft(mode="folded", layers=(kv(),))),
    ),
    (
        "packed planes equal to another page",
        spec(sparse(2, 128, 256), sparse(2, 128, 256)),
        spec(sparse(2, 128, 256), sparse(2, 128, 256), sparse(2, 128, 256)),
    ),
]


@pytest.mark.parametrize(("name", "inside", "outside"), INSIDE_AND_OUTSIDE)
def test_each_class_has_an_inside_and_an_outside(name, inside, outside):
    assert name in classes_of(inside)
    assert name not in classes_of(outside)


def test_every_class_is_described_and_tested():
    assert {name for name, _, _ in INSIDE_AND_OUTSIDE} == set(CLASSES) == set(FITTING)
    assert set(RECIPES) <= set(CLASSES)


def test_storage_classes_are_read_off_the_layout_that_was_built():
    """V1 gives every window a block manager of its own, so nothing merges there; V2 merges."""
    twins = spec(kv(), kv(window=64))
    assert "life cycles merged" in classes_of(twins, allocate(twins, "trtllm-v2"))
    assert "life cycles merged" not in classes_of(twins, allocate(twins, "trtllm-v1"))


def test_arithmetic_and_built_storage_agree(examples):
    """Without packing, V2's layouts are in the classes that the arithmetic foretells."""
    compared = 0
    for drawn in examples(cache_specs(family="dense"), 200):
        try:
            layout = allocate(drawn, "trtllm-v2")
        except Rejected:
            continue
        compared += 1
        assert classes_of(drawn, layout) == classes_of(drawn)
    assert compared > 150


def test_a_refusal_is_classified_by_arithmetic():
    colliding = spec(sparse(1, 128, 256), sparse(1, 128, 256))
    with pytest.raises(Rejected) as refusal:
        allocate(colliding, "trtllm-v2-qsa-legacy")
    assert "index plane in its own layer's K/V pool" in classes_of(colliding, refusal.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_class_is_reached_in_2000_examples_of_a_fitting_family(family):
    missing = {name for name, families in FITTING.items() if family in families}
    for chunk in range(8):
        counted = census(cache_specs(family=family), examples=250, seed=chunk)
        missing -= {name for name, count in counted.classes.items() if count}
        if not missing:
            return
    assert not missing


@pytest.mark.parametrize(("family", "name"), [(family, name) for name in RECIPES for family in FITTING[name]])
def test_a_recipe_makes_its_class(family, name):
    counted = census(cache_specs(family=family, rare=name), examples=20)
    assert counted.classes[name] >= 14


def test_recipes_touch_no_pinned_axis(examples):
    from hypothesis import strategies as st

    pinned = {"kv_formats": st.just(FP8), "heads": st.just(4), "windows": False, "parallel": st.just(tp(2))}
    for name in RECIPES:
        for drawn in examples(cache_specs(family="any", rare=name, draft_modes=("none",), **pinned), 8):
            assert drawn.kv_format is FP8
            assert drawn.parallel == tp(2)
            halves = [getattr(layer, "attention", layer) for layer in drawn.layers]
            assert all(half.kv_heads == 4 for half in halves if isinstance(half, AttentionLayer))
            assert all(getattr(half, "window", None) is None for half in halves)


def test_recipes_make_merged_cycles_common():
    """The class that layers drawn one by one hardly ever reach."""
    name = "life cycles merged with different page sizes"
    mixed, plain = census(cache_specs(), examples=300), census(cache_specs(plain=True), examples=300)
    assert mixed.classes[name] >= 2 * max(1, plain.classes[name])


def test_observe_counts_inside_a_test_and_classifies_outside():
    colliding = spec(sparse(1, 128, 256))
    found = observe(colliding)
    assert "index plane in its own layer's K/V pool" in found
    assert found == classes_of(colliding)
    seen = []

    @settings(max_examples=30, derandomize=True, database=None)
    @given(cache_specs(family="qsa"))
    def campaign(drawn):
        seen.append(observe(drawn))
        seen.append(observe(drawn))  # two allocators, one example

    campaign()
    assert len(seen) == 60


def test_nearness_grows_towards_the_class():
    far, near, there = (nearness(spec(sparse(1, 128, size))).collision for size in (16, 255, 256))
    assert far is not None
    assert near is not None
    assert far < near < 0 == there
    assert nearness(spec(kv(), kv(window=64))).merge == 0
    assert nearness(spec(GDN)) == nearness(spec(UncachedLayer()))
