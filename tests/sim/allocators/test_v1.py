"""TensorRT-LLM V1: a block manager per window, pools by KV head count, recurrent states layer by layer."""

from __future__ import annotations

from typing import Any

import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, HybridLayer, LatentLayer, Layer, RecurrentLayer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec
from kvsan.sim.checking import check
from kvsan.sim.layout import Layout
from kvsan.sim.registry import allocate

BF16, FP8, NVFP4 = ElementFormat.BF16, ElementFormat.FP8, ElementFormat.NVFP4
KEY_PAGE = {(BF16, 2): 32768, (BF16, 1): 16384, (FP8, 2): 16384, (FP8, 1): 8192, (NVFP4, 2): 8192, (NVFP4, 1): 4096}


def laid_out(*layers: Layer, **settings: Any) -> Layout:
    layout = allocate(CacheSpec(layers=layers, **settings), "trtllm-v1")
    assert check(layout) == []
    return layout


def pools(layout: Layout) -> list[tuple[int, int, int]]:
    """Return (group, index, slot bytes) of each pool."""
    return [(pool.group, pool.index, pool.slot_bytes) for pool in layout.pools]


@pytest.mark.parametrize(("kv_format", "heads"), KEY_PAGE)
def test_the_attention_part_of_the_reference_case(kv_format: ElementFormat, heads: int) -> None:
    """12 layers of K and V: the same 24 pages in a block as V2 has in a slot, at the same places."""
    layers = (AttentionLayer(kv_heads=2, head_dim=256),) * 12
    layout = laid_out(*layers, kv_format=kv_format, parallel=ParallelLayout(tp=2 // heads), slots=3)
    page = KEY_PAGE[kv_format, heads]
    assert layout.pools[0].slot_bytes == 12 * 2 * page
    table = layout.tables[0]
    assert (table.index_scale, table.kv_offset, table.kv_factor, table.page_bytes) == (24, 1, 2, page)
    assert table.mapping_offsets == tuple(range(12))
    reached = [access for access in layout.accesses if access.consumer == "attention-op" and access.pool == 0]
    assert [(access.offset_bytes, access.pitch_bytes) for access in reached] == [
        (page * at, 24 * page) for at in range(24)
    ]
    if kv_format is NVFP4:
        assert [pool.slot_bytes for pool in layout.pools[1:]] == [12 * 2 * 512 * heads]
    v2 = allocate(layout.spec, "trtllm-v2") if layout.spec else None
    assert v2 is not None
    assert [(held.role, held.layer, held.offset_bytes) for held in layout.buffers if held.pool == 0] == [
        (held.role, held.layer, held.offset_bytes) for held in v2.buffers if held.pool == 0
    ]


def test_pools_by_kv_heads_ascending() -> None:
    """Whatever the order of the layers; within a pool they keep it."""
    layers = tuple(AttentionLayer(kv_heads=heads, head_dim=64) for heads in (8, 2, 8, 4))
    layout = laid_out(*layers)
    assert pools(layout) == [(0, 0, 16384), (0, 1, 32768), (0, 2, 131072)]
    assert [table.layers for table in layout.tables] == [(1,), (3,), (0, 2)]
    assert [table.mapping_offsets for table in layout.tables] == [(0,), (0,), (0, 1)]


def test_a_block_manager_for_each_window() -> None:
    """Ascending, full attention last, each with block ids of its own; a window as long as the sequence is none."""
    windows = (None, 512, 128, 4096, 512)
    layers = tuple(AttentionLayer(kv_heads=8, head_dim=128, window=window) for window in windows)
    layout = laid_out(*layers, max_sequence_tokens=4096)
    assert [(cycle.group, cycle.window) for cycle in layout.life_cycles] == [(0, 128), (1, 512), (2, None)]
    assert [table.layers for table in layout.tables] == [(2,), (1, 4), (0, 3)]


def test_windows_may_differ_in_their_geometry() -> None:
    """Pages of equal bytes in two windows, of 2 x 256 and 8 x 64: each keeps its own heads and dims."""
    layout = laid_out(
        AttentionLayer(kv_heads=2, head_dim=256, window=128), AttentionLayer(kv_heads=8, head_dim=64, window=512)
    )
    assert [held.page.shape for held in layout.buffers] == [(2, 32, 256)] * 2 + [(8, 32, 64)] * 2
    assert [(heads.layers, heads.rank_heads) for heads in layout.head_maps] == [((0,), 2), ((1,), 8)]


def test_scales_in_a_pool_beside_the_data() -> None:
    layout = laid_out(*(AttentionLayer(kv_heads=8, head_dim=128),) * 3, kv_format=NVFP4, slots=5)
    assert pools(layout) == [(0, 0, 3 * 2 * 16384), (0, 1, 3 * 2 * 2048)]
    assert {pool.slot_count for pool in layout.pools} == {5}
    table = layout.tables[0]
    assert (table.scale_pool, table.scale_index_scale, table.scale_page_bytes) == (1, 6, 2048)


def test_latents_and_their_index_keys() -> None:
    index = SidePlane(role="index_key", dim=132, format=ElementFormat.UINT8)
    layers = (LatentLayer(latent_dim=512, rope_dim=64, side_planes=(index,)), LatentLayer(latent_dim=512, rope_dim=64))
    layout = laid_out(*layers, layers[0], tokens_per_block=64)
    assert pools(layout) == [(0, 0, 3 * 1152 * 64), (0, 1, 2 * 132 * 64)]
    table = layout.tables[0]
    assert (table.kv_factor, table.kv_offset, table.index_scale) == (1, 0, 3)
    planes = [(held.layer, held.offset_bytes) for held in layout.buffers if held.role == "index_key"]
    assert planes == [(0, 0), (2, 132 * 64)]


def test_latents_in_nvfp4_have_k_scales_alone() -> None:
    layout = laid_out(*(LatentLayer(latent_dim=512, rope_dim=64),) * 2, kv_format=NVFP4)
    assert [held.role for held in layout.buffers] == ["key", "key", "key_block_scale", "key_block_scale"]


def test_recurrent_states_lie_layer_by_layer() -> None:
    """[layers, blocks, temporal state + convolution state], the temporal state first in each block."""
    gdn = RecurrentLayer(algorithm="gdn", heads=32, head_dim=128, groups=16, state_dim=128)
    dense = AttentionLayer(kv_heads=2, head_dim=256)
    layout = laid_out(gdn, dense, gdn, gdn, state_format=ElementFormat.FP32, slots=7, state_slots=5)
    ssm, conv = 2 << 20, 49152
    block = ssm + conv
    pool = layout.pools[-1]
    assert (pool.slot_count, pool.slot_bytes, pool.size_bytes) == (5, 3 * block, 15 * block)
    states = [held for held in layout.buffers if held.pool == len(layout.pools) - 1]
    assert [(held.layer, held.role, held.offset_bytes) for held in states] == [
        (layer, role, 5 * block * ordinal + inside)
        for ordinal, layer in enumerate((0, 2, 3))
        for role, inside in (("ssm_state", 0), ("conv_state", ssm))
    ]
    assert {held.slot_stride_bytes for held in states} == {block}
    assert layout.life_cycles[-1].recurrent


def test_layers_of_two_halves() -> None:
    gdn = RecurrentLayer(algorithm="mamba2", heads=8, head_dim=64, groups=1, state_dim=16)
    layout = laid_out(*(HybridLayer(attention=AttentionLayer(kv_heads=2, head_dim=64), recurrent=gdn),) * 2)
    assert [held.layer for held in layout.buffers] == [0, 0, 1, 1] * 2
    assert [cycle.recurrent for cycle in layout.life_cycles] == [False, True]


def test_short_convolutions_have_no_temporal_state() -> None:
    layer = RecurrentLayer(algorithm="short_conv", heads=1024, conv_kernel=3)
    layout = laid_out(layer, layer, slots=3)
    assert [(held.role, held.offset_bytes) for held in layout.buffers] == [("conv_state", 0), ("conv_state", 3 * 4096)]
