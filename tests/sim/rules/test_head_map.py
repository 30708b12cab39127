from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsan.model.layers import AttentionLayer
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec
from kvsan.sim.checking import check
from kvsan.sim.finding import Finding
from kvsan.sim.layout import HeadMap, Layout
from kvsan.sim.registry import allocate
from kvsan.sim.rules.head_map import RULE

Change = Callable[..., Layout]
Found = Callable[[str, Layout], list[Finding]]


def sharded(heads: int, ranks: int, allocator: str = "trtllm-v2") -> Layout:
    layer = AttentionLayer(kv_heads=heads, head_dim=16)
    return allocate(CacheSpec(layers=(layer,) * 2, parallel=ParallelLayout(tp=ranks), slots=2), allocator)


def bare(heads: int, rank_heads: int, *ranges: tuple[int, int]) -> Layout:
    """Return a layout that holds a head map and nothing else."""
    return Layout(
        allocator="raw",
        pools=(),
        life_cycles=(),
        buffers=(),
        head_maps=(HeadMap("target", (0, 1), heads, rank_heads, ranges),),
    )


def test_sound_layouts_are_silent(sound_layout: Layout, found: Found) -> None:
    assert found("head-map", sound_layout) == []


@pytest.mark.parametrize("allocator", ["trtllm-v1", "trtllm-v2"])
@pytest.mark.parametrize(("heads", "ranks"), [(2, 4), (1, 8), (3, 4), (5, 4), (8, 4), (7, 3), (6, 4), (9, 8), (3, 8)])
def test_rounding_up_and_replication_are_sound(found: Found, heads: int, ranks: int, allocator: str) -> None:
    layout = sharded(heads, ranks, allocator)
    assert layout.head_maps[0].rank_heads == -(-heads // ranks)
    assert found("head-map", layout) == []


@settings(max_examples=60)
@given(heads=st.integers(1, 256), ranks=st.integers(2, 64))
def test_rounding_down_loses_a_head(heads: int, ranks: int) -> None:
    each = heads // ranks
    ranges = tuple((rank * each, (rank + 1) * each) for rank in range(ranks))
    findings = check(bare(heads, max(1, each), *ranges), rules=(RULE,))
    if heads % ranks == 0:
        assert findings == []
    else:
        assert f"KV head {each * ranks} of {heads} is on no rank ({ranks} ranks)" in findings[0].message


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (bare(4, 2, (0, 2), (3, 4)), "KV head 2 of 4 is on no rank"),
        (bare(4, 2, (1, 2), (2, 4)), "KV head 0 of 4 is on no rank"),
        (bare(4, 2, (2, 4)), "KV head 0 of 4 is on no rank (1 ranks)"),
        (bare(4, 2, (0, 2), (2, 5)), "a rank holds KV head 4, and there are 4"),
        (bare(4, 1, (0, 2), (2, 4)), "a rank holds 2 KV heads, and its pages have room for 1"),
        (bare(2, 1, (0, 1), (0, 1), (0, 1), (0, 1)), "KV head 1 of 2 is on no rank (4 ranks)"),
    ],
)
def test_ranges_that_do_not_cover_the_heads(found: Found, layout: Layout, words: str) -> None:
    findings = found("head-map", layout)
    assert len(findings) == 1
    assert findings[0].message.startswith("layers 0, 1: ")
    assert words in findings[0].message


def test_ranges_that_cover_the_heads(found: Found) -> None:
    assert found("head-map", bare(4, 2, (2, 4), (0, 2))) == []
    assert found("head-map", bare(2, 1, (0, 1), (0, 1), (1, 2), (1, 2))) == []
    assert found("head-map", bare(5, 2, (0, 2), (2, 4), (4, 5), (5, 5))) == []


def test_pages_without_room(found: Found, change: Change) -> None:
    layout = change(sharded(8, 4), "head_maps", 0, rank_heads=3)
    assert [finding.message for finding in found("head-map", layout)] == [
        "layers 0, 1: K pages of layer 0 hold 2 KV heads, and this rank keeps 3 (4 ranks)"
    ]


def test_every_layer_of_a_map_is_looked_at(sound: Mapping[str, Layout], found: Found, change: Change) -> None:
    """Two geometries, and a map that says one head count of all layers."""
    layout = sound["v2-per-layer"]  # 2 and 4 KV heads in turn
    assert [heads.layers for heads in layout.head_maps] == [(0, 2), (1, 3)]
    mixed = change(layout, "head_maps", 0, layers=(0, 1, 2))
    findings = found("head-map", mixed)
    assert any("K pages of layer 1 hold 4 KV heads" in finding.message for finding in findings)
    assert any("layer 1 is in 2 head maps" in finding.message for finding in findings)


def test_a_layer_in_no_map(sound: Mapping[str, Layout], found: Found, change: Change) -> None:
    layout = sound["v2-per-layer"]
    assert found("head-map", change(layout, "head_maps", 0, layers=(0,)))


def test_heads_that_the_model_does_not_have(found: Found) -> None:
    """A map that is sound in itself, of another number of heads than the spec's layer has."""
    layout = sharded(8, 4)
    halved = HeadMap("target", (0, 1), 4, 2, ((0, 2), (0, 2), (2, 4), (2, 4)))
    assert found("head-map", msgspec.structs.replace(layout, head_maps=(halved,)))
