"""The models of SGLang's pools: shapes and strides that the released pools print, byte maps, refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvsan.ci.campaign import Chunk, Options
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, LatentLayer, RecurrentLayer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Consumer, Draft
from kvsan.sim.checking import check
from kvsan.sim.layout import Buffer, Layout
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected
from kvsan.strategies import census, specs_for

replace = msgspec.structs.replace
POOLS = ("sglang", "sglang-envelope")
MHA = CacheSpec(
    layers=(AttentionLayer(kv_heads=8, head_dim=128),) * 2, tokens_per_block=16, slots=63,
    consumer=Consumer(kv_layout="NHD"),
)  # fmt: skip
MAMBA = RecurrentLayer(
    algorithm="mamba2", heads=128, head_dim=64, state_dim=128, groups=8, conv_kernel=4, ssm_format=ElementFormat.FP32
)
STATES = replace(MHA, layers=(MAMBA,) * 3, slots=4, state_slots=8, parallel=ParallelLayout(tp=2))


def held(layout: Layout, layer: int, role: str) -> Buffer:
    return next(buffer for buffer in layout.buffers if (buffer.layer, buffer.role) == (layer, role))


def view(layout: Layout, layer: int, role: str) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return a buffer's offset in bytes, and shape and strides in elements, slots first."""
    buffer = held(layout, layer, role)
    item = buffer.page.format.container_bytes
    strides = [stride // item for stride in (buffer.slot_stride_bytes, *buffer.page.stride_bytes)]
    return buffer.offset_bytes, (buffer.slot_count, *buffer.page.shape), tuple(strides)


def test_k_and_v_of_one_shape_are_halves_of_one_allocation() -> None:
    """1,024 rows of 2,048 B: V starts 2,097,152 B into a storage of 4,194,304 B, 8,388,608 B for two layers."""
    layout = allocate(MHA, "sglang")
    assert [pool.size_bytes for pool in layout.pools] == [4194304] * 2
    assert view(layout, 0, "key") == (0, (64, 16, 8, 128), (16384, 1024, 128, 1))
    assert view(layout, 1, "value") == (2097152, (64, 16, 8, 128), (16384, 1024, 128, 1))
    assert check(layout) == []


def test_k_and_v_of_two_shapes_are_two_buffers() -> None:
    """(1040, 4, 192) and (1040, 4, 128) one-byte elements: 64 usable pages of 16 rows, and the sink."""
    layer = AttentionLayer(kv_heads=4, head_dim=192, value_dim=128)
    layout = allocate(replace(MHA, layers=(layer,), kv_format="fp8", slots=64), "sglang")
    assert [pool.size_bytes for pool in layout.pools] == [1040 * 4 * 192, 1040 * 4 * 128]
    assert check(layout) == []


def test_latent_rows_and_page_indexed_index_keys() -> None:
    """(1088, 1, 656) rows and (17, 8448) pages of index keys."""
    plane = SidePlane(role="index_key", dim=132, format=ElementFormat.UINT8)
    sparse = LatentLayer(latent_dim=656, side_planes=(plane,))
    layout = allocate(replace(MHA, layers=(sparse,), kv_format="fp8", tokens_per_block=64, slots=16), "sglang")
    assert [pool.size_bytes for pool in layout.pools] == [1088 * 656, 17 * 8448]
    assert view(layout, 0, "key")[2] == (64 * 656, 656, 656, 1)
    assert view(layout, 0, "index_key")[2][0] == 8448
    assert check(layout) == []


def test_nvfp4_has_data_and_scales_apart() -> None:
    """(1040, 8, 64) bytes of data and (1040, 64) of scales, for K and for V."""
    layout = allocate(replace(MHA, layers=MHA.layers[:1], kv_format="nvfp4", slots=64), "sglang")
    sizes = {buffer.role: layout.pools[buffer.pool].size_bytes for buffer in layout.buffers}
    data, scales = 1040 * 8 * 64, 1040 * 64
    assert sizes == {"key": data, "value": data, "key_block_scale": scales, "value_block_scale": scales}
    assert check(layout) == []


def test_states_lie_layer_by_layer() -> None:
    """conv (3, 9, 5120, 3) bf16, temporal (3, 9, 64, 64, 128) fp32; slot 0 is the sink."""
    layout = allocate(STATES, "sglang")
    assert [pool.size_bytes for pool in layout.pools] == [3 * 9 * 5120 * 3 * 2, 3 * 9 * 64 * 64 * 128 * 4]
    assert view(layout, 2, "conv_state") == (2 * 9 * 15360 * 2, (9, 5120, 3), (15360, 3, 1))
    assert view(layout, 1, "ssm_state") == (9 * 524288 * 4, (9, 64, 64, 128), (524288, 8192, 128, 1))
    assert check(layout) == []


def test_an_envelope_holds_the_states_of_all_layers_of_a_request() -> None:
    """conv steps 15360 elements per layer and 3191808 per slot, temporal 524288 and 1595904, 92160 B into the entry."""
    layout = allocate(STATES, "sglang-envelope")
    assert [pool.size_bytes for pool in layout.pools] == [57452544]
    assert view(layout, 1, "conv_state") == (15360 * 2, (9, 5120, 3), (3191808, 3, 1))
    assert view(layout, 0, "ssm_state") == (92160, (9, 64, 64, 128), (1595904, 8192, 128, 1))
    assert view(layout, 1, "ssm_state")[0] == 92160 + 524288 * 4
    assert check(layout) == []


def test_kda_keeps_taps_outermost() -> None:
    kda = RecurrentLayer(algorithm="kda", heads=4, head_dim=8, groups=4, state_dim=8, conv_kernel=4)
    assert view(allocate(replace(MHA, layers=(kda,)), "sglang"), 0, "conv_state")[1] == (64, 3, 96)


@pytest.mark.parametrize(("tokens", "heads", "dim", "pages"), [(1, 1, 2, 1), (3, 2, 4, 5), (16, 5, 6, 2)])
def test_every_element_is_where_numpy_has_it(tokens: int, heads: int, dim: int, pages: int) -> None:
    """K and V of all token rows are the halves of an array (2, rows, heads, dim)."""
    spec = replace(MHA, layers=(AttentionLayer(kv_heads=heads, head_dim=dim),), tokens_per_block=tokens, slots=pages)
    layout = allocate(spec, "sglang")
    rows = (pages + 1) * tokens
    dense = np.arange(2 * rows * heads * dim).reshape(2, pages + 1, tokens, heads, dim) * 2
    for half, role in enumerate(("key", "value")):
        offset, shape, strides = view(layout, 0, role)
        found = offset + 2 * sum(np.ix_(*[np.arange(size) * step for size, step in zip(shape, strides, strict=True)]))
        assert (found == dense[half]).all()


def test_windowed_layers_and_states_have_ids_of_their_own() -> None:
    window = AttentionLayer(kv_heads=8, head_dim=128, window=64)
    layout = allocate(replace(STATES, layers=(window, MAMBA, MHA.layers[0])), "sglang")
    assert [(cycle.group, cycle.recurrent, cycle.window) for cycle in layout.life_cycles] == [
        (0, False, None), (1, False, 64), (2, True, None)]  # fmt: skip
    assert check(layout) == []


def test_draft_layers_have_pools_of_their_own() -> None:
    layout = allocate(replace(MHA, draft=Draft(mode="separate", layers=MHA.layers[:1])), "sglang")
    assert [pool.manager for pool in layout.pools] == ["target", "target", "draft"]
    assert check(layout) == []


def test_a_quota_holds_the_sink_too() -> None:
    page = 2 * 2 * 16 * 8 * 128 * 2
    assert allocate(replace(MHA, slots=None, quota_bytes=5 * page + 9), "sglang").pools[0].slot_count == 5
    with pytest.raises(Rejected, match="leaves no page beside the sink"):
        allocate(replace(MHA, slots=None, quota_bytes=2 * page - 1), "sglang")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"draft": Draft(mode="folded", layers=MHA.layers[:1])}, "a pool of their own"),
        ({"parallel": ParallelLayout(cp=2)}, "context-parallel"),
        ({"kv_format": "int8"}, "no int8 pages"),
        ({"parallel": ParallelLayout(tp=3)}, "8 KV heads over 3 tensor-parallel ranks"),
        ({"layers": tuple(AttentionLayer(kv_heads=8, head_dim=8, window=each) for each in (4, 5))}, "windows [4, 5]"),
        ({"layers": (MAMBA, replace(MAMBA, heads=64))}, "states of one shape"),
        ({"layers": (MAMBA,), "slots": None, "quota_bytes": 1 << 30}, "how a quota is split"),
        ({"layers": (replace(MAMBA, groups=6),), "parallel": ParallelLayout(tp=4)}, "would keep 4 groups only"),
    ],
)
@pytest.mark.parametrize("pools", POOLS)
def test_what_is_not_supported_is_refused_with_its_cause(pools: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(Rejected) as caught:
        allocate(replace(MHA, **change), pools)
    assert words in caught.value.message
    assert not caught.value.supported


def test_an_envelope_of_odd_states_is_refused_and_pools_are_not() -> None:
    odd = replace(MAMBA, heads=1, head_dim=1, state_dim=1, groups=1, conv_kernel=2)
    spec = replace(MHA, layers=(odd,))
    with pytest.raises(Rejected, match="ssm_state starts at byte 6 of the envelope"):
        allocate(spec, "sglang-envelope")
    assert check(allocate(spec, "sglang")) == []


@pytest.mark.parametrize("pools", POOLS)
def test_a_campaign_finds_nothing_and_is_rarely_refused(pools: str) -> None:
    run = Chunk(Options(allocator=pools, seed=33), 0, lambda spec: None)
    run.run(200)
    assert {rule: hit.spec.decode() for rule, hit in run.result().hits.items()} == {}
    assert census(specs_for(pools), examples=100, allocator=pools).support >= 0.8
