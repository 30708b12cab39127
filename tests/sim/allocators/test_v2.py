"""TensorRT-LLM V2: life cycles, pools by page size, groups by slot sizes, page tables and views."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from kvsan.model.spec import CacheSpec, Consumer, Draft
from kvsan.sim.checking import check
from kvsan.sim.layout import Layout
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected

BF16, FP8, NVFP4, UINT8 = ElementFormat.BF16, ElementFormat.FP8, ElementFormat.NVFP4, ElementFormat.UINT8
DENSE = AttentionLayer(kv_heads=8, head_dim=128)
INDEX = SidePlane(role="index_key", dim=128, format=BF16)
GDN = RecurrentLayer(algorithm="gdn", heads=32, head_dim=128, groups=16, state_dim=128)


def laid_out(*layers: Layer, allocator: str = "trtllm-v2", sound: bool = True, **settings: Any) -> Layout:
    layout = allocate(CacheSpec(layers=layers, **settings), allocator)
    if sound:
        assert check(layout) == []
    return layout


def placed(layout: Layout) -> list[tuple[int, str, int, int]]:
    """Return (layer, role, pool, offset) of each buffer, in the order of registration."""
    return [(held.layer, held.role, held.pool, held.offset_bytes) for held in layout.buffers]


def pools(layout: Layout) -> list[tuple[int, int, int]]:
    """Return (group, index, slot bytes) of each pool."""
    return [(pool.group, pool.index, pool.slot_bytes) for pool in layout.pools]


# Life cycles.


def test_windows_and_sinks_split_life_cycles() -> None:
    """Sinks count in whole blocks: 33 and 64 tokens are both 2 blocks of 32."""
    layout = laid_out(
        AttentionLayer(kv_heads=8, head_dim=128, window=512),
        DENSE,
        AttentionLayer(kv_heads=8, head_dim=128, window=512, sink_tokens=33),
        AttentionLayer(kv_heads=8, head_dim=128, window=512, sink_tokens=64),
        AttentionLayer(kv_heads=8, head_dim=128, window=1024),
    )
    assert [(cycle.window, cycle.sink_blocks) for cycle in layout.life_cycles] == [
        (512, 0),
        (None, 0),
        (512, 2),
        (1024, 0),
    ]
    assert [held.life_cycle for held in layout.buffers if held.role == "key"] == [0, 1, 2, 2, 3]


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    layers = tuple(AttentionLayer(kv_heads=8, head_dim=128, window=window, sink_tokens=4) for window in (4096, 4095))
    assert [cycle.window for cycle in laid_out(*layers, max_sequence_tokens=4096).life_cycles] == [None, 4095]
    assert [cycle.window for cycle in laid_out(*layers).life_cycles] == [4096, 4095]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from([None, 64, 65, 128]), st.sampled_from([0, 1, 32, 33])), min_size=1, max_size=8)
)
def test_layers_of_different_windows_never_share_a_slot(drawn: list[tuple[int | None, int]]) -> None:
    layers = tuple(
        AttentionLayer(kv_heads=2, head_dim=64, window=window, sink_tokens=sinks if window else 0)
        for window, sinks in drawn
    )
    layout = laid_out(*layers)
    keys = [(layer.window, -(-layer.sink_tokens // 32)) for layer in layers]
    cycles = [held.life_cycle for held in layout.buffers if held.role == "key"]
    for one, (key, cycle) in enumerate(zip(keys, cycles, strict=True)):
        assert (layout.life_cycles[cycle].window, layout.life_cycles[cycle].sink_blocks) == key
        assert all((keys[other] == key) == (cycles[other] == cycle) for other in range(one))


def test_layers_without_a_cache_take_nothing() -> None:
    layout = laid_out(UncachedLayer(), DENSE, UncachedLayer(), DENSE)
    assert [held.layer for held in layout.buffers] == [1, 1, 3, 3]
    nothing = laid_out(UncachedLayer())
    assert (nothing.pools, nothing.life_cycles, nothing.buffers, nothing.tables) == ((), (), (), ())


# Pools.


def test_buffers_of_one_size_share_a_pool_in_the_order_of_the_layers() -> None:
    layout = laid_out(DENSE, DENSE)  # pages of 8 x 128 x 2 B x 32 = 65536 B
    assert placed(layout) == [(0, "key", 0, 0), (0, "value", 0, 65536), (1, "key", 0, 131072), (1, "value", 0, 196608)]
    assert pools(layout) == [(0, 0, 262144)]


def test_sizes_decide_and_not_formats() -> None:
    """8 heads in fp8 and 4 heads in bf16 have pages of one size, and so one pool."""
    layers = AttentionLayer(kv_heads=8, head_dim=128, kv_format=FP8), AttentionLayer(kv_heads=4, head_dim=128)
    layout = laid_out(*layers)
    assert {held.page_bytes for held in layout.buffers} == {32768}
    assert pools(layout) == [(0, 0, 131072)]
    assert [held.page.format for held in layout.buffers] == [FP8, FP8, BF16, BF16]


def test_the_largest_slot_comes_first() -> None:
    small, large = AttentionLayer(kv_heads=1, head_dim=128), DENSE
    layout = laid_out(small, large)
    assert pools(layout) == [(0, 0, 131072), (0, 1, 16384)]
    assert [(held.layer, held.pool) for held in layout.buffers] == [(0, 1), (0, 1), (1, 0), (1, 0)]
    many = laid_out(*[small] * 9, large)  # nine small layers fill more than one large one
    assert pools(many) == [(0, 0, 147456), (0, 1, 131072)]


def test_equal_slots_keep_the_order_of_registration() -> None:
    """Two layers of 4 heads and one of 8 have equal slot bytes, and pools of their own."""
    half = AttentionLayer(kv_heads=4, head_dim=128)
    first = laid_out(half, DENSE, half)
    assert pools(first) == [(0, 0, 131072), (0, 1, 131072)]
    assert [held.pool for held in first.buffers] == [0, 0, 1, 1, 0, 0]
    second = laid_out(DENSE, half, half)
    assert [held.pool for held in second.buffers] == [0, 0, 1, 1, 1, 1]


@settings(max_examples=60)
@given(
    layers=st.lists(
        st.sampled_from(
            [
                AttentionLayer(kv_heads=heads, head_dim=dim, window=window)
                for heads in (1, 2, 4)
                for dim in (32, 64)
                for window in (None, 64)
            ]
            + [GDN, RecurrentLayer(algorithm="mamba1", heads=64, state_dim=16)]
        ),
        min_size=1,
        max_size=10,
    ),
    kv_format=st.sampled_from([BF16, FP8, NVFP4]),
)
def test_slots_are_tiled_exactly(layers: list[Layer], kv_format: ElementFormat) -> None:
    """Within a life cycle the buffers of a pool tile its slot without gap or overlap, each a multiple of its size in.

    All buffers of one life cycle have one slot count, and life cycles of a group have equal slot sizes.
    """
    layout = laid_out(*layers, kv_format=kv_format, slots=3, state_slots=2, sound=False)
    for cycle in range(len(layout.life_cycles)):
        mine = [held for held in layout.buffers if held.life_cycle == cycle]
        assert len({held.slot_count for held in mine}) == 1
        for pool in {held.pool for held in mine}:
            ends = 0
            for held in sorted((held for held in mine if held.pool == pool), key=lambda held: held.offset_bytes):
                assert held.offset_bytes == ends
                assert held.offset_bytes % held.page_bytes == 0
                assert held.slot_stride_bytes == layout.pools[pool].slot_bytes
                ends += held.page_bytes
            assert ends == layout.pools[pool].slot_bytes
    for one, cycle in enumerate(layout.life_cycles):
        sizes = pool_slots(layout, one)
        for other in range(one):
            assert (sizes == pool_slots(layout, other)) == (layout.life_cycles[other].group == cycle.group)


def pool_slots(layout: Layout, cycle: int) -> list[int]:
    used = sorted({held.pool for held in layout.buffers if held.life_cycle == cycle})
    return [layout.pools[pool].slot_bytes for pool in used]


# Pool groups.


def test_life_cycles_of_equal_slots_share_memory() -> None:
    windowed = AttentionLayer(kv_heads=8, head_dim=128, window=512)
    layout = laid_out(DENSE, windowed)
    assert pools(layout) == [(0, 0, 131072)]
    assert [cycle.group for cycle in layout.life_cycles] == [0, 0]
    assert [held.offset_bytes for held in layout.buffers] == [0, 65536, 0, 65536]  # offsets restart at 0
    assert [table.pool for table in layout.tables] == [0, 0]


def test_life_cycles_merge_with_different_pages_inside() -> None:
    """One layer of 8 heads fills the slot of two layers of 4: the group is one, the pages are not."""
    half = AttentionLayer(kv_heads=4, head_dim=128, window=512)
    layout = laid_out(DENSE, half, half)
    assert pools(layout) == [(0, 0, 131072)]
    assert [held.page_bytes for held in layout.buffers] == [65536] * 2 + [32768] * 4
    assert [table.index_scale for table in layout.tables] == [2, 4]


def test_a_permutation_of_slot_sizes_is_another_group() -> None:
    """Equal slot bytes of two pools, and a life cycle with only one of them."""
    half = AttentionLayer(kv_heads=4, head_dim=128, window=512)
    layout = laid_out(DENSE, AttentionLayer(kv_heads=1, head_dim=128), half, half)
    assert pools(layout) == [(0, 0, 131072), (0, 1, 16384), (1, 0, 131072)]


def test_states_and_pages_merge_too() -> None:
    """A state slot of exactly the bytes of an attention slot: 2 x 65536 B in two buffers of one size."""
    state = RecurrentLayer(
        algorithm="mamba1", heads=8192, state_dim=4, conv_kernel=5, conv_format=BF16, ssm_format=BF16
    )
    layout = laid_out(DENSE, state, slots=3, state_slots=2)
    assert pools(layout) == [(0, 0, 131072)]
    assert [cycle.recurrent for cycle in layout.life_cycles] == [False, True]
    assert {held.slot_count for held in layout.buffers} == {3}


# Recurrent states.


def test_temporal_and_convolution_states() -> None:
    layout = laid_out(GDN, GDN, state_format=ElementFormat.FP32, state_slots=2)
    assert pools(layout) == [(0, 0, 4 << 20), (0, 1, 98304)]
    assert placed(layout) == [
        (0, "ssm_state", 0, 0),
        (0, "conv_state", 1, 0),
        (1, "ssm_state", 0, 2 << 20),
        (1, "conv_state", 1, 49152),
    ]
    ssm, conv = layout.buffers[:2]
    assert (ssm.page.axes, ssm.page.shape) == (("head", "dim", "state"), (32, 128, 128))
    assert (conv.page.axes, conv.page.shape) == (("channel", "tap"), (8192, 3))
    assert laid_out(GDN, state_format=ElementFormat.FP16).pools[0].slot_bytes == 1 << 20


def test_equal_states_share_a_pool() -> None:
    """Temporal and convolution state of one size: a pool of scale 2n, and views that step by the whole slot."""
    layer = RecurrentLayer(algorithm="mamba1", heads=64, state_dim=3, conv_kernel=4)
    layout = laid_out(layer, layer, slots=3)
    assert pools(layout) == [(0, 0, 4 * 384)]
    assert placed(layout) == [
        (0, "ssm_state", 0, 0),
        (0, "conv_state", 0, 384),
        (1, "ssm_state", 0, 768),
        (1, "conv_state", 0, 1152),
    ]
    assert {access.pitch_bytes for access in layout.accesses} == {1536}


@pytest.mark.parametrize(
    ("layer", "ssm", "conv"),
    [
        (RecurrentLayer(algorithm="mamba1", heads=1536, state_dim=16), 1536 * 16 * 2, 1536 * 3 * 2),
        (RecurrentLayer(algorithm="mamba2", heads=80, head_dim=64, groups=8, state_dim=128), 1310720, 7168 * 3 * 2),
        (RecurrentLayer(algorithm="kda", heads=32, head_dim=128, groups=32, state_dim=128), 1 << 20, 12288 * 3 * 2),
        (RecurrentLayer(algorithm="short_conv", heads=2048, conv_kernel=3), None, 2048 * 2 * 2),
    ],
)
def test_state_sizes(layer: RecurrentLayer, ssm: int | None, conv: int) -> None:
    sizes = {held.role: held.page_bytes for held in laid_out(layer).buffers}
    assert sizes == ({"conv_state": conv} if ssm is None else {"ssm_state": ssm, "conv_state": conv})
    shared = laid_out(layer, parallel=ParallelLayout(tp=2, cp=2), rank=3)
    assert {held.role: held.page_bytes * 4 for held in shared.buffers} == sizes


def test_auxiliary_states_follow_and_are_not_shared() -> None:
    context = AuxiliaryState(role="ple_context", shape=(3,), format=ElementFormat.INT64)
    taps = AuxiliaryState(role="ple_conv", shape=(96, 3), format=BF16)
    layer = RecurrentLayer(algorithm="mamba1", heads=64, state_dim=16, auxiliary=(taps, context))
    layout = laid_out(layer, parallel=ParallelLayout(tp=2), slots=3)
    assert [(held.role, held.page_bytes, held.slot_count) for held in layout.buffers] == [
        ("ssm_state", 1024, 3),
        ("conv_state", 192, 3),
        ("ple_conv", 576, 3),
        ("ple_context", 24, 3),
    ]


def test_a_layer_of_two_halves_has_both_caches() -> None:
    layout = laid_out(HybridLayer(attention=DENSE, recurrent=GDN), slots=3, state_slots=2)
    assert [(held.role, held.slot_count) for held in layout.buffers] == [
        ("key", 3),
        ("value", 3),
        ("ssm_state", 2),
        ("conv_state", 2),
    ]
    assert {held.layer for held in layout.buffers} == {0}


@pytest.mark.parametrize("allocator", ["trtllm-v2-qsa-legacy", "trtllm-v2-qsa-packed"])
def test_side_planes_of_a_layer_of_two_halves(allocator: str) -> None:
    sparse = AttentionLayer(kv_heads=2, head_dim=256, side_planes=(INDEX,))
    layout = laid_out(HybridLayer(attention=sparse, recurrent=GDN), allocator=allocator)
    planes = [held for held in layout.buffers if held.role in ("index_key", "side_planes")]
    assert [held.page_bytes for held in planes] == [8192]


# NVFP4, latents, kernel pages.


def test_scales_in_a_pool_of_their_own() -> None:
    layout = laid_out(DENSE, DENSE, kv_format=NVFP4)
    assert [(held.role, held.page_bytes) for held in layout.buffers[:4]] == [
        ("key", 16384),
        ("value", 16384),
        ("key_block_scale", 2048),
        ("value_block_scale", 2048),
    ]
    assert pools(layout) == [(0, 0, 65536), (0, 1, 8192)]
    table = layout.tables[0]
    assert (table.index_scale, table.scale_index_scale, table.mapping_offsets) == (4, 4, (0, 1))
    assert (table.scale_pool, table.scale_page_bytes) == (1, 2048)
    key, scale = layout.buffers[0].page, layout.buffers[2].page
    assert (key.shape, key.stride_bytes) == ((8, 32, 64), (2048, 64, 1))  # two elements in a byte
    assert (scale.format, scale.shape) == (FP8, (8, 32, 8))


def test_a_mixed_pool_of_scaled_and_unscaled_layers_is_refused() -> None:
    """Equal K pages, and only one of the layers has scales: one table cannot serve both."""
    scaled = AttentionLayer(kv_heads=8, head_dim=128, kv_format=NVFP4)
    plain = AttentionLayer(kv_heads=4, head_dim=128, kv_format=FP8)
    with pytest.raises(Rejected, match="share one page table, and only one of them has block scales"):
        laid_out(scaled, plain)


@pytest.mark.parametrize(("kv_format", "token_bytes"), [(BF16, 1152), (FP8, 576), (ElementFormat.FP32, 2304)])
def test_latents_are_one_row_a_token(kv_format: ElementFormat, token_bytes: int) -> None:
    index = SidePlane(role="index_key", dim=132, format=UINT8)
    layer = LatentLayer(latent_dim=512, rope_dim=64, side_planes=(index,))
    layout = laid_out(layer, layer, kv_format=kv_format, tokens_per_block=64, parallel=ParallelLayout(tp=8))
    assert pools(layout) == [(0, 0, 2 * 64 * token_bytes), (0, 1, 2 * 64 * 132)]
    assert layout.block_bytes == (("target", 2 * 64 * (token_bytes + 132)),)
    table = layout.tables[0]
    assert (table.kv_factor, table.kv_offset, table.index_scale, table.mapping_offsets) == (1, 0, 2, (0, 1))
    assert table.missing_lanes == (0,)
    assert layout.head_maps == ()


def test_a_narrow_index_plane() -> None:
    layer = LatentLayer(latent_dim=512, rope_dim=64, side_planes=(SidePlane(role="index_key", dim=68, format=UINT8),))
    assert laid_out(layer, tokens_per_block=64).pools[1].slot_bytes == 64 * 68


def test_latents_in_nvfp4_have_k_scales_alone() -> None:
    index = SidePlane(role="index_key", dim=132, format=UINT8)
    for layers in ((LatentLayer(latent_dim=512, rope_dim=64),), (LatentLayer(latent_dim=512, side_planes=(index,)),)):
        layout = laid_out(*layers * 2, kv_format=NVFP4)
        roles = [held.role for held in layout.buffers if held.layer == 1 and held.role != "index_key"]
        assert roles == ["key", "key_block_scale"]


def test_separate_latent_managers_in_nvfp4() -> None:
    """A view that does not exist must not be taken from the other manager's buffers."""
    index = SidePlane(role="index_key", dim=132, format=UINT8)
    layer = LatentLayer(latent_dim=512, side_planes=(index,))
    layout = laid_out(layer, kv_format=NVFP4, draft=Draft(mode="separate", layers=(layer,)))
    assert {layout.buffers[access.buffer].manager for access in layout.accesses} == {"target", "draft"}


def test_smaller_kernel_pages() -> None:
    """Blocks of 128 tokens for the manager and 32 for the kernel: four pages side by side in each buffer."""
    layer = AttentionLayer(kv_heads=2, head_dim=64, tokens_per_block=32)
    layout = laid_out(layer, layer, tokens_per_block=128)
    held = layout.buffers[0]
    assert (held.page.axes, held.page.shape) == (("page", "head", "token", "dim"), (4, 2, 32, 64))
    assert held.page_bytes == 4 * 8192
    table = layout.tables[0]
    assert (table.page_bytes, table.index_scale, table.expansion, table.kv_offset) == (8192, 4, 4, 4)
    assert table.mapping_offsets == (0, 4)  # in pairs of kernel pages
    key = next(access for access in layout.accesses if access.consumer == "attention-op" and access.buffer == 2)
    assert (key.offset_bytes, key.pitch_bytes) == (65536, 131072)


# Page tables and views.


def test_one_geometry_has_one_table_for_each_life_cycle() -> None:
    windowed = AttentionLayer(kv_heads=8, head_dim=128, window=512)
    layout = laid_out(DENSE, windowed, DENSE, windowed)
    assert [(table.layers, table.mapping_offsets) for table in layout.tables] == [((0, 2), (0, 1)), ((1, 3), (0, 1))]
    assert all(table.row_offset == table.pointer_bytes == 0 for table in layout.tables)


def test_several_k_pages_in_a_life_cycle_make_a_table_for_each_layer() -> None:
    """In every life cycle of the manager, also those with one K page."""
    windowed = AttentionLayer(kv_heads=8, head_dim=128, window=512)
    half = AttentionLayer(kv_heads=4, head_dim=128)
    layout = laid_out(DENSE, half, windowed, half)
    assert sorted(table.layers for table in layout.tables) == [(0,), (1,), (2,), (3,)]
    rows = {table.layers[0]: (table.pool, table.row_offset, table.mapping_offsets) for table in layout.tables}
    assert rows == {0: (0, 0, (0,)), 1: (1, 0, (0,)), 2: (2, 0, (0,)), 3: (1, 2, (0,))}


def test_views_step_by_slots() -> None:
    layout = laid_out(DENSE, DENSE, slots=5)
    views = [access for access in layout.accesses if access.consumer == "kv-view"]
    assert [(view.offset_bytes, view.pitch_bytes, view.cell_count) for view in views] == [
        (65536 * at, 262144, 5) for at in range(4)
    ]


def test_rows_of_pairs_over_an_odd_slot_are_wrong_in_odd_slots() -> None:
    """NVFP4 with one sparse layer on the rank: K, V and the index plane make 3 pages, and rows of the view hold 2.

    Nothing refuses it. The scale pool has 2 pages a slot, so that scales are looked for in the wrong slots as well.
    """
    sparse = AttentionLayer(kv_heads=2, head_dim=256, side_planes=(INDEX,))
    layout = laid_out(sparse, allocator="trtllm-v2-qsa-legacy", kv_format=NVFP4, slots=4, sound=False)
    assert (layout.tables[0].index_scale, layout.tables[0].scale_index_scale) == (3, 2)
    findings = check(layout)
    assert {"op-address", "alias", "index-scale"} <= {finding.rule for finding in findings}
    messages = [finding.message for finding in findings if finding.rule == "op-address"]
    assert [message for message in messages if "kv-view" in message] == [
        "the kv-view of layer 0's key reaches byte 16384 of pool 0 of group 0 in slot 1, where the storage has it at "
        "byte 24576, and reads byte 0 of layer 0's index_key of slot 0",
        "the kv-view of layer 0's value reaches byte 24576 of pool 0 of group 0 in slot 1, where the storage has it at "
        "byte 32768, and reads byte 0 of layer 0's key of slot 1",
    ]
    scales = (
        "the block index of layer 0's key counts 3 pages per slot and offset 0; used on the scale pool it gives slots"
    )
    assert any(scales in finding.message for finding in findings)


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize("kv_format", [BF16, FP8, NVFP4])
def test_axis_orders_change_no_address(kv_layout: str, kv_format: ElementFormat) -> None:
    consumer: Any = Consumer(kv_layout=kv_layout)  # type: ignore[arg-type]
    layout = laid_out(DENSE, DENSE, kv_format=kv_format, consumer=consumer)
    axes = ("head", "token", "dim") if kv_layout == "HND" else ("token", "head", "dim")
    assert {held.page.axes for held in layout.buffers} == {axes}
    assert placed(layout) == placed(laid_out(DENSE, DENSE, kv_format=kv_format))


# Side planes.


def test_a_scale_page_may_meet_a_side_plane_as_well() -> None:
    """Scales of 2 heads x 256 / 16 are 32 B a token, and so is an index of 16 bf16."""
    narrow = SidePlane(role="index_key", dim=16, format=BF16)
    layers = (AttentionLayer(kv_heads=2, head_dim=256, side_planes=(narrow,)),) * 2
    with pytest.raises(Rejected) as caught:
        laid_out(*layers, allocator="trtllm-v2-qsa-legacy", kv_format=NVFP4)
    assert caught.value.message.startswith(
        "Layer 1's K scale page starts 3072 B into its pool slot, which is not a multiple of one layer's K/V scale "
        "pages (2048 B)"
    )
    assert "it joined the K/V scale pool" in caught.value.message
    packed = laid_out(*layers, allocator="trtllm-v2-qsa-packed", kv_format=NVFP4)
    assert packed.side_planes_bytes == 2 * 1024


def test_a_position_plane_belongs_to_the_first_local_layer_that_asks() -> None:
    position = SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank")
    layers = (DENSE, *(AttentionLayer(kv_heads=8, head_dim=128, side_planes=(position, INDEX)),) * 2)
    layout = laid_out(*layers, allocator="trtllm-v2-qsa-legacy")
    planes = [(held.layer, held.role) for held in layout.buffers if held.role not in ("key", "value")]
    assert planes == [(1, "index_key"), (1, "qsa_index_position"), (2, "index_key")]
    assert layout.block_bytes == (("target", 6 * 65536 + 2 * 8192 + 384),)


def test_the_remedy_does_not_recommend_what_was_done() -> None:
    """A packed buffer of one plane can be as large as a K page; packing is no way out of that."""
    position = SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank")
    layers = (AttentionLayer(kv_heads=1, head_dim=3, side_planes=(position,)),) * 2
    with pytest.raises(Rejected) as caught:
        laid_out(*layers, allocator="trtllm-v2-qsa-packed", kv_format=ElementFormat.FP32)
    assert "side_planes page" in caught.value.message
    assert "trtllm-v2-qsa-packed" not in caught.value.remedy
