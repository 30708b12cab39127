from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import (
    AttentionLayer,
    AuxiliaryState,
    HybridLayer,
    LatentLayer,
    RecurrentLayer,
    SidePlane,
    UncachedLayer,
)

BF16, NVFP4, INT32, INT64, UINT8 = (
    ElementFormat.BF16,
    ElementFormat.NVFP4,
    ElementFormat.INT32,
    ElementFormat.INT64,
    ElementFormat.UINT8,
)
PLANE = SidePlane(role="index_key", dim=128, format=BF16)
ATTENTION = AttentionLayer(kv_heads=8, head_dim=128)
RECURRENT = RecurrentLayer(algorithm="gdn", heads=32, head_dim=128, groups=16, state_dim=128)
STATE = AuxiliaryState(role="ple_context", shape=(3,), format=INT64)

MAKERS: dict[str, Callable[..., Any]] = {
    "attention": lambda **changes: AttentionLayer(**{"kv_heads": 8, "head_dim": 128, **changes}),
    "latent": lambda **changes: LatentLayer(**{"latent_dim": 512, "rope_dim": 64, **changes}),
    "recurrent": lambda **changes: RecurrentLayer(
        **{"algorithm": "gdn", "heads": 32, "head_dim": 128, "groups": 16, "state_dim": 128, **changes}
    ),
    "plane": lambda **changes: SidePlane(**{"role": "index_key", "dim": 128, "format": BF16, **changes}),
    "state": lambda **changes: AuxiliaryState(**{"role": "ple", "shape": (3,), "format": INT64, **changes}),
    "hybrid": lambda **changes: HybridLayer(**{"attention": ATTENTION, "recurrent": RECURRENT, **changes}),
}
NO_NUMBER = [0, -1, 1.5, math.nan, True, "8", None, [], (), {}, 10**12, 10**400]
COUNTS = [
    ("attention", "kv_heads"),
    ("attention", "head_dim"),
    ("latent", "latent_dim"),
    ("recurrent", "heads"),
    ("recurrent", "head_dim"),
    ("recurrent", "groups"),
    ("recurrent", "state_dim"),
    ("recurrent", "conv_kernel"),
    ("plane", "heads"),
    ("plane", "dim"),
]


@pytest.mark.parametrize(("kind", "field"), COUNTS)
@pytest.mark.parametrize("value", NO_NUMBER, ids=repr)
def test_counts_are_positive_whole_numbers(kind: str, field: str, value: object) -> None:
    with pytest.raises(SpecError) as caught:
        MAKERS[kind](**{field: value})
    message = str(caught.value)
    assert field in message.split(":")[0]
    assert "found " in message
    assert ", needs a whole number from " in message
    assert "\n" not in message
    assert len(message) < 160


BAD = [
    ("attention", {"value_dim": -1}, "value_dim: found -1, needs a whole number from 1 to 1048576"),
    ("attention", {"window": 0}, "window: found 0, needs a whole number from 1 to 2147483648"),
    ("attention", {"window": 8, "sink_tokens": -1}, "sink_tokens: found -1, needs a whole number from 0"),
    ("attention", {"sink_tokens": 4}, "sink_tokens: found 4 without a window, needs a window or 0 sink tokens"),
    ("latent", {"sink_tokens": 4}, "sink_tokens: found 4 without a window"),
    ("attention", {"kv_format": INT32}, "kv_format: found 'int32', needs one of fp32, fp16, bf16"),
    ("attention", {"kv_format": "bf16"}, "kv_format: found 'bf16', needs one of fp32, fp16, bf16"),
    ("latent", {"kv_format": UINT8}, "kv_format: found 'uint8'"),
    ("attention", {"tokens_per_block": 0}, "tokens_per_block: found 0, needs a whole number from 1"),
    (
        "attention",
        {"side_planes": (PLANE, PLANE)},
        "side_planes: found roles index_key, index_key, needs each role once",
    ),
    ("attention", {"side_planes": ("index_key",)}, "side_planes[0]: found 'index_key', needs"),
    ("attention", {"side_planes": "index_key"}, "side_planes: found 'index_key', needs"),
    ("attention", {"side_planes": None}, "side_planes: found None, needs"),
    ("latent", {"rope_dim": -1}, "rope_dim: found -1, needs a whole number from 0"),
    ("plane", {"role": ""}, "side_planes.role: found '', needs a name of letters, digits and underscores"),
    ("plane", {"role": "two words"}, "side_planes.role: found 'two words'"),
    ("plane", {"role": "x" * 65}, "side_planes.role: found 'xxxx"),
    ("plane", {"role": 3}, "side_planes.role: found 3"),
    ("plane", {"role": "key"}, "side_planes.role: 'key' is a standard role, needs a role of its own"),
    ("plane", {"role": "value_block_scale"}, "is a standard role"),
    ("plane", {"format": NVFP4}, "side_planes.format: found"),
    ("plane", {"format": "bf16"}, "side_planes.format: found 'bf16', needs"),
    ("plane", {"scope": "model"}, "side_planes.scope: found 'model', needs one of layer, rank"),
    ("state", {"role": "conv_state"}, "auxiliary.role: 'conv_state' is a standard role"),
    ("state", {"shape": ()}, "auxiliary.shape: found 0 axes, needs 1 to 4"),
    ("state", {"shape": (1, 1, 1, 1, 1)}, "auxiliary.shape: found 5 axes, needs 1 to 4"),
    ("state", {"shape": (3, 0)}, "found 0, needs a whole number from 1"),
    ("state", {"shape": 3}, "auxiliary.shape: found 3, needs"),
    ("state", {"format": NVFP4}, "auxiliary.format: found"),
    ("recurrent", {"algorithm": "lstm"}, "algorithm: found 'lstm', needs one of mamba1, mamba2, gdn, kda, short_conv"),
    ("recurrent", {"algorithm": "mamba1"}, "groups: found 16, needs a whole number from 0 to 0"),
    ("recurrent", {"algorithm": "short_conv", "groups": 0}, "state_dim: found 128, needs a whole number from 0 to 0"),
    ("recurrent", {"conv_kernel": 1}, "conv_kernel: found 1, needs a whole number from 2 to 1024"),
    ("recurrent", {"ssm_format": ElementFormat.FP8}, "ssm_format: found 'fp8', needs one of fp32, fp16, bf16"),
    ("recurrent", {"conv_format": "bf16"}, "conv_format: found 'bf16', needs one of fp32, fp16, bf16"),
    (
        "recurrent",
        {"auxiliary": (STATE, STATE)},
        "auxiliary: found roles ple_context, ple_context, needs each role once",
    ),
    ("recurrent", {"auxiliary": (PLANE,)}, "auxiliary[0]: found SidePlane("),
    ("hybrid", {"attention": RECURRENT}, "attention: found RecurrentLayer("),
    ("hybrid", {"recurrent": None}, "recurrent: found None"),
]


BAD_IDS = [f"{kind}-{next(iter(changes))}-{at}" for at, (kind, changes, _) in enumerate(BAD)]


@pytest.mark.parametrize(("kind", "changes", "words"), BAD, ids=BAD_IDS)
def test_a_bad_value_names_field_found_and_needed(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        MAKERS[kind](**changes)
    message = str(caught.value)
    assert words in message
    assert "needs" in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("kind", MAKERS)
def test_unknown_fields_are_refused(kind: str) -> None:
    with pytest.raises(TypeError, match="heds"):
        MAKERS[kind](heds=3)


@pytest.mark.parametrize("kind", MAKERS)
def test_layers_are_values(kind: str) -> None:
    one, other = MAKERS[kind](), MAKERS[kind]()
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(AttributeError):
        one.kv_heads = 3


def test_a_value_dim_has_one_spelling() -> None:
    assert AttentionLayer(kv_heads=8, head_dim=128) == AttentionLayer(kv_heads=8, head_dim=128, value_dim=128)
    assert AttentionLayer(kv_heads=8, head_dim=128).value_dim == 128


def test_a_list_is_as_good_as_a_tuple() -> None:
    listed = AttentionLayer(kv_heads=8, head_dim=128, side_planes=[PLANE])  # type: ignore[arg-type]
    assert listed == AttentionLayer(kv_heads=8, head_dim=128, side_planes=(PLANE,))
    assert hash(listed) == hash(AttentionLayer(kv_heads=8, head_dim=128, side_planes=(PLANE,)))


def test_limits_are_accepted() -> None:
    AttentionLayer(kv_heads=1, head_dim=1, window=1, tokens_per_block=1)
    AttentionLayer(kv_heads=1 << 20, head_dim=1 << 20, window=1 << 31, sink_tokens=1 << 31)
    RecurrentLayer(algorithm="kda", heads=1, groups=1, state_dim=1, conv_kernel=2)
    AuxiliaryState(role="x", shape=(1, 1, 1, 1), format=UINT8)
    SidePlane(role="x" * 64, dim=1, format=INT64)
    UncachedLayer()


@pytest.mark.parametrize(
    ("plane", "token_bytes"),
    [
        (PLANE, 256),
        (SidePlane(role="position", dim=3, format=INT32, scope="rank"), 12),
        (SidePlane(role="index_key", dim=132, format=UINT8), 132),
        (SidePlane(role="index_key", dim=128, format=BF16, heads=4), 1024),
    ],
)
def test_bytes_of_a_side_plane(plane: SidePlane, token_bytes: int) -> None:
    assert plane.token_bytes == token_bytes


def test_derived_numbers() -> None:
    assert LatentLayer(latent_dim=512, rope_dim=64).row_dim == 576
    assert RECURRENT.conv_channels == 32 * 128 + 2 * 16 * 128 == 8192
    assert RecurrentLayer(algorithm="mamba1", heads=1536, state_dim=16).conv_channels == 1536
    assert RecurrentLayer(algorithm="short_conv", heads=2048).conv_channels == 2048
