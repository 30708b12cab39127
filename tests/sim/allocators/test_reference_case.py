"""The published numbers of the reference deployment.

32 tokens per block, 2 KV heads of dim 256, index planes of 1 x 128 bf16, a position plane of 3 x int32.

Per page of 32 tokens: K = V 32768 or 16384 B in bf16 (2 heads or 1), 16384 or 8192 in fp8, 8192 or 4096 in nvfp4 with
scales of 1024 or 512 B; an index plane 8192 B, the position plane 384 B.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.spec import CacheSpec
from kvsan.sim.checking import check
from kvsan.sim.layout import Layout
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected

Reference = Callable[..., CacheSpec]

HEADS = {"tp1": 2, "tp2": 1, "tep4": 1, "adp2": 2, "adp4": 2}
FORMATS = ("bf16", "fp8", "nvfp4")
CELLS = [(layout, kv_format) for layout in HEADS for kv_format in FORMATS]
KEY_PAGE = {
    ("bf16", 2): 32768,
    ("bf16", 1): 16384,
    ("fp8", 2): 16384,
    ("fp8", 1): 8192,
    ("nvfp4", 2): 8192,
    ("nvfp4", 1): 4096,
}
SCALE_PAGE = {("nvfp4", 2): 1024, ("nvfp4", 1): 512}

# (slot bytes, pages in it) of each attention pool, largest first; equal slots in the order of registration.
INDEX_POOL, POSITION_POOL, PLANE_POOL = (98304, 12), (384, 1), (98688, 1)
SEPARATE = {
    ("bf16", 2): [(786432, 24), INDEX_POOL, POSITION_POOL],
    ("bf16", 1): [(393216, 24), INDEX_POOL, POSITION_POOL],
    ("fp8", 2): [(393216, 24), INDEX_POOL, POSITION_POOL],
    ("nvfp4", 1): [(98304, 24), INDEX_POOL, (12288, 24), POSITION_POOL],
}
PACKED = {
    ("fp8", 2): [(393216, 24), PLANE_POOL],
    ("fp8", 1): [(196608, 24), PLANE_POOL],
    ("nvfp4", 2): [(196608, 24), PLANE_POOL, (24576, 24)],
    ("nvfp4", 1): [PLANE_POOL, (98304, 24), (12288, 24)],
}
ANY_HEADS = SEPARATE | PACKED
RANK_LOCAL = PACKED | SEPARATE  # a side page meets another only with fp8 and 1 head, or nvfp4 and 2
SLOT_TOTAL = {
    ("bf16", 2): 885120,
    ("bf16", 1): 491904,
    ("fp8", 2): 491904,
    ("fp8", 1): 295296,
    ("nvfp4", 2): 319872,
    ("nvfp4", 1): 209280,
}
REFUSED = {("tp2", "fp8"), ("tep4", "fp8"), ("tp1", "nvfp4"), ("adp2", "nvfp4"), ("adp4", "nvfp4")}


def attention_pools(layout: Layout) -> list[tuple[int, int]]:
    """Return (slot bytes, buffers in a slot) of each pool of the attention life cycle, in pool order."""
    cycle = next(buffer.life_cycle for buffer in layout.buffers if buffer.role == "key")
    pools = sorted({buffer.pool for buffer in layout.buffers if buffer.life_cycle == cycle})
    assert [layout.pools[pool].index for pool in pools] == list(range(len(pools)))
    return [(layout.pools[pool].slot_bytes, sum(buffer.pool == pool for buffer in layout.buffers)) for pool in pools]


def key_offsets(layout: Layout) -> list[int]:
    return [buffer.offset_bytes for buffer in layout.buffers if buffer.role == "key"]


@pytest.mark.parametrize(("layout", "kv_format"), CELLS)
def test_page_sizes(reference: Reference, layout: str, kv_format: str) -> None:
    found = allocate(reference(layout, kv_format), "trtllm-v2-qsa-packed")
    cell = kv_format, HEADS[layout]
    pages = {buffer.role: buffer.page_bytes for buffer in found.buffers}
    assert pages["key"] == pages["value"] == KEY_PAGE[cell]
    assert pages.get("key_block_scale") == pages.get("value_block_scale") == SCALE_PAGE.get(cell)
    sparse = [buffer.layer for buffer in found.buffers if buffer.role == "key"]
    assert sparse == list(range(3, 48, 4))
    assert found.head_maps[0].rank_heads == HEADS[layout]
    if layout == "tep4":
        assert found.head_maps[0].ranges == ((0, 1), (0, 1), (1, 2), (1, 2))
        assert found.notes[0] == "2 KV heads over 4 ranks: each rank keeps 1, so heads are replicated"


@pytest.mark.parametrize(("layout", "kv_format"), [cell for cell in CELLS if cell not in REFUSED])
def test_separate_planes(reference: Reference, layout: str, kv_format: str) -> None:
    found = allocate(reference(layout, kv_format), "trtllm-v2-qsa-legacy")
    cell = kv_format, HEADS[layout]
    assert attention_pools(found) == SEPARATE[cell]
    assert sum(slot for slot, _ in attention_pools(found)) == SLOT_TOTAL[cell] == found.block_bytes[0][1]
    table = found.tables[-1]
    assert table.index_scale == 24
    assert table.mapping_offsets == tuple(range(12))
    assert key_offsets(found) == [2 * KEY_PAGE[cell] * ordinal for ordinal in range(12)]
    assert found.side_planes_bytes == 0
    assert check(found) == []


@pytest.mark.parametrize(("layout", "kv_format"), sorted(REFUSED))
def test_index_planes_as_large_as_k_pages_are_refused(reference: Reference, layout: str, kv_format: str) -> None:
    with pytest.raises(Rejected) as caught:
        allocate(reference(layout, kv_format), "trtllm-v2-qsa-legacy")
    error = caught.value
    assert (error.rule, error.supported) == ("rejected", True)
    assert error.message.startswith(
        "Layer 7's K page starts 24576 B into its pool slot, which is not a multiple of one layer's K/V pages (16384 B)"
    )
    arithmetic = "1 head x 256 fp8" if kv_format == "fp8" else "2 heads x 256 nvfp4"
    assert "Layer 3's index_key page (1 head x 128 bf16 x 32 tokens = 8192 B)" in error.message
    assert f"as large as a K page ({arithmetic} x 32 tokens = 8192 B)" in error.message
    assert "a slot holds 36 pages instead of 24, and the offset is 24576/16384 of a pair" in error.message
    assert "trtllm-v2-qsa-packed" in error.remedy
    assert "tokens per block does not help" in error.remedy
    assert [(where.layer, where.role, where.first_byte) for where in error.where] == [
        (7, "key", 24576),
        (3, "index_key", 16384),
    ]


@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(
    ("allocator", "pools"), [("trtllm-v2-qsa-packed", ANY_HEADS), ("trtllm-v2-qsa-packed-rank-local", RANK_LOCAL)]
)
def test_packed_planes(
    reference: Reference,
    layout: str,
    kv_format: str,
    allocator: str,
    pools: dict[tuple[str, int], list[tuple[int, int]]],
) -> None:
    found = allocate(reference(layout, kv_format), allocator)
    cell = kv_format, HEADS[layout]
    assert attention_pools(found) == pools[cell]
    assert sum(slot for slot, _ in attention_pools(found)) == SLOT_TOTAL[cell]  # packing costs no memory
    table = found.tables[-1]
    assert (table.index_scale, table.kv_factor, table.kv_offset, table.page_bytes) == (24, 2, 1, KEY_PAGE[cell])
    assert table.mapping_offsets == tuple(range(12))
    assert key_offsets(found) == [2 * KEY_PAGE[cell] * ordinal for ordinal in range(12)]
    packed = PLANE_POOL in pools[cell]
    assert found.side_planes_bytes == (98688 if packed else 0)
    assert any("all side planes share one buffer" in note for note in found.notes) == packed
    if kv_format == "nvfp4":
        scales = [buffer.offset_bytes for buffer in found.buffers if buffer.role == "key_block_scale"]
        assert scales == [2 * SCALE_PAGE[cell] * ordinal for ordinal in range(12)]
        assert (table.scale_index_scale, table.scale_page_bytes) == (24, SCALE_PAGE[cell])
    assert check(found) == []


def test_rank_local_peers_disagree(reference: Reference) -> None:
    """The predicate asked for one rank's heads packs TP2 and not TP1; asked for any head count it packs both."""
    plane = {
        (allocator, layout): allocate(reference(layout, "fp8"), allocator).side_planes_bytes
        for allocator in ("trtllm-v2-qsa-packed", "trtllm-v2-qsa-packed-rank-local")
        for layout in ("tp1", "tp2")
    }
    assert plane == {
        ("trtllm-v2-qsa-packed", "tp1"): 98688,
        ("trtllm-v2-qsa-packed", "tp2"): 98688,
        ("trtllm-v2-qsa-packed-rank-local", "tp1"): 0,
        ("trtllm-v2-qsa-packed-rank-local", "tp2"): 98688,
    }


def test_planes_inside_the_packed_buffer(reference: Reference) -> None:
    """The index planes in layer order, each at a multiple of 8192 B, then the position plane."""
    found = allocate(reference("tp2", "fp8", slots=3), "trtllm-v2-qsa-packed")
    plane = next(buffer for buffer in found.buffers if buffer.role == "side_planes")
    assert (plane.layer, plane.offset_bytes, plane.slot_stride_bytes, plane.page_bytes) == (3, 0, 98688, 98688)
    assert [(part.layer, part.role, part.offset_bytes) for part in plane.parts] == [
        *((3 + 4 * ordinal, "index_key", 8192 * ordinal) for ordinal in range(12)),
        (3, "qsa_index_position", 98304),
    ]
    index, position = plane.parts[0].page, plane.parts[-1].page
    assert (index.format, index.axes, index.shape) == (ElementFormat.BF16, ("token", "head", "dim"), (32, 1, 128))
    assert (position.format, position.shape) == (ElementFormat.INT32, (32, 1, 3))
    views = [access for access in found.accesses if access.consumer == "side-plane-view"]
    assert [(view.part, view.offset_bytes, view.pitch_bytes) for view in views] == [
        (number, 8192 * number, 98688) for number in range(13)
    ]
    assert (98688 // 2, 98688 // 4) == (49344, 24672)  # the pitch in bf16 and in int32 elements: whole numbers


def test_op_addresses_of_the_packed_case(reference: Reference) -> None:
    """K of slot s and ordinal i = base + s * 196608 + i * 16384, V = K + 8192."""
    found = allocate(reference("tp2", "fp8", slots=3), "trtllm-v2-qsa-packed")
    reached = {
        (found.buffers[access.buffer].layer, found.buffers[access.buffer].role): access
        for access in found.accesses
        if access.consumer == "attention-op"
    }
    for ordinal in range(12):
        layer = 3 + 4 * ordinal
        key, value = reached[layer, "key"], reached[layer, "value"]
        assert (key.offset_bytes, key.pitch_bytes, key.cell_count) == (ordinal * 16384, 196608, 3)
        assert (value.offset_bytes, value.pitch_bytes) == (ordinal * 16384 + 8192, 196608)
        assert key.page.span_bytes == 8192


# Pipeline stages: the sparse layers of each rank, their local numbers, and the packed plane: n * 8192 + 384.

STAGES = {
    1: [12],
    2: [6, 6],
    3: [4, 4, 4],
    4: [3, 3, 3, 3],
    5: [2, 3, 2, 2, 3],
    6: [2] * 6,
    8: [1, 2] * 4,
    12: [1] * 12,
}
PLANES = {1: 8576, 2: 16768, 3: 24960, 4: 33152, 6: 49536, 12: 98688}


@pytest.mark.parametrize("stages", STAGES)
def test_pipeline_stages(reference: Reference, stages: int) -> None:
    layers = []
    for rank in range(stages):
        found = allocate(reference(f"pp{stages}", "fp8", rank), "trtllm-v2-qsa-packed")
        sparse = sum(buffer.role == "key" for buffer in found.buffers)
        assert sparse == STAGES[stages][rank]
        assert found.side_planes_bytes == PLANES[sparse] == sparse * 8192 + 384
        assert found.side_planes_bytes & -found.side_planes_bytes == 128
        assert found.tables[-1].index_scale == 2 * sparse
        assert found.tables[-1].mapping_offsets == tuple(range(sparse))
        assert check(found) == []
        layers += sorted({buffer.layer for buffer in found.buffers})
    assert layers == list(range(48))


def test_local_numbers_of_five_stages(reference: Reference) -> None:
    """Recurrent layers count: the second of five stages holds layers 10 to 19, and its sparse ones are 1, 5 and 9."""
    local = []
    for rank in range(5):
        found = allocate(reference("pp5", "fp8", rank), "trtllm-v2-qsa-packed")
        stage = found.stages[rank]
        local.append([stage.index(layer) for layer in stage if layer % 4 == 3])
    assert local == [[3, 7], [1, 5, 9], [3, 7], [1, 5], [0, 4, 8]]
    assert [len(stage) for stage in found.stages] == [10, 10, 10, 9, 9]


def test_one_sparse_layer_on_a_rank_hides_the_collision(reference: Reference) -> None:
    """K, V and the index plane make a slot of 3 pages and no second layer that would not divide; two layers fail."""
    found = allocate(reference("tp2pp12", "fp8"), "trtllm-v2-qsa-legacy")
    assert found.tables[-1].index_scale == 3
    with pytest.raises(Rejected, match=r"^Layer 7's K page starts 24576 B"):
        allocate(reference("tp2pp6", "fp8"), "trtllm-v2-qsa-legacy")


# The draft layer, one sparse layer of the same geometry.


@pytest.mark.parametrize(
    ("layout", "kv_format", "pools"),
    [
        ("tp2", "fp8", [(212992, 26), (106880, 1)]),
        ("tp1", "nvfp4", [(212992, 26), (106880, 1), (26624, 26)]),
        ("tp1", "bf16", [(851968, 26), (106496, 13), (384, 1)]),
        ("adp4", "bf16", [(851968, 26), (106496, 13), (384, 1)]),
    ],
)
def test_a_folded_draft_layer_joins_the_target(
    reference: Reference, layout: str, kv_format: str, pools: list[tuple[int, int]]
) -> None:
    found = allocate(reference(layout, kv_format, draft="folded"), "trtllm-v2-qsa-packed")
    assert attention_pools(found) == pools
    assert found.tables[-1].index_scale == 26
    assert found.tables[-1].mapping_offsets == tuple(range(13))
    assert found.side_planes_bytes == (0 if kv_format == "bf16" else 13 * 8192 + 384)
    assert {pool.manager for pool in found.pools} == {"target"}
    assert check(found) == []


def test_a_folded_draft_layer_and_separate_planes(reference: Reference) -> None:
    with pytest.raises(Rejected) as caught:
        allocate(reference("tp2", "fp8", draft="folded"), "trtllm-v2-qsa-legacy")
    assert caught.value.message.startswith("Layer 7's K page starts 24576 B into its pool slot")
    assert "a slot holds 39 pages instead of 26" in caught.value.message  # 8192 x 39 = 319488 B


def test_a_separate_draft_layer_has_pools_and_a_table_of_its_own(reference: Reference) -> None:
    found = allocate(reference("tep4", "fp8", draft="separate"), "trtllm-v2-qsa-packed")
    pools = {}
    for pool in found.pools:
        pools.setdefault(pool.manager, []).append(pool.slot_bytes)
    assert pools["target"][-2:] == [196608, 98688]
    assert pools["draft"] == [16384, 8576]
    assert [table.manager for table in found.tables] == ["target", "draft"]
    assert found.tables[1].layers == (48,)
    assert found.tables[1].index_scale == 2
    assert found.block_bytes == (("target", 295296), ("draft", 24960))
    assert check(found) == []


def test_draft_layers_are_on_the_last_stage_alone(reference: Reference) -> None:
    for draft in ("folded", "separate"):
        for rank in (0, 1):
            found = allocate(reference("pp2", "fp8", rank, draft=draft), "trtllm-v2-qsa-packed")
            assert (48 in {buffer.layer for buffer in found.buffers}) == (rank == 1)


def test_attention_dp_folds_its_draft_layers(reference: Reference) -> None:
    with pytest.raises(Rejected, match="attention-DP keeps the draft layers in the target's manager"):
        allocate(reference("adp4", "fp8", draft="separate"), "trtllm-v2-qsa-packed")


def test_states_of_the_reference_case(reference: Reference) -> None:
    """36 recurrent layers: 2 MiB of fp32 and 49152 B of bf16 each on one rank, in a life cycle of their own."""
    found = allocate(reference("tp1", "bf16", slots=5, state_slots=3), "trtllm-v2-qsa-packed")
    states = [pool for pool in found.pools if pool.group == 0]
    assert [(pool.slot_bytes, pool.slot_count) for pool in states] == [(36 * (2 << 20), 3), (36 * 49152, 3)]
    assert [pool.slot_count for pool in found.pools if pool.group == 1] == [5, 5, 5]
    halved = allocate(reference("tp2", "bf16"), "trtllm-v2-qsa-packed")
    assert halved.pools[0].slot_bytes == 36 << 20
    whole = allocate(reference("adp2", "bf16"), "trtllm-v2-qsa-packed")
    assert whole.pools[0].slot_bytes == 72 << 20


def test_bytes_of_a_long_request(reference: Reference) -> None:
    """32768 tokens are 1024 blocks; in fp8 with 1 head per rank 288.375 MiB."""
    found = allocate(reference("tp2", "fp8"), "trtllm-v2-qsa-packed")
    assert 1024 * found.block_bytes[0][1] * 8 == 2307 << 20
