"""Rule ``rejected``: a refusal says what is wrong, what to do, and whether the spec should have been built."""

from __future__ import annotations

from typing import Any

import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, AuxiliaryState, LatentLayer, Layer, RecurrentLayer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Draft
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected
from kvsan.sim.rules import RULES

RULE = next(rule for rule in RULES if rule.name == "rejected")
FP8, NVFP4, UINT8 = ElementFormat.FP8, ElementFormat.NVFP4, ElementFormat.UINT8
DENSE = AttentionLayer(kv_heads=8, head_dim=128)
LATENT = LatentLayer(latent_dim=512, rope_dim=64)
INDEX = SidePlane(role="index_key", dim=128, format=ElementFormat.BF16)
SPARSE = AttentionLayer(kv_heads=2, head_dim=256, side_planes=(INDEX,))
GDN = RecurrentLayer(algorithm="gdn", heads=32, head_dim=128, groups=16, state_dim=128)
PLE = AuxiliaryState(role="ple_context", shape=(3,), format=ElementFormat.INT64)


def refusal(allocator: str, *layers: Layer, **settings: Any) -> Rejected:
    with pytest.raises(Rejected) as caught:
        allocate(CacheSpec(layers=layers, **settings), allocator)
    error = caught.value
    assert error.rule == "rejected"
    assert error.message == str(error)
    assert "\n" not in error.message + error.remedy
    assert error.remedy
    return error


def test_the_rule_is_judged_where_an_allocator_is_called() -> None:
    assert RULE.check is None
    assert RULE.summary
    assert RULE.explanation


@pytest.mark.parametrize(
    ("allocator", "layers", "settings", "message", "remedy"),
    [
        ("trtllm-v1", (SPARSE,), {}, "no side planes beside K/V", "trtllm-v2-qsa-packed"),
        ("trtllm-v2", (SPARSE,), {}, "side planes beside K/V pages need a sparse-attention manager", "qsa-packed"),
        ("trtllm-v2-qsa-packed", (LATENT,), {}, "QSA needs V pages", "--allocator trtllm-v2"),
        (
            "trtllm-v2-qsa-legacy",
            (SPARSE, AttentionLayer(kv_heads=2, head_dim=128)),
            {},
            "one attention pool for all its layers",
            "one geometry",
        ),
        (
            "trtllm-v2-qsa-packed",
            (AttentionLayer(kv_heads=2, head_dim=256, tokens_per_block=16, side_planes=(INDEX,)),),
            {},
            "QSA views need the manager's own tokens per block",
            "drop the layers' tokens_per_block",
        ),
        ("trtllm-v2", (DENSE, LATENT), {}, "both K/V layers and latent (K-only) layers", "separate draft layers"),
        (
            "trtllm-v2",
            (AttentionLayer(kv_heads=8, head_dim=192, value_dim=128),),
            {},
            "K pages of head dim 192 beside V pages of head dim 128",
            "pad the smaller head dim",
        ),
        (
            "trtllm-v2",
            (DENSE,),
            {"draft": Draft(mode="separate", layers=(DENSE,)), "parallel": ParallelLayout(tp=4, attention_dp=True)},
            "attention-DP keeps the draft layers in the target's manager",
            "--draft folded",
        ),
        (
            "trtllm-v2",
            (DENSE, AttentionLayer(kv_heads=8, head_dim=128, tokens_per_block=16)),
            {},
            "layers of 16 and 32 tokens per block in one manager",
            "same tokens per block",
        ),
        (
            "trtllm-v2",
            (AttentionLayer(kv_heads=8, head_dim=128, tokens_per_block=24),),
            {},
            "tokens per block of the manager over those of a layer: 32 is not a multiple of 24",
            "tokens per block",
        ),
        (
            "trtllm-v2",
            (AttentionLayer(kv_heads=8, head_dim=24),),
            {"kv_format": NVFP4},
            "24 is not a multiple of 16",
            "head dim",
        ),
        (
            "trtllm-v1",
            (AttentionLayer(kv_heads=1, head_dim=3),),
            {"kv_format": NVFP4, "tokens_per_block": 1},
            "3 is not a multiple of 2",
            "head dim",
        ),
        ("trtllm-v1", (DENSE, AttentionLayer(kv_heads=8, head_dim=64)), {}, "head dims 64, 128 share one", "trtllm-v2"),
        (
            "trtllm-v1",
            (DENSE, AttentionLayer(kv_heads=8, head_dim=128, kv_format=FP8)),
            {},
            "one KV format for all layers",
            "trtllm-v2",
        ),
        (
            "trtllm-v1",
            (AttentionLayer(kv_heads=8, head_dim=128, tokens_per_block=16),),
            {},
            "one number of tokens per block",
            "trtllm-v2",
        ),
        (
            "trtllm-v1",
            tuple(
                LatentLayer(latent_dim=512, side_planes=(SidePlane(role="index_key", dim=dim, format=UINT8),))
                for dim in (132, 68)
            ),
            {},
            "one index-key size, and the layers have several",
            "trtllm-v2",
        ),
        (
            "trtllm-v1",
            (GDN, RecurrentLayer(algorithm="mamba1", heads=8, state_dim=16)),
            {},
            "layers' states differ in size",
            "trtllm-v2",
        ),
        (
            "trtllm-v1",
            (RecurrentLayer(algorithm="gdn", heads=1, groups=1, state_dim=1, auxiliary=(PLE,)),),
            {},
            "no auxiliary states",
            "trtllm-v2",
        ),
        (
            "trtllm-v1",  # 1 x 1 x 1 bf16 = 2 B, then fp32 taps
            (RecurrentLayer(algorithm="gdn", heads=1, groups=1, state_dim=1, conv_format=ElementFormat.FP32),),
            {},
            "conv_state starts 2 B in a V1 state block, which is not a multiple of a fp32 element (4 B)",
            "one width",
        ),
        *(
            (
                allocator,
                (GDN,),
                {"parallel": ParallelLayout(tp=3)},
                "32 recurrent heads do not divide over 3 ranks",
                "32",
            )
            for allocator in ("trtllm-v1", "trtllm-v2")
        ),
        (
            "trtllm-v2",  # 3 heads of 2 and 2 groups of 1: 10 channels
            (RecurrentLayer(algorithm="mamba2", heads=3, head_dim=2, groups=2, state_dim=1),),
            {"parallel": ParallelLayout(tp=3)},
            "10 recurrent convolution channels do not divide over 3 ranks",
            "attention-DP",
        ),
        (
            "trtllm-v2",  # context parallelism shares the states' heads as well
            (RecurrentLayer(algorithm="short_conv", heads=6),),
            {"parallel": ParallelLayout(tp=2, cp=2)},
            "6 recurrent heads do not divide over 4 ranks",
            "attention-DP",
        ),
        (
            "trtllm-v2",  # a slot of 131072 B needs one chunk of 2 MiB
            (DENSE,),
            {"slots": None, "quota_bytes": (2 << 20) - 1},
            "a quota of 2097151 B holds 0 chunks of 2097152 B, but one slot per life cycle needs 1",
            "at least 2097152 B",
        ),
        (
            "trtllm-v1",
            (DENSE,),
            {"slots": None, "quota_bytes": 131071},
            "leaves no block for one of 1 block managers (a block of each takes 131072 B)",
            "larger quota",
        ),
    ],
)
def test_refusing_what_lies_outside_is_the_allocators_right(
    allocator: str, layers: tuple[Layer, ...], settings: dict[str, Any], message: str, remedy: str
) -> None:
    error = refusal(allocator, *layers, **settings)
    assert not error.supported
    assert message in error.message
    assert remedy in error.remedy


def test_refusing_what_is_supported_is_a_fault() -> None:
    error = refusal("trtllm-v2-qsa-legacy", SPARSE, SPARSE, kv_format=NVFP4)
    assert error.supported
    assert error.message.startswith(
        "Layer 1's K page starts 24576 B into its pool slot, which is not a multiple of one layer's K/V pages (16384 B)"
    )
    assert [(where.layer, where.role) for where in error.where] == [(1, "key"), (0, "index_key")]
    assert [(where.first_byte, where.last_byte) for where in error.where] == [(24576, 32767), (16384, 24575)]


def test_attention_dp_keeps_states_whole() -> None:
    allocate(CacheSpec(layers=(GDN,), parallel=ParallelLayout(tp=3, attention_dp=True)), "trtllm-v2")
