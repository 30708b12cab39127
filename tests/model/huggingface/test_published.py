"""Configs as published with their models: the layers of each, from the model's own documentation.

The expected values are typed here by hand, not taken from the loader. A layer is written short: ``full(8, 128)`` is
attention with 8 K/V heads of 128, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.huggingface import read_architecture
from kvsan.model.layers import (
    AttentionLayer,
    HybridLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    SidePlane,
    UncachedLayer,
)


def full(kv_heads: int, head_dim: int, window: int | None = None) -> AttentionLayer:
    return AttentionLayer(kv_heads=kv_heads, head_dim=head_dim, window=window)


def mamba1(channels: int, state: int, taps: int = 4) -> RecurrentLayer:
    return RecurrentLayer(algorithm="mamba1", heads=channels, state_dim=state, conv_kernel=taps)


def mamba2(heads: int, dim: int, groups: int, state: int, taps: int = 4) -> RecurrentLayer:
    return RecurrentLayer(
        algorithm="mamba2", heads=heads, head_dim=dim, groups=groups, state_dim=state, conv_kernel=taps
    )


MLA = LatentLayer(latent_dim=512, rope_dim=64)
DSA = LatentLayer(
    latent_dim=512, rope_dim=64, side_planes=(SidePlane(role="index_key", dim=132, format=ElementFormat.UINT8),)
)
GDN = RecurrentLayer(algorithm="gdn", heads=32, head_dim=128, groups=16, state_dim=128, conv_kernel=4)
KDA = RecurrentLayer(algorithm="kda", heads=32, head_dim=128, groups=32, state_dim=128, conv_kernel=4)
SHORT = RecurrentLayer(algorithm="short_conv", heads=1024, conv_kernel=3)
ZAMBA2 = mamba2(80, 64, 1, 64)
ZAMBA2_7B = mamba2(112, 64, 2, 64)
FALCON_H1 = HybridLayer(attention=full(2, 64), recurrent=mamba2(24, 64, 1, 128))

Pattern = Callable[[int], Layer]


def always(layer: Layer) -> Pattern:
    return lambda index: layer


def at(indices: tuple[int, ...], there: Layer, elsewhere: Layer) -> Pattern:
    return lambda index: there if index in indices else elsewhere


def every(period: int, last: Layer, others: Layer) -> Pattern:
    return lambda index: others if (index + 1) % period else last


def nemotron(attention: tuple[int, ...], mamba: tuple[int, ...], kv: Layer, state: Layer) -> Pattern:
    return lambda index: kv if index in attention else state if index in mamba else UncachedLayer()


# name: (layers, what each one is, draft layers)
EXPECTED: dict[str, tuple[int, Pattern, tuple[Layer, ...]]] = {
    "llama-3.1-8b": (32, always(full(8, 128)), ()),
    "mistral-7b-v0.1": (32, always(full(8, 128, 4096)), ()),
    "mistral-7b-v0.3": (32, always(full(8, 128)), ()),
    "qwen2.5-7b": (28, always(full(4, 128)), ()),
    "qwen3-8b": (36, always(full(8, 128)), ()),
    "qwen3-30b-a3b": (48, always(full(4, 128)), ()),
    "qwen3-next-80b-a3b": (48, every(4, full(2, 256), GDN), ()),
    "gemma-2-9b": (42, every(2, full(8, 256), full(8, 256, 4096)), ()),
    "gemma-3-1b-it": (26, every(6, full(1, 256), full(1, 256, 512)), ()),
    "gemma-3-4b-it": (34, every(6, full(4, 256), full(4, 256, 1024)), ()),
    "gpt-oss-20b": (24, every(2, full(8, 64), full(8, 64, 128)), ()),
    "phi-3-mini-4k": (32, always(full(32, 96, 2047)), ()),
    "deepseek-v2-lite": (27, always(MLA), ()),
    "deepseek-v3": (61, always(MLA), (MLA,)),
    "deepseek-v3.2": (61, always(DSA), (DSA,)),
    "nemotron-h-8b": (
        52,
        nemotron(
            (7, 18, 29, 40),
            (0, 2, 4, 6, 9, 11, 13, 15, 17, 20, 22, 24, 26, 28, 31, 33, 35, 37, 39, 42, 44, 46, 48, 50),
            full(8, 128),
            mamba2(128, 64, 8, 128),
        ),
        (),
    ),
    "nemotron-3-nano-30b": (
        52,
        nemotron(
            (5, 12, 19, 26, 33, 42),
            (0, 2, 4, 7, 9, 11, 14, 16, 18, 21, 23, 25, 28, 30, 32, 35, 37, 39, 41, 44, 46, 48, 50),
            full(2, 128),
            mamba2(64, 64, 8, 128),
        ),
        (),
    ),
    "mamba-2.8b": (64, always(mamba1(5120, 16)), ()),
    "falcon-mamba-7b": (64, always(mamba1(8192, 16)), ()),
    "mamba-codestral-7b": (64, always(mamba2(128, 64, 8, 128)), ()),
    "jamba-v0.1": (32, at((4, 12, 20, 28), full(8, 128), mamba1(8192, 16)), ()),
    "bamba-9b": (32, at((9, 18, 27), full(8, 128), mamba2(128, 64, 1, 128)), ()),
    "falcon-h1-0.5b": (36, always(FALCON_H1), ()),
    "zamba2-2.7b": (
        54,
        at(
            (6, 12, 18, 24, 30, 36, 42, 47, 51),
            HybridLayer(attention=full(32, 160), recurrent=ZAMBA2),
            ZAMBA2,
        ),
        (),
    ),
    "zamba2-7b-first": (
        81,
        at(
            (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77),
            HybridLayer(attention=full(32, 224), recurrent=ZAMBA2_7B),
            ZAMBA2_7B,
        ),
        (),
    ),
    "granite-4.0-h-tiny": (40, at((5, 15, 25, 35), full(4, 128), mamba2(48, 64, 1, 128)), ()),
    "kimi-linear-48b-a3b": (27, at((3, 7, 11, 15, 19, 23, 26), MLA, KDA), ()),
    "glm-4.5-air": (46, always(full(8, 128)), (full(8, 128),)),
    "minimax-m2": (62, always(full(8, 128)), (full(8, 128),) * 3),
    "lfm2-350m": (16, at((2, 5, 8, 10, 12, 14), full(8, 64), SHORT), ()),
    "command-r7b-12-2024": (32, every(4, full(8, 128), full(8, 128, 4096)), ()),
}


def test_every_published_config_is_expected(configs: Path) -> None:
    assert {path.stem for path in configs.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_published_layers(configs: Path, name: str) -> None:
    count, pattern, drafts = EXPECTED[name]
    architecture = read_architecture(configs / f"{name}.json")
    assert architecture.layers == tuple(pattern(index) for index in range(count))
    assert architecture.draft_layers == drafts


FORMATS = {
    "llama-3.1-8b": (ElementFormat.BF16, None),
    "gemma-2-9b": (ElementFormat.FP32, None),
    "gemma-3-4b-it": (ElementFormat.BF16, None),  # outside text_config
    "gpt-oss-20b": (None, None),
    "nemotron-h-8b": (ElementFormat.BF16, None),
    "nemotron-3-nano-30b": (ElementFormat.BF16, ElementFormat.FP32),
    "kimi-linear-48b-a3b": (ElementFormat.BF16, ElementFormat.FP32),
    "mamba-2.8b": (ElementFormat.FP32, None),
}


@pytest.mark.parametrize("name", FORMATS)
def test_published_formats(configs: Path, name: str) -> None:
    architecture = read_architecture(configs / f"{name}.json")
    assert (architecture.model_format, architecture.state_format) == FORMATS[name]


@pytest.mark.parametrize(
    ("name", "tokens"), [("llama-3.1-8b", 131072), ("kimi-linear-48b-a3b", 1048576), ("mamba-2.8b", None)]
)
def test_longest_sequence(configs: Path, name: str, tokens: int | None) -> None:
    assert read_architecture(configs / f"{name}.json").max_sequence_tokens == tokens


@pytest.mark.parametrize(
    ("name", "model", "algorithm"),
    [("deepseek-v3.2", "deepseek_v32", "dsa"), ("deepseek-v3", "deepseek_v3", None), ("gemma-3-4b-it", "gemma3", None)],
)
def test_name_and_sparse_algorithm(configs: Path, name: str, model: str, algorithm: str | None) -> None:
    architecture = read_architecture(configs / f"{name}.json")
    assert (architecture.name, architecture.sparse_algorithm) == (model, algorithm)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("llama-3.1-8b", "head_dim is absent: taken as hidden_size / num_attention_heads, 4096 / 32 = 128."),
        ("qwen2.5-7b", "use_sliding_window is false: sliding_window is ignored, every layer is full attention."),
        ("falcon-mamba-7b", "intermediate_size 8192 is not expand * hidden_size, 65536: intermediate_size holds."),
        ("gemma-3-4b-it", "text_config.head_dim is absent: taken as 256, transformers' default for gemma3_text."),
        ("gpt-oss-20b", "dtype is absent: the model's format is not known."),
        ("bamba-9b", "The state's dtype is absent: the recurrent states follow the model's dtype."),
        (
            "glm-4.5-air",
            "num_nextn_predict_layers is 1: each draft layer is taken to be like the last attention layer.",
        ),
    ],
)
def test_conclusions_are_said(configs: Path, name: str, sentence: str) -> None:
    assert sentence in read_architecture(configs / f"{name}.json").inferred


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "nemotron-3-nano-30b"])
def test_nothing_is_inferred_where_everything_is_read(configs: Path, name: str) -> None:
    assert read_architecture(configs / f"{name}.json").inferred == ()
