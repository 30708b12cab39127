"""Mutated configs and bytes: the answer is an architecture or one readable line, never anything else."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvsan.model.architecture import Architecture
from kvsan.model.errors import SpecError
from kvsan.model.huggingface import read_architecture

FOLDER = Path(__file__).parent / "configs"
CONFIGS = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))}
MODEL_TYPES = sorted({config["model_type"] for config in CONFIGS.values()})
TEXTS = {path.stem: path.read_bytes() for path in sorted(FOLDER.glob("*.json"))}


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


class Hostile:
    """A value whose every question fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no eq")

    def __bool__(self) -> bool:
        raise RuntimeError("no bool")

    __hash__ = object.__hash__


ODD_VALUES = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 2, 3, 4, 7, 64, 10_000, 10_001, 2**31, 2**64, 10**12, -(10**30), 10**5000,
        0.0, 1.5, math.nan, math.inf, -math.inf, "", "4", "auto", "mamba", "a\nb", "\u2028", "\ud800", "x" * 10_000,
        "bfloat16", "float32", "full_attention", "M*-E", [], [0], [None], ["full_attention"], ["mamba"] * 10_001,
        [1] * 52, {}, {"a": 1}, {"num_hidden_layers": 2}, (1, 2), b"x", deep(5000), Hostile(), object(),
    ]
)  # fmt: skip

NEW_KEYS = st.sampled_from(
    [
        "layer_types", "layers_block_type", "sliding_window", "use_sliding_window", "sliding_window_pattern",
        "max_window_layers", "head_dim", "num_key_value_heads", "kv_lora_rank", "text_config", "dtype",
        "torch_dtype", "mamba_ssm_dtype", "num_nextn_predict_layers", "num_kv_shared_layers", "v_head_dim",
        "sparse_attention_config", "linear_attn_config", "attn_type_list", "indexer_types", "per_layer_config",
        "interleaved_sliding_window", "quantization_config", "is_encoder_decoder", "architectures",
        "hybrid_override_pattern", "mtp_layers_block_type", "max_position_embeddings", "a\nb", "x" * 1000, "",
    ]
)  # fmt: skip


def judge(source: Any) -> str:
    """Read ``source``, check the answer, and return its kind."""
    try:
        architecture = read_architecture(source)
    except SpecError as error:
        message = str(error)
        assert len(message.splitlines()) == 1
        assert "\n" not in message
        assert len(message) < 500
        return "refused"
    assert isinstance(architecture, Architecture)
    assert 1 <= len(architecture.layers) <= 10_000
    assert len(architecture.draft_layers) <= 10_000
    return "loaded"


def odd(data: st.DataObject) -> Any:
    """Draw an odd value, as a copy that a later mutation may change."""
    value = data.draw(ODD_VALUES)
    return copy.copy(value) if isinstance(value, (dict, list)) else value


def mutate(data: st.DataObject, config: dict[str, Any]) -> None:
    """Change one key of ``config``, or of an object inside it."""
    levels = [config, *(value for value in config.values() if isinstance(value, dict) and value)]
    level = levels[data.draw(st.integers(0, len(levels) - 1))]
    choice = data.draw(st.sampled_from(["delete", "replace", "add", "entry", "family"]))
    if choice == "family":
        level["model_type"] = data.draw(st.sampled_from([*MODEL_TYPES, "new"]))
        return
    if choice == "add" or not level:
        level[data.draw(NEW_KEYS)] = odd(data)
        return
    key = data.draw(st.sampled_from(list(level)))
    if choice == "delete":
        del level[key]
    elif choice == "entry" and isinstance(level[key], list) and level[key]:
        level[key][data.draw(st.integers(0, len(level[key]) - 1))] = odd(data)
    else:
        level[key] = odd(data)


@settings(max_examples=600, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_configs(data: st.DataObject) -> None:
    config = copy.deepcopy(CONFIGS[data.draw(st.sampled_from(list(CONFIGS)))])
    for _ in range(data.draw(st.integers(1, 4))):
        mutate(data, config)
    event(judge(config))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_of_every_config_deleted_or_made_odd(name: str) -> None:
    config = CONFIGS[name]
    plain_odd: list[Any] = [None, "x", -1, 0, 1.5, True, 10**12, [], {}, [deep(3000)], Hostile()]
    kinds = set()
    levels: list[tuple[str, ...]] = [()] + [(key,) for key, value in config.items() if isinstance(value, dict)]
    for path in levels:
        level = config[path[0]] if path else config
        for key in level:
            deleted = {name: value for name, value in level.items() if name != key}
            for mutated in (deleted, *({**level, key: value} for value in plain_odd)):
                kinds.add(judge({**config, path[0]: mutated} if path else mutated))
    assert kinds == {"loaded", "refused"}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_bytes(data: st.DataObject, tmp_path: Path) -> None:
    text = bytearray(data.draw(st.sampled_from(list(TEXTS.values())), "text"))
    for _ in range(data.draw(st.integers(1, 3), "mutations")):
        at = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 8))
        pieces = st.sampled_from([b"", b"NaN", b"Infinity", b"[", b"}", b'"', b"\xff", b"\x00", b"1e999", b"null"])
        text[at : at + length] = data.draw(pieces | st.binary(max_size=4))
    path = tmp_path / "config.json"
    path.write_bytes(text)
    event(judge(path))


@settings(max_examples=50)
@given(st.text() | st.binary().map(repr))
def test_any_path_and_any_key(text: str) -> None:
    assert judge(f"/nowhere/{text}") == "refused"  # the folder is not there, so ".." leads nowhere either
    assert judge({text: text}) == "refused"
