"""The spellings of a sliding window, each resolved to one window per layer."""

from __future__ import annotations

from typing import Any

import pytest

from kvsan.model.errors import SpecError
from kvsan.model.huggingface import read_architecture
from kvsan.model.layers import AttentionLayer


def dense(model_type: str, layers: int = 6, **fields: Any) -> dict[str, Any]:
    """Return a small dense config; a field given as None is null."""
    config: dict[str, Any] = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "dtype": "bfloat16",
    }
    return config | fields


def windows(config: dict[str, Any]) -> list[int | None]:
    layers = read_architecture(config).layers
    return [layer.window for layer in layers if isinstance(layer, AttentionLayer)]


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (dense("llama"), [None] * 6),
        (dense("mistral", sliding_window=None), [None] * 6),
        (dense("mistral", sliding_window=32), [32] * 6),
        (dense("mistral", sliding_window=1 << 31), [1 << 31] * 6),  # larger than any sequence: kept as given
        (dense("mistral", sliding_window=[None, 32, 32]), [None, 32, 32] * 2),
        (dense("llama", interleaved_sliding_window=[32, None]), [32, None] * 3),
        (dense("qwen2", sliding_window=32, use_sliding_window=False, max_window_layers=2), [None] * 6),
        (dense("qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=2), [None] * 2 + [32] * 4),
        (dense("qwen3", sliding_window=32, use_sliding_window=True, max_window_layers=6), [None] * 6),
        (dense("qwen3_moe", sliding_window=32, use_sliding_window=True, max_window_layers=2), [32] * 6),
        (dense("gemma2", sliding_window=32), [32, None] * 3),
        (dense("gpt_oss", sliding_window=32), [32, None] * 3),
        (dense("gemma3_text", sliding_window=32), [32] * 5 + [None]),
        (dense("gemma3_text", sliding_window=32, sliding_window_pattern=3), [32, 32, None] * 2),
        (dense("gemma3_text", sliding_window=32, _sliding_window_pattern=2), [32, None] * 3),
        (dense("cohere2", layers=8, sliding_window=32), [32, 32, 32, None] * 2),
        (dense("cohere2", sliding_window=32, layer_switch=3), [32, 32, None] * 2),
        (dense("gemma2", sliding_window=32, layer_types=[FULL, SLIDING] * 3), [None, 32] * 3),
        (dense("foo", sliding_window=32, layer_types=["attention", SLIDING] * 3), [None, 32] * 3),
        (dense("foo", sliding_window=32), [32] * 6),
        (dense("foo", sliding_window=32, sliding_window_pattern=2), [32, None] * 3),
        (dense("foo", sliding_window=None, sliding_window_pattern=2), [None] * 6),
    ],
)
def test_windows_of_each_layer(config: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(config) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dense("gemma2"), "sliding_window: missing"),
        (dense("gemma2", layer_types=[FULL, SLIDING] * 3), "sliding_window: missing"),
        (dense("mistral", sliding_window=0), "sliding_window: found 0, needs a whole number from 1"),
        (dense("mistral", sliding_window=-1), "sliding_window: found -1"),
        (dense("mistral", sliding_window="4096"), "sliding_window: found '4096'"),
        (dense("mistral", sliding_window=True), "sliding_window: found True"),
        (dense("mistral", sliding_window=4096.0), "sliding_window: found 4096.0"),
        (dense("mistral", sliding_window=[]), "sliding_window: found an empty list"),
        (dense("mistral", sliding_window=[32, 0]), "sliding_window[1]: found 0"),
        (dense("mistral", sliding_window=[32, "x"]), "sliding_window[1]: found 'x'"),
        (dense("qwen2", sliding_window=32, use_sliding_window=1), "use_sliding_window: found 1, needs true or false"),
        (dense("qwen2", sliding_window=32, use_sliding_window=True), "max_window_layers: missing"),
        (dense("gemma3_text", sliding_window=32, sliding_window_pattern=0), "sliding_window_pattern: found 0"),
        (dense("foo", sliding_window=32, sliding_window_pattern="LLLG"), "sliding_window_pattern: found 'LLLG'"),
        (dense("foo", sliding_window=32, max_window_layers=2), "layer_types: missing"),
        (dense("foo", sliding_window=32, layer_types=[FULL] * 5), "layer_types: found 5 entries, needs 6"),
        (dense("foo", sliding_window=32, layer_types=[FULL] * 5 + [3]), "layer_types[5]: found 3"),
        (dense("foo", layer_types=[]), "layer_types: found an empty list"),
        (dense("foo", layer_types=FULL), "layer_types: found 'full_attention', needs a list"),
        (
            dense("qwen2", sliding_window=32, use_sliding_window=False, layer_types=[FULL, SLIDING] * 3),
            "use_sliding_window: found false, needs true",
        ),
    ],
)
def test_wrong_windows_are_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_architecture(config)
    assert words in str(caught.value)


def test_the_source_of_a_pattern_is_said() -> None:
    own = read_architecture(dense("gemma2", sliding_window=32)).inferred
    given = read_architecture(dense("gemma3_text", sliding_window=32, sliding_window_pattern=3)).inferred
    everywhere = read_architecture(dense("mistral", sliding_window=32)).inferred
    assert own == ("layer_types is absent: as usual in this family, of every 2 layers the last is full.",)
    assert given == (
        "layer_types is absent: of every 3 layers (sliding_window_pattern) the last is full, the others slide.",
    )
    assert everywhere == ("layer_types is absent: sliding_window, 32 tokens, is taken to hold for every layer.",)
    assert read_architecture(dense("llama")).inferred == ()
