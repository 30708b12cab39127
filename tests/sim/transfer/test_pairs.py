"""Which pairs of the reference model's layouts transfer, which are refused, and with which words."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest

from kvsan.model.spec import CacheSpec
from kvsan.sim.transfer.pair import Pair, PairVerdict, judge_pair
from kvsan.sim.transfer.planning import bytes_moved

FIVE = ("tp1", "tp2", "tep4", "adp2", "adp4")
PACKED = "trtllm-v2-qsa-packed"
LEGACY = "trtllm-v2-qsa-legacy"
RANK_LOCAL = "trtllm-v2-qsa-packed-rank-local"

Deploy = Callable[..., CacheSpec]

COLLIDES = {("fp8", "tp2"), ("fp8", "tep4"), ("nvfp4", "tp1"), ("nvfp4", "adp2"), ("nvfp4", "adp4")}
"""Where an index page is as large as a K page of the rank: legacy refuses, and the rank-local predicate packs."""


def judged(source: CacheSpec, destination: CacheSpec, allocator: str = PACKED, **dp: int) -> PairVerdict:
    return judge_pair(Pair(source=source, destination=destination, **dp), allocator)


@pytest.mark.parametrize(("kv_dtype", "state_dtype"), [("bf16", "fp32"), ("fp8", "fp16"), ("nvfp4", "bf16")])
def test_all_pairs_of_the_five_layouts_transfer_once(deploy: Deploy, kv_dtype: str, state_dtype: str) -> None:
    # Four tokens a block: pages shrink alike, and so does the packed plane.
    specs = {name: deploy(name, kv_dtype, tokens_per_block=4, state_dtype=state_dtype) for name in FIVE}
    for one, other in itertools.product(FIVE, repeat=2):
        verdict = judged(specs[one], specs[other])
        assert verdict.status == "clean", (one, other, verdict.findings)
        ranks = 1 if other.startswith("adp") else specs[other].parallel.tp
        stored = sum(buffer.page_bytes for layout in verdict.destination for buffer in layout.buffers)
        assert len(verdict.destination) == ranks
        assert bytes_moved(verdict.plan) == stored, "each stored byte of the destination is written once"


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("state_dtype", ["fp32", "fp16", "bf16"])
def test_every_kv_dtype_with_every_state_dtype(deploy: Deploy, kv_dtype: str, state_dtype: str) -> None:
    """All 25 pairs of the five layouts under the first few layers, which hold states, K/V, scales and planes."""
    specs = {name: deploy(name, kv_dtype, tokens_per_block=4, state_dtype=state_dtype) for name in FIVE}
    few = {name: msgspec.structs.replace(spec, layers=spec.layers[2:4]) for name, spec in specs.items()}
    for one, other in itertools.product(FIVE, repeat=2):
        verdict = judged(few[one], few[other])
        assert verdict.status == "clean", (one, other, verdict.findings)
        roles = {buffer.role for layout in verdict.destination for buffer in layout.buffers}
        assert {"key", "value", "ssm_state", "conv_state"} <= roles
        assert ("key_block_scale" in roles) == (kv_dtype == "nvfp4")


@pytest.mark.parametrize("state_dtype", ["fp32", "fp16", "bf16"])
def test_states_of_every_dtype_transfer_at_full_size(deploy: Deploy, state_dtype: str) -> None:
    one, other = deploy("tp1", state_dtype=state_dtype), deploy("tep4", state_dtype=state_dtype)
    assert judged(one, other).status == "clean"
    assert judged(other, one).status == "clean"


def test_every_data_parallel_rank_is_served(deploy: Deploy) -> None:
    source, destination = deploy("tep4", tokens_per_block=4), deploy("adp4", tokens_per_block=4)
    senders = []
    for dp in range(4):
        verdict = judged(source, destination, destination_dp=dp)
        assert verdict.status == "clean"
        senders.append({copy.source_rank for copy in verdict.plan.copies if copy.label.endswith(" key")})
        assert {copy.destination_rank for copy in verdict.plan.copies} == {dp}
    assert senders == [{0, 2}, {1, 3}, {0, 2}, {1, 3}], "two heads on four ranks: replicas take turns"


def test_the_planes_of_the_golden_numbers(deploy: Deploy) -> None:
    """Packed: 98688 B of side planes move whole, whatever the two tensor-parallel sizes."""
    verdict = judged(deploy("tp2"), deploy("tep4"))
    planes = [copy for copy in verdict.plan.copies if "side_planes" in copy.label]
    assert [(copy.run_bytes, copy.destination_rank) for copy in planes] == [
        (98688, 0),
        (98688, 1),
        (98688, 2),
        (98688, 3),
    ]


@pytest.mark.parametrize(("allocator", "status"), [(LEGACY, "rejected"), (RANK_LOCAL, "refused")])
def test_each_failing_pair_has_its_reason(deploy: Deploy, allocator: str, status: str) -> None:
    for kv_dtype in ("bf16", "fp8", "nvfp4"):
        specs = {name: deploy(name, kv_dtype, tokens_per_block=4) for name in FIVE}
        for one, other in itertools.product(FIVE, repeat=2):
            collides = (kv_dtype, one) in COLLIDES, (kv_dtype, other) in COLLIDES
            fails = any(collides) if allocator == LEGACY else collides[0] != collides[1]
            if not fails and "adp2" in (one, other):
                continue  # as adp4
            verdict = judged(specs[one], specs[other], allocator)
            assert verdict.status == (status if fails else "clean"), (kv_dtype, one, other)
            if not fails:
                continue
            if verdict.rejection is not None:
                assert verdict.side == ("source" if collides[0] else "destination")
                assert "which is not a multiple of" in verdict.rejection.message
            else:
                text = " ".join(finding.message for finding in verdict.findings)
                assert {finding.rule for finding in verdict.findings} == {"peer"}
                assert "side_planes" in text
                assert "index_key" in text
                assert "whole model" in verdict.findings[0].remedy


@pytest.mark.parametrize("turned", [False, True])
def test_uneven_pipeline_stages_are_refused_by_their_local_layers(deploy: Deploy, turned: bool) -> None:
    pair = deploy("tp1pp5"), deploy("tp1")
    verdict = judged(*pair[:: -1 if turned else 1])
    assert verdict.status == "refused"
    assert not verdict.plan.copies
    messages = [finding.message for finding in verdict.findings]
    assert len(messages) == 5, "one for each of the five stages"
    for message, layers, size in zip(messages, (2, 3, 2, 2, 3), (16768, 24960, 16768, 16768, 24960), strict=True):
        assert f"packs {layers} local sparse layers" in message
        assert f"into {size} B" in message
        assert "packs 12 local sparse layers (3, 7, 11, 15, ...) into 98688 B" in message
    assert {finding.rule for finding in verdict.findings} == {"peer"}


def test_alike_refusals_are_told_once(deploy: Deploy) -> None:
    assert len(judged(deploy("tp4pp5"), deploy("tp2")).findings) == 5


def test_one_pipeline_split_on_both_sides_transfers(deploy: Deploy) -> None:
    assert judged(deploy("tp1pp5", tokens_per_block=4), deploy("tp2pp5", tokens_per_block=4)).status == "clean"


def test_pipeline_stages_join_where_nothing_is_packed(deploy: Deploy) -> None:
    """bf16 packs nothing: five stages feed one rank, each position plane once; the way back lacks position planes."""
    one, other = deploy("tp1pp5", "bf16", tokens_per_block=4), deploy("tp1", "bf16", tokens_per_block=4)
    assert judged(one, other).status == "clean"
    back = judged(other, one)
    assert back.status == "refused"
    assert len(back.findings) == 1
    assert "qsa_index_position of layers 11, 23, 31, 39" in back.findings[0].message


@pytest.mark.parametrize(
    ("source", "destination"), [("folded", "separate"), ("separate", "folded"), ("folded", "folded")]
)
def test_draft_caches_move_between_managers(deploy: Deploy, source: str, destination: str) -> None:
    """A draft layer is found by its number, whichever manager holds it; in bf16 nothing is packed."""
    one = deploy("tep4", "bf16", tokens_per_block=4, draft=source)
    other = deploy("tp2", "bf16", tokens_per_block=4, draft=destination)
    verdict = judged(one, other)
    if source == "folded" and destination == "separate":
        # the draft manager has a position plane of its own, which the target's manager of the source does not keep
        assert [finding.rule for finding in verdict.findings] == ["peer"]
        assert "qsa_index_position of layers 48" in verdict.findings[0].message
    else:
        assert verdict.status == "clean", verdict.findings


def test_a_draft_on_one_side_alone_is_refused(deploy: Deploy) -> None:
    verdict = judged(deploy("tp1", draft="none"), deploy("tp1", draft="separate"))
    assert verdict.status == "refused"
    assert any(finding.rule == "layer-map" and "layer 48" in finding.message for finding in verdict.findings)
