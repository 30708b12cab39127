"""What a rank registers, and every check: a refusal names both sides, the role, both values and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, RecurrentLayer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Consumer
from kvsan.sim.layout import Layout
from kvsan.sim.page import Page
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected
from kvsan.sim.transfer.faulty import method_named
from kvsan.sim.transfer.pair import Pair, PairVerdict, judge_pair, lay_out
from kvsan.sim.transfer.planning import plan_transfer
from kvsan.sim.transfer.proof import prove
from kvsan.sim.transfer.registering import register

PLAIN = AttentionLayer(kv_heads=4, head_dim=16)
INDEX = SidePlane(role="index_key", dim=24, format=ElementFormat.BF16)


def spec(*layers: Any, layout: str = "tp1", **options: Any) -> CacheSpec:
    return CacheSpec(
        layers=layers or (PLAIN,), parallel=ParallelLayout.parse(layout), **{"tokens_per_block": 2} | options
    )


def judged(one: CacheSpec, other: CacheSpec, allocator: str = "trtllm-v2") -> PairVerdict:
    return judge_pair(Pair(source=one, destination=other), allocator)


GDN = RecurrentLayer(algorithm="gdn", heads=4, head_dim=4, groups=2, state_dim=8)

REFUSED = [
    ("record-layout", spec(), spec(consumer=Consumer(kv_layout="NHD")), "key differs in kind: HND", "NHD"),
    ("record-layout", spec(), spec(kv_format="fp8"), "key differs in element format: bf16", "fp8"),
    ("record-layout", spec(GDN), spec(GDN, state_format="fp32"), "ssm_state differs in element format: bf16", "fp32"),
    ("peer", spec(), spec(AttentionLayer(kv_heads=4, head_dim=32)), "bytes over all shards: 256", "512"),
    ("record-layout", spec(), spec(AttentionLayer(kv_heads=2, head_dim=32)), "unit bytes: 64", "128"),
    ("peer", spec(tokens_per_block=2), spec(tokens_per_block=3), "tokens per kernel page: 2", "3"),
    (
        "peer",
        spec(tokens_per_block=2, consumer=Consumer(kv_layout="NHD")),
        spec(tokens_per_block=4, consumer=Consumer(kv_layout="NHD")),
        "tokens per kernel page: 2",
        "4",
    ),
    (
        "head-map",
        spec(AttentionLayer(kv_heads=6, head_dim=16), layout="tp2"),
        spec(AttentionLayer(kv_heads=6, head_dim=16), layout="tp3"),
        "key differs in shards: 2",
        "3",
    ),
    ("peer", spec(AttentionLayer(kv_heads=4, head_dim=16, window=64)), spec(), "window in tokens: 64", "none"),
    ("layer-map", spec(PLAIN, PLAIN), spec(PLAIN), "the source holds key of layers 1", "no rank of the destination"),
    ("layer-map", spec(PLAIN), spec(PLAIN, PLAIN), "the destination holds key of layers 1", "no rank of the source"),
]


@pytest.mark.parametrize(("rule", "one", "other", "mine", "yours"), REFUSED)
def test_what_does_not_fit_is_refused_with_both_values(
    rule: str, one: CacheSpec, other: CacheSpec, mine: str, yours: str
) -> None:
    verdict = judged(one, other)
    assert verdict.status == "refused"
    assert not verdict.plan.copies
    first = verdict.findings[0]
    assert first.rule == rule
    assert mine in first.message
    assert yours in first.message
    assert "source" in first.message
    assert "destination" in first.message
    assert first.remedy


def test_blocks_of_different_tokens_need_whole_side_planes() -> None:
    """Head-major pages are cut at any multiple; a replicated plane is a page of its own."""
    layers = (AttentionLayer(kv_heads=4, head_dim=16, side_planes=(INDEX,)),)
    pair = spec(*layers, tokens_per_block=2), spec(*layers, tokens_per_block=4)
    verdict = judged(*pair, "trtllm-v2-qsa-packed")
    assert [finding.message.split(" on ")[0] for finding in verdict.findings] == [
        "layer 0's index_key differs in tokens per kernel page: 2"
    ]
    assert judged(spec(tokens_per_block=2), spec(tokens_per_block=4)).status == "clean"


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (spec(AttentionLayer(kv_heads=3, head_dim=16), layout="tp2"), ("3 KV heads over 2 ranks", "divide")),
        (spec(AttentionLayer(kv_heads=2, head_dim=16), layout="tp3"), ("2 KV heads over 3 ranks", "divide")),
        (spec(layout="tp1cp2"), ("2 context-parallel ranks", "positions")),
        (
            spec(RecurrentLayer(algorithm="gdn", heads=4, head_dim=2, groups=1, state_dim=2), layout="tp4"),
            ("channels of queries", "4 ranks"),
        ),
    ],
)
def test_what_cannot_be_registered_is_refused(one: CacheSpec, words: tuple[str, ...]) -> None:
    verdict = judged(one, spec(*one.layers))
    assert verdict.status == "refused"
    assert verdict.findings[0].message.startswith("the source cannot register its cache")
    assert all(word in verdict.findings[0].message for word in words)
    assert judged(spec(*one.layers), one).findings[0].message.startswith("the destination cannot register")


def test_a_rank_registers_role_by_role() -> None:
    """K, V and an index page of one size share a pool, and are two views of it with the same pitch."""
    layers = [AttentionLayer(kv_heads=2, head_dim=12, side_planes=(INDEX,))]
    one = spec(*layers, layout="tp2", kv_format="fp32", slots=3)
    registered = register(allocate(one, "trtllm-v2-qsa-legacy"))
    shared, replicated = registered.views
    assert (shared.pool, shared.slot_stride_bytes) == (replicated.pool, replicated.slot_stride_bytes) == (0, 3 * 96)
    assert [entry.role for entry in shared.entries] == ["key", "value"]
    assert shared.runs == ((0, 192),)
    assert replicated.runs == ((192, 96),)
    assert (shared.role_layout.kind, shared.role_layout.shards, shared.role_layout.replicas) == ("HND", 2, 1)
    assert shared.role_layout.unit_bytes == 2 * 12 * 4, "two tokens of one head"
    assert (replicated.role_layout.kind, replicated.role_layout.replicas) == ("REPLICATED", 2)
    assert [(region.first_byte, region.size_bytes) for region in registered.regions] == [(0, 768), (192, 672)]


def test_states_register_sections_and_heads() -> None:
    one = msgspec.structs.replace(spec(GDN, layout="tp2"), rank=1)
    ssm, conv = register(allocate(one, "trtllm-v2")).views
    assert (ssm.role_layout.kind, ssm.role_layout.unit_bytes, ssm.role_layout.shard_index) == ("HND", 4 * 8 * 2, 1)
    assert (conv.role_layout.kind, conv.role_layout.section_bytes) == ("SECTIONED", (48, 48, 48))


def test_replicas_stand_side_by_side() -> None:
    one = spec(AttentionLayer(kv_heads=2, head_dim=16), layout="tp4")
    shares = [register(layout).views[0].role_layout for layout in lay_out(one, 0, "trtllm-v2")]
    assert [(share.shard_index, share.replica_index) for share in shares] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def changed(layout: Layout, change: Callable[[Page], Page]) -> Layout:
    buffers = [msgspec.structs.replace(buffer, page=change(buffer.page)) for buffer in layout.buffers]
    return msgspec.structs.replace(layout, buffers=tuple(buffers))


def test_a_page_with_gaps_and_a_layout_without_spec_cannot_be_registered() -> None:
    layout = allocate(spec(), "trtllm-v2")
    with pytest.raises(Rejected, match="page with gaps"):
        register(changed(layout, lambda page: msgspec.structs.replace(page, dense=False)))
    with pytest.raises(Rejected, match="names no spec"):
        register(msgspec.structs.replace(layout, spec=None))
    with pytest.raises(Rejected, match="belongs to no layer"):
        register(msgspec.structs.replace(layout, buffers=(msgspec.structs.replace(layout.buffers[0], layer=9),)))


def test_a_layer_apart_and_unequal_layers_cannot_be_registered() -> None:
    layout = allocate(spec(PLAIN, PLAIN), "trtllm-v2")
    key, value, *rest = layout.buffers
    apart = (key, msgspec.structs.replace(value, offset_bytes=value.offset_bytes + 4096), *rest)
    with pytest.raises(Rejected, match="contiguous"):
        register(msgspec.structs.replace(layout, buffers=apart))
    with pytest.raises(Rejected, match="256 B and 512 B in one view"):
        register(msgspec.structs.replace(layout, buffers=(key, *rest)))


def test_sections_in_another_order() -> None:
    """Mamba-2 keeps x, B, C where a gated delta net keeps queries, keys, values: the sizes tell them apart."""
    gdn = RecurrentLayer(algorithm="gdn", heads=8, head_dim=4, groups=2, state_dim=4)
    mamba = RecurrentLayer(algorithm="mamba2", heads=8, head_dim=4, groups=2, state_dim=4)
    verdict = judged(spec(gdn), spec(mamba))
    assert verdict.status == "refused"
    assert "48 + 48 + 192" in verdict.findings[0].message
    assert "192 + 48 + 48" in verdict.findings[0].message


def test_a_plan_needs_slots_to_be_proved() -> None:
    layouts = [allocate(spec(slots=1), "trtllm-v2")]
    with pytest.raises(SpecError, match="found 1, needs at least 3"):
        prove(layouts, layouts, plan_transfer(layouts, layouts).copies)


def test_pairs_are_validated() -> None:
    with pytest.raises(SpecError, match="destination_dp"):
        Pair(source=spec(), destination=spec(layout="adp2"), destination_dp=2)
    with pytest.raises(SpecError, match="ranks that hold a request"):
        Pair(source=spec(layout="tp1024"), destination=spec())


@pytest.mark.parametrize(("mine", "yours"), [(4, 3), (3, 4), (2, 7), (31, 32)])
def test_blocks_that_do_not_divide_are_refused_or_of_no_matter(mine: int, yours: int) -> None:
    """States alone move whatever the blocks are, and a method that compares nothing is judged too."""
    state = RecurrentLayer(algorithm="gdn", heads=2, head_dim=2, groups=2, state_dim=2, conv_kernel=3)
    for layer, status, wrong in (
        (state, "clean", "clean"),
        (AttentionLayer(kv_heads=2, head_dim=8), "refused", "findings"),
    ):
        one = CacheSpec(layers=(layer,), tokens_per_block=mine)
        pair = Pair(source=one, destination=msgspec.structs.replace(one, tokens_per_block=yours))
        assert judge_pair(pair).status == status
        assert judge_pair(pair, method=method_named("fault:block-for-block")).status == wrong


@pytest.mark.parametrize("side", ["source", "destination"])
def test_slots_on_either_side_of_a_pool_are_one_line(side: str) -> None:
    """A layout of somebody's own whose slots run backwards, or past the end."""

    def laid_out(stride: int) -> Callable[[CacheSpec], Layout]:
        def allocator(one: CacheSpec) -> Layout:
            layout = allocate(one, "trtllm-v2")
            moved = tuple(
                msgspec.structs.replace(held, slot_stride_bytes=stride * held.slot_stride_bytes)
                for held in layout.buffers
            )
            return msgspec.structs.replace(layout, buffers=moved)

        return allocator

    sound = laid_out(1)
    for stride in (-1, 1000):
        broken = laid_out(stride)
        allocators = (broken, sound) if side == "source" else (sound, broken)
        with pytest.raises(SpecError, match="layout: layer 0's key leaves its pool"):
            judge_pair(Pair(source=spec(), destination=spec(layout="tp2")), *allocators)
