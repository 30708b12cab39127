"""The shipped example: 48 layers, every fourth one attention with QSA's side planes, the others gated delta nets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.huggingface import read_architecture
from kvsan.model.layers import AttentionLayer, Layer, RecurrentLayer, SidePlane

EXAMPLE = "examples/qwen3.8-flash-next/config.json"

GDN = RecurrentLayer(algorithm="gdn", heads=32, head_dim=128, groups=16, state_dim=128, conv_kernel=4)
QSA = AttentionLayer(
    kv_heads=2,
    head_dim=256,
    side_planes=(
        SidePlane(role="index_key", heads=1, dim=128, format=ElementFormat.BF16),
        SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank"),
    ),
)


def planes_of(layer: Layer) -> tuple[SidePlane, ...]:
    assert isinstance(layer, AttentionLayer)
    return layer.side_planes


@pytest.fixture
def config(root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((root / EXAMPLE).read_text("utf-8"))
    return loaded


def test_the_folder_and_the_file_and_the_dict_are_one(root: Path, config: dict[str, Any]) -> None:
    architecture = read_architecture(root / EXAMPLE)
    assert read_architecture(str((root / EXAMPLE).parent)) == architecture
    assert read_architecture(config) == architecture


def test_the_reference_case(root: Path) -> None:
    architecture = read_architecture(root / EXAMPLE)
    assert architecture.name == "qwen3_8_flash_next"
    assert architecture.layers == tuple(QSA if index % 4 == 3 else GDN for index in range(48))
    assert sum(layer == QSA for layer in architecture.layers) == 12
    assert architecture.draft_layers == (QSA,)
    assert architecture.sparse_algorithm == "qsa"
    assert architecture.model_format == ElementFormat.BF16
    assert architecture.state_format == ElementFormat.FP32
    assert architecture.max_sequence_tokens is None


def test_the_planes_have_the_published_sizes(root: Path) -> None:
    index_key, position = planes_of(read_architecture(root / EXAMPLE).draft_layers[0])
    # A page of 32 tokens: 8192 bytes of index keys, 384 of positions.
    assert (index_key.token_bytes * 32, position.token_bytes * 32) == (8192, 384)


def test_layer_types_say_the_same_as_the_interval(config: dict[str, Any]) -> None:
    expected = read_architecture(config).layers
    del config["full_attention_interval"]
    config["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * 12
    assert read_architecture(config).layers == expected


def test_other_planes_are_read(config: dict[str, Any]) -> None:
    config["sparse_attention_config"] = {
        "algorithm": "qsa",
        "index_head_dim": 64,
        "index_kv_heads": 2,
        "index_dtype": "fp8",
        "position_axes": 1,
    }
    index_key, position = planes_of(read_architecture(config).draft_layers[0])
    assert (index_key.heads, index_key.dim, index_key.format) == (2, 64, ElementFormat.FP8)
    assert position.dim == 1


def test_absent_plane_fields_are_concluded_aloud(config: dict[str, Any]) -> None:
    config["sparse_attention_config"] = {"algorithm": "qsa", "index_head_dim": 128}
    architecture = read_architecture(config)
    assert architecture.layers[3] == QSA
    for name in ("index_kv_heads is absent: taken as 1", "position_axes is absent: taken as 3"):
        assert f"sparse_attention_config.{name}." in architecture.inferred
    assert "sparse_attention_config.index_dtype is absent: taken as bf16." in architecture.inferred


@pytest.mark.parametrize(
    ("sparse", "words"),
    [
        ({"algorithm": "dsa", "index_head_dim": 128}, "sparse_attention_config.algorithm: found 'dsa'"),
        ({"algorithm": "qsa"}, "index_head_dim: missing in sparse_attention_config"),
        ({"algorithm": "qsa", "index_head_dim": 0}, "sparse_attention_config.index_head_dim: found 0"),
        (
            {"algorithm": "qsa", "index_head_dim": 128, "index_dtype": "nvfp4"},
            "sparse_attention_config.index_dtype: found 'nvfp4'",
        ),
        ([], "sparse_attention_config: found a list of 0, needs an object"),
        (None, "sparse_attention_config: missing"),
    ],
)
def test_a_wrong_sparse_config_is_named(config: dict[str, Any], sparse: object, words: str) -> None:
    config["sparse_attention_config"] = sparse
    with pytest.raises(SpecError) as caught:
        read_architecture(config)
    assert words in str(caught.value)
