"""What the installed transformers writes: the default config of every family, and published configs written again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsan.model.errors import SpecError
from kvsan.model.huggingface import read_architecture
from kvsan.model.layers import AttentionLayer, HybridLayer, LatentLayer, Layer, RecurrentLayer, UncachedLayer

transformers = pytest.importorskip("transformers")

GDN = RecurrentLayer(algorithm="gdn", heads=32, head_dim=128, groups=16, state_dim=128, conv_kernel=4)


def counts(layers: tuple[Layer, ...]) -> dict[str, int]:
    """Count the layers by what they are: full or sliding attention, latent, recurrent, hybrid, uncached."""
    names: dict[str, int] = {}
    for layer in layers:
        if isinstance(layer, AttentionLayer):
            name = "full" if layer.window is None else "sliding"
        elif isinstance(layer, RecurrentLayer):
            name = layer.algorithm
        else:
            kinds = {LatentLayer: "latent", HybridLayer: "hybrid", UncachedLayer: "uncached"}
            name = kinds[type(layer)]
        names[name] = names.get(name, 0) + 1
    return names


# model_type: how many layers of which kind the default config has, K/V heads, head dim (latent: latent dim, rope dim)
DEFAULTS: dict[str, tuple[dict[str, int], tuple[int, int] | None]] = {
    "llama": ({"full": 32}, (32, 128)),
    "mistral": ({"sliding": 32}, (8, 128)),
    "qwen2": ({"full": 32}, (32, 128)),
    "qwen3": ({"full": 32}, (32, 128)),
    "qwen3_moe": ({"full": 24}, (4, 64)),
    "qwen3_next": ({"full": 12, "gdn": 36}, (2, 256)),
    "gemma2": ({"full": 13, "sliding": 13}, (4, 256)),
    "gemma3_text": ({"full": 4, "sliding": 22}, (4, 256)),
    "gemma3": ({"full": 4, "sliding": 22}, (4, 256)),
    "gpt_oss": ({"full": 18, "sliding": 18}, (8, 64)),
    "phi3": ({"full": 32}, (32, 96)),
    "deepseek_v2": ({"latent": 32}, (512, 64)),
    "deepseek_v3": ({"latent": 61}, (512, 64)),
    "deepseek_v32": ({"latent": 61}, (512, 64)),
    "nemotron_h": ({"mamba2": 1, "full": 1, "uncached": 2}, (8, 128)),
    "mamba": ({"mamba1": 32}, None),
    "falcon_mamba": ({"mamba1": 32}, None),
    "mamba2": ({"mamba2": 64}, None),
    "jamba": ({"full": 4, "mamba1": 28}, (8, 128)),
    "bamba": ({"mamba2": 32}, None),
    "falcon_h1": ({"hybrid": 32}, (8, 128)),
    "zamba": ({"hybrid": 13, "mamba1": 63}, (16, 464)),
    "zamba2": ({"hybrid": 9, "mamba2": 45}, (32, 160)),
    "granitemoehybrid": ({"mamba2": 32}, None),
    "kimi_linear": ({"latent": 6, "kda": 21}, (512, 64)),
    "glm4_moe": ({"full": 46}, (8, 42)),  # 4096 / 96 rounded down, as the class itself does
    "minimax_m2": ({"full": 62}, (8, 128)),
    "lfm2": ({"full": 32}, (8, 80)),
    "cohere2": ({"full": 10, "sliding": 30}, (64, 128)),
}

DEFAULT_STATES = {
    "qwen3_next": GDN,
    "nemotron_h": RecurrentLayer(algorithm="mamba2", heads=128, head_dim=64, groups=8, state_dim=128, conv_kernel=4),
    "mamba": RecurrentLayer(algorithm="mamba1", heads=1536, state_dim=16, conv_kernel=4),
    "mamba2": RecurrentLayer(algorithm="mamba2", heads=128, head_dim=64, groups=8, state_dim=128, conv_kernel=4),
    "jamba": RecurrentLayer(algorithm="mamba1", heads=8192, state_dim=16, conv_kernel=4),
    "bamba": RecurrentLayer(algorithm="mamba2", heads=128, head_dim=64, groups=1, state_dim=256, conv_kernel=4),
    "falcon_h1": RecurrentLayer(algorithm="mamba2", heads=128, head_dim=8, groups=1, state_dim=256, conv_kernel=4),
    "zamba": RecurrentLayer(algorithm="mamba1", heads=7424, state_dim=16, conv_kernel=4),
    "zamba2": RecurrentLayer(algorithm="mamba2", heads=8, head_dim=640, groups=1, state_dim=64, conv_kernel=4),
    "kimi_linear": RecurrentLayer(algorithm="kda", heads=32, head_dim=128, groups=32, state_dim=128, conv_kernel=4),
}


def default(model_type: str) -> dict[str, Any]:
    """Return the default config of a family; skip where this version of transformers lacks the family."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config: dict[str, Any] = transformers.CONFIG_MAPPING[model_type]().to_dict()
    return config


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_default_config_loads(model_type: str) -> None:
    expected, geometry = DEFAULTS[model_type]
    architecture = read_architecture(default(model_type))
    assert counts(architecture.layers) == expected
    assert architecture.name == model_type
    for layer in architecture.layers:
        attention = layer.attention if isinstance(layer, HybridLayer) else layer
        if isinstance(attention, AttentionLayer):
            assert (attention.kv_heads, attention.head_dim) == geometry
        elif isinstance(attention, LatentLayer):
            assert (attention.latent_dim, attention.rope_dim) == geometry
    assert "dtype is absent: the model's format is not known." in architecture.inferred


@pytest.mark.parametrize("model_type", DEFAULT_STATES)
def test_default_states(model_type: str) -> None:
    layers = read_architecture(default(model_type)).layers
    states = {layer.recurrent if isinstance(layer, HybridLayer) else layer for layer in layers}
    assert {state for state in states if isinstance(state, RecurrentLayer)} == {DEFAULT_STATES[model_type]}


def test_default_drafts() -> None:
    assert len(read_architecture(default("deepseek_v3")).draft_layers) == 1
    assert len(read_architecture(default("glm4_moe")).draft_layers) == 1
    assert read_architecture(default("llama")).draft_layers == ()


def test_indexed_layers_of_the_default_dsa_config() -> None:
    architecture = read_architecture(default("deepseek_v32"))
    planes = {layer.side_planes for layer in architecture.layers if isinstance(layer, LatentLayer)}
    ((plane,),) = planes
    assert (plane.role, plane.dim, architecture.sparse_algorithm) == ("index_key", 132, "dsa")


NOT_REWRITTEN = {
    "falcon-mamba-7b": "transformers 5 recomputes intermediate_size from expand, which is wrong for this model",
    "zamba2-7b-first": "transformers 5 does not know the first spelling of Zamba2",
}


def test_both_spellings_agree(configs: Path) -> None:
    """A published config, read by its class in transformers and written again, is the same model."""
    different: list[str] = []
    compared = 0
    for path in sorted(configs.glob("*.json")):
        config = json.loads(path.read_text("utf-8"))  # accepts the bare Infinity, as transformers does
        if path.stem in NOT_REWRITTEN or config["model_type"] not in transformers.CONFIG_MAPPING:
            continue
        written = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config).to_dict()
        published, generated = read_architecture(path), read_architecture(written)
        compared += 1
        if (published.layers, published.draft_layers) != (generated.layers, generated.draft_layers):
            different.append(path.stem)
        if (published.model_format, published.sparse_algorithm) != (generated.model_format, generated.sparse_algorithm):
            different.append(f"{path.stem} (formats)")
    assert not different
    assert compared >= 25


@pytest.mark.slow  # it imports the modules of a quarter of all families
def test_any_config_of_transformers_loads_or_is_refused_in_a_line() -> None:
    loaded = refused = 0
    for model_type in sorted(transformers.CONFIG_MAPPING)[::4]:
        try:
            config = transformers.CONFIG_MAPPING[model_type]().to_dict()
        except Exception:  # some classes have no default config
            continue
        message = ""
        try:
            read_architecture(config)
        except SpecError as error:
            message = str(error)
        assert len(message.splitlines()) <= 1
        assert len(message) < 500
        loaded += not message
        refused += bool(message)
    assert loaded > 30
    assert refused > 30
