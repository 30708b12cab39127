from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvsan.model.cost import block_bytes
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, HybridLayer, LatentLayer, Layer, RecurrentLayer, SidePlane, UncachedLayer
from kvsan.model.parallel import ParallelLayout
from kvsan.model.rank import manager_layers
from kvsan.model.spec import CacheSpec
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected

BF16, FP8, NVFP4, UINT8 = ElementFormat.BF16, ElementFormat.FP8, ElementFormat.NVFP4, ElementFormat.UINT8
INDEX = SidePlane(role="index_key", dim=128, format=BF16)
POSITION = SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank")
SPARSE = AttentionLayer(kv_heads=2, head_dim=256, side_planes=(INDEX, POSITION))
GDN = RecurrentLayer(algorithm="gdn", heads=8, groups=4, state_dim=16)


def cost(*layers: Layer, tokens: int = 1, tp: int = 1, kv_format: ElementFormat = BF16) -> int:
    spec = CacheSpec(layers=layers, tokens_per_block=tokens, parallel=ParallelLayout(tp=tp), kv_format=kv_format)
    return block_bytes(manager_layers(spec)[0], spec)


def test_bytes_of_a_token() -> None:
    dense = AttentionLayer(kv_heads=8, head_dim=128)
    assert cost(dense) == 2 * 8 * 128 * 2
    assert cost(dense, dense, tokens=32) == 2 * 32 * 4096
    assert cost(dense, kv_format=FP8) == 2048
    assert cost(dense, kv_format=NVFP4) == 1024 + 128  # half a byte an element, and one byte for 16
    assert cost(dense, tp=4) == 1024
    assert cost(dense, tp=16) == 512  # one head each, replicated
    assert cost(AttentionLayer(kv_heads=5, head_dim=64), tp=4) == 2 * 2 * 64 * 2  # rounded up
    assert cost(AttentionLayer(kv_heads=8, head_dim=128, kv_format=FP8)) == 2048


def test_a_latent_row_is_stored_once_and_never_shared() -> None:
    index = SidePlane(role="index_key", dim=132, format=UINT8)
    latent = LatentLayer(latent_dim=512, rope_dim=64)
    assert [cost(latent), cost(latent, kv_format=FP8), cost(latent, tp=8)] == [1152, 576, 1152]
    assert cost(LatentLayer(latent_dim=512, rope_dim=64, side_planes=(index,))) == 1152 + 132
    assert cost(latent, kv_format=NVFP4) == 288 + 36


def test_side_planes_count_and_those_of_the_rank_once() -> None:
    assert cost(SPARSE) == 2048 + 256 + 12
    assert cost(SPARSE, SPARSE, SPARSE) == 3 * (2048 + 256) + 12
    assert cost(SPARSE, SPARSE, tp=2) == 2 * (1024 + 256) + 12
    assert cost(HybridLayer(attention=SPARSE, recurrent=GDN)) == 2048 + 256 + 12


def test_states_are_per_request_and_do_not_count() -> None:
    assert cost(GDN, UncachedLayer()) == 0
    assert cost(GDN, AttentionLayer(kv_heads=1, head_dim=64)) == 256


def test_the_reference_case() -> None:
    layers = tuple(SPARSE if index % 4 == 3 else GDN for index in range(48))
    assert cost(*layers, tokens=32) == 885120
    assert cost(*layers, tokens=32, tp=2) == 491904
    assert cost(*layers, tokens=32, kv_format=FP8) == 491904
    assert cost(*layers, tokens=32, tp=2, kv_format=FP8) == 295296
    assert cost(*layers, tokens=32, kv_format=NVFP4) == 319872
    assert cost(*layers, tokens=32, tp=2, kv_format=NVFP4) == 209280


@settings(max_examples=80)
@given(
    heads=st.integers(1, 256),
    dim=st.integers(1, 64).map(lambda count: 16 * count),
    tokens=st.integers(1, 300),
    tp=st.integers(1, 64),
    kv_format=st.sampled_from([ElementFormat.FP32, BF16, FP8, NVFP4]),
    count=st.integers(1, 4),
    allocator=st.sampled_from(["trtllm-v1", "trtllm-v2", "trtllm-v2-qsa-packed"]),
    planes=st.sampled_from([(), (INDEX,), (POSITION,), (INDEX, POSITION)]),
)
def test_the_model_is_what_is_laid_out(
    heads: int,
    dim: int,
    tokens: int,
    tp: int,
    kv_format: ElementFormat,
    count: int,
    allocator: str,
    planes: tuple[SidePlane, ...],
) -> None:
    """The sum of the attention pools' slots is the bytes of one block of tokens."""
    layer = AttentionLayer(
        kv_heads=heads, head_dim=dim, side_planes=planes if allocator == "trtllm-v2-qsa-packed" else ()
    )
    spec = CacheSpec(
        layers=(layer,) * count, tokens_per_block=tokens, parallel=ParallelLayout(tp=tp), kv_format=kv_format
    )
    expected = block_bytes(manager_layers(spec)[0], spec)
    try:
        layout = allocate(spec, allocator)
    except Rejected as error:
        assert "side_planes page" in error.message  # a packed buffer may be as large as a K page
        return
    assert sum(pool.slot_bytes for pool in layout.pools) == expected
