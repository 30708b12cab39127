"""Single fields: what is missing, of the wrong type, out of range, contradictory; and what is concluded instead."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvsan.model.architecture import Architecture
from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.huggingface import read_architecture
from kvsan.model.layers import AttentionLayer, LatentLayer, UncachedLayer

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 512,
    "dtype": "bfloat16",
}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def refusal(source: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        read_architecture(source)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 500
    return caught.value


def published(configs: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((configs / f"{name}.json").read_text("utf-8"))
    return loaded


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({}, "num_hidden_layers, num_attention_heads, head_dim or hidden_size"),
        (without(LLAMA, "hidden_size"), "head_dim or hidden_size"),
        (without(LLAMA, "num_hidden_layers"), "num_hidden_layers"),
        (without(LLAMA, "num_attention_heads", "num_hidden_layers"), "num_hidden_layers, num_attention_heads"),
        (LLAMA | {"num_hidden_layers": None}, "num_hidden_layers"),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 2}, "kv_lora_rank, qk_rope_head_dim"),
        ({"model_type": "mamba", "state_size": 16}, "num_hidden_layers, expand, hidden_size, conv_kernel"),
        ({"model_type": "mamba", "state_size": 16, "intermediate_size": 8}, "num_hidden_layers, conv_kernel"),
        (
            {"model_type": "nemotron_h", "head_dim": 128, "num_attention_heads": 8, "mamba_num_heads": 8},
            (
                "layers_block_type or layer_types or hybrid_override_pattern, mamba_head_dim, ssm_state_size,"
                " n_groups or mamba_n_groups, conv_kernel or mamba_d_conv"
            ),
        ),
    ],
)
def test_exactly_the_missing_fields_are_listed(config: dict[str, Any], missing: str) -> None:
    error = refusal(config)
    assert error.field == missing
    assert error.problem.startswith("missing, needs")


def test_missing_fields_of_a_text_config_say_where() -> None:
    error = refusal({"model_type": "x", "text_config": {"model_type": "llama", "num_hidden_layers": 2}})
    assert str(error) == "num_attention_heads, head_dim or hidden_size: missing in text_config, needs values"


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"])
@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("32", "'32'"),
        (32.0, "32.0"),
        (True, "True"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (0, "0"),
        (-8, "-8"),
        (10**12, "1000000000000"),
        (10**5000, "a whole number of 16610 bits"),
        ([32], "a list of 1"),
        ({}, "an object"),
        ("x" * 10**6, "'xxx"),
        ("a\nb", r"'a\nb'"),
    ],
    ids=["text", "float", "true", "nan", "inf", "zero", "negative", "large", "huge", "list", "object", "long", "lines"],
)
def test_a_wrong_number_is_named(name: str, value: object, found: str) -> None:
    error = refusal(LLAMA | {name: value})
    assert error.field == name
    assert error.problem.startswith(f"found {found}")
    assert "needs a whole number from 1 to" in error.problem


def test_absurd_layer_counts_cost_nothing(configs: Path) -> None:
    started = time.perf_counter()
    for path in sorted(configs.glob("*.json")):
        config = json.loads(path.read_text("utf-8"))
        text = config.get("text_config", config)
        text["num_hidden_layers"] = 10**12
        assert refusal(config).field.endswith("num_hidden_layers")
        text["num_hidden_layers"] = 10_001
        assert "from 1 to 10000" in str(refusal(config))
    assert time.perf_counter() - started < 5


def test_ten_thousand_layers_are_allowed() -> None:
    assert len(read_architecture(LLAMA | {"num_hidden_layers": 10_000}).layers) == 10_000


def one_layer(config: dict[str, Any]) -> AttentionLayer:
    layer = read_architecture(config).layers[0]
    assert isinstance(layer, AttentionLayer)
    return layer


@pytest.mark.parametrize("config", [LLAMA | {"num_key_value_heads": None}, without(LLAMA, "num_key_value_heads")])
def test_kv_heads_default_to_attention_heads(config: dict[str, Any]) -> None:
    assert one_layer(config).kv_heads == 8
    assert "num_key_value_heads is absent: taken as num_attention_heads, 8." in read_architecture(config).inferred


def test_head_dim_wins_over_hidden_size() -> None:
    assert one_layer(LLAMA | {"head_dim": 128}).head_dim == 128
    assert one_layer(LLAMA | {"head_dim": None}).head_dim == 64


def test_head_dim_is_rounded_down_aloud() -> None:
    config = LLAMA | {"hidden_size": 515}
    assert one_layer(config).head_dim == 64
    assert "515 / 8 = 64, rounded down as transformers does." in " ".join(read_architecture(config).inferred)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads: found 3, needs a divisor of num_attention_heads, 8"),
        ({"hidden_size": 7}, "hidden_size: found 7, needs at least num_attention_heads, 8"),
        ({"dtype": "complex12"}, "dtype: unknown element format 'complex12', needs one of fp32"),
        ({"dtype": 16}, "dtype: found 16, needs the name of a dtype"),
        ({"dtype": "int32"}, "dtype: found 'int32', needs one of fp32"),
        ({"torch_dtype": "x"}, "torch_dtype: unknown element format 'x'"),
        ({"model_type": 3}, "model_type: found 3, needs a string"),
        ({"model_type": ""}, "model_type: found '', needs a string"),
        ({"max_position_embeddings": "8k"}, "max_position_embeddings: found '8k'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: found 0"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers: found -1"),
        ({"kv_channels": 128}, "kv_channels: found 128, needs the head_dim, 64"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers: found 2, needs fewer than the 2 layers"),
        ({"text_config": 3}, "text_config: found 3, needs an object"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], words: str) -> None:
    assert words in str(refusal(LLAMA | fields))


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({"dtype": "float16"}, ElementFormat.FP16),
        ({"dtype": "torch.float32"}, ElementFormat.FP32),
        ({"dtype": None, "torch_dtype": "float16"}, ElementFormat.FP16),
        ({"dtype": None}, None),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, ElementFormat.BF16),
    ],
)
def test_dtypes(spelling: dict[str, Any], expected: ElementFormat | None) -> None:
    assert read_architecture(LLAMA | spelling).model_format == expected


def test_contradicting_dtypes_are_said() -> None:
    config = {"dtype": "float32", "model_type": "x", "text_config": LLAMA}
    architecture = read_architecture(config)
    assert architecture.model_format == ElementFormat.BF16
    assert "Several dtypes are given (bf16, fp32): that of the text model, bf16, holds." in architecture.inferred


def test_the_text_model_of_a_multimodal_config() -> None:
    text = without(LLAMA, "dtype", "model_type")
    outer = {"model_type": "mistral3", "torch_dtype": "float16", "vision_config": {"num_hidden_layers": 99}}
    for name in ("text_config", "llm_config", "language_config"):
        architecture = read_architecture(outer | {name: text})
        assert (len(architecture.layers), architecture.model_format) == (2, ElementFormat.FP16)
    nested = read_architecture(outer | {"thinker_config": {"text_config": LLAMA}})
    assert len(nested.layers) == 2
    error = refusal(outer | {"text_config": text | {"num_attention_heads": "8"}})
    assert error.field == "text_config.num_attention_heads"


def test_a_config_that_contains_itself_ends() -> None:
    config: dict[str, Any] = dict(LLAMA)
    config["text_config"] = config
    assert isinstance(read_architecture(config), Architecture)


def test_shared_layers_are_uncached() -> None:
    architecture = read_architecture(LLAMA | {"num_hidden_layers": 5, "num_kv_shared_layers": 2})
    assert architecture.layers[3:] == (UncachedLayer(), UncachedLayer())
    assert architecture.layers[:3] == (AttentionLayer(kv_heads=4, head_dim=64),) * 3
    assert any(sentence.startswith("num_kv_shared_layers is 2") for sentence in architecture.inferred)


def test_value_heads_of_another_width() -> None:
    layer = one_layer(LLAMA | {"v_head_dim": 32})
    assert (layer.head_dim, layer.value_dim) == (64, 32)


def test_generic_families_say_so() -> None:
    dense = read_architecture(LLAMA | {"model_type": "brand_new"})
    assert dense.layers == read_architecture(LLAMA).layers
    assert "model_type brand_new is no known family: read as dense attention" in dense.inferred[0]
    latent = read_architecture({**LLAMA, "model_type": "new", "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert latent.layers == (LatentLayer(latent_dim=512, rope_dim=64),) * 2
    assert "read as latent attention as it has kv_lora_rank" in " ".join(latent.inferred)
    assert "no model_type is no known family" in read_architecture(without(LLAMA, "model_type")).inferred[0]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"ssm_state_size": 16}, "ssm_state_size"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads"),
        ({"linear_attn_config": {"num_heads": 1}}, "linear_attn_config"),
        ({"conv_L_cache": 3}, "conv_L_cache"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types[0]"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "layer_types[0]"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers_block_type"),
        ({"attn_type_list": [1, 0]}, "attn_type_list[1]"),
        ({"full_attention_interval": 4}, "full_attention_interval"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers"),
        ({"encoder_layers": 6}, "encoder_layers"),
        ({"type_vocab_size": 2}, "type_vocab_size"),
        ({"architectures": ["EsmForMaskedLM"]}, "architectures"),
        ({"global_head_dim": 512}, "global_head_dim"),
        ({"per_layer_config": {"05": {"head_dim": 512}}}, "per_layer_config"),
        ({"swa_num_key_value_heads": 8}, "swa_num_key_value_heads"),
        ({"num_kv_heads": 8}, "num_kv_heads"),
        ({"multi_query": True}, "multi_query"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"sparse_attention_config": {"algorithm": "qsa"}}, "sparse_attention_config"),
        ({"index_topk": 2048}, "index_topk"),
        ({"compress_ratios": [4]}, "compress_ratios"),
        ({"use_cla": True}, "use_cla"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_signs_of_something_else_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    assert refusal(LLAMA | {"model_type": "brand_new"} | fields).field == name


@pytest.mark.parametrize(
    "fields",
    [
        {"is_encoder_decoder": False, "is_decoder": False, "cross_attention_hidden_size": None},
        {"add_cross_attention": False, "encoder_no_repeat_ngram_size": 0, "pruned_heads": {}},
        {"decoder_sparse_step": 1, "num_shared_experts": 2, "attn_type_list": [1, 1], "multi_query": False},
        {"shared_intermediate_size": 8, "mlp_layer_types": ["dense", "sparse"], "query_pre_attn_scalar": 256},
    ],
)
def test_harmless_fields_are_no_signs(fields: dict[str, Any]) -> None:
    assert read_architecture(LLAMA | fields).layers == read_architecture(LLAMA).layers


def test_a_quantized_cache_is_left_to_the_deployment() -> None:
    config = LLAMA | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    assert any("kv_cache_scheme is not applied" in sentence for sentence in read_architecture(config).inferred)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("nemotron-h-8b", {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern[2]: found 'X', needs one of M"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M-*"}, "found 3 layers, needs 52 as num_hidden_layers says"),
        ("nemotron-h-8b", {"mamba_ssm_cache_dtype": "float8"}, "mamba_ssm_cache_dtype: unknown element format"),
        ("nemotron-h-8b", {"mamba_ssm_cache_dtype": "fp8"}, "found 'fp8', needs one of fp32, fp16, bf16"),
        ("nemotron-h-8b", {"sliding_window": 4096}, "sliding_window: found 4096, needs null"),
        ("jamba-v0.1", {"attn_layer_offset": 8}, "attn_layer_offset: found 8, needs a whole number from 0 to 7"),
        ("jamba-v0.1", {"mamba_expand": 1024}, "mamba_expand * hidden_size: found 4194304"),
        (
            "bamba-9b",
            {"attn_layer_indices": [32]},
            "attn_layer_indices[0]: found 32, needs a layer number from 0 to 31",
        ),
        ("bamba-9b", {"attn_layer_indices": [9, 9]}, "attn_layer_indices: found a layer number twice"),
        ("bamba-9b", {"mamba_d_head": 32}, "mamba_n_heads: found 128 heads of 32, needs heads that fill the 8192"),
        ("bamba-9b", {"mamba_d_conv": 1}, "mamba_d_conv: found 1, needs a whole number from 2"),
        ("mamba-codestral-7b", {"num_heads": 64}, "num_heads: found 64 heads of 64, needs heads that fill the 8192"),
        (
            "kimi-linear-48b-a3b",
            {"linear_attn_config": {"num_heads": 2}},
            "head_dim, short_conv_kernel_size: missing in",
        ),
        ("lfm2-350m", {"full_attn_idxs": [16]}, "full_attn_idxs[0]: found 16"),
        ("zamba2-2.7b", {"layers_block_type": None, "hybrid_layer_ids": [54]}, "hybrid_layer_ids[0]: found 54"),
        ("deepseek-v3.2", {"index_head_dim": 100}, "index_head_dim: found 100, needs a multiple of 128"),
        ("deepseek-v3.2", {"index_topk_freq": 4}, "indexer_types: missing"),
        ("deepseek-v3", {"index_topk": 2048}, "index_topk: found 2048"),
        ("mamba-2.8b", {"num_nextn_predict_layers": 1}, ""),
        ("qwen3-next-80b-a3b", {"full_attention_interval": 0}, "full_attention_interval: found 0"),
    ],
)
def test_wrong_fields_of_families(configs: Path, name: str, fields: dict[str, Any], words: str) -> None:
    config = published(configs, name) | fields
    if not words:  # a field that the family does not read
        assert len(read_architecture(config).layers) == 64
    else:
        assert words in str(refusal(config))


def test_kimi_layer_numbers_count_from_one(configs: Path) -> None:
    config = published(configs, "kimi-linear-48b-a3b")
    linear = config["linear_attn_config"]
    linear["kda_layers"][0] = 0
    assert "kda_layers[0]: found 0, needs a layer number from 1 to 27" in str(refusal(config))
    linear["kda_layers"][0] = 4
    assert "kda_layers: needs each layer from 1 to 27 once" in str(refusal(config))


def test_auto_head_dim_of_mamba(configs: Path) -> None:
    config = published(configs, "bamba-9b")
    expected = read_architecture(config).layers
    for value in ("auto", None):
        architecture = read_architecture(config | {"mamba_d_head": value})
        assert architecture.layers == expected
        assert "mamba_d_head is not given: taken as inner channels / mamba_n_heads, 8192 / 128 = 64." in (
            architecture.inferred
        )


def test_draft_patterns_of_nemotron(configs: Path) -> None:
    config = published(configs, "nemotron-3-nano-30b") | {"num_nextn_predict_layers": 2}
    attention = AttentionLayer(kv_heads=2, head_dim=128)
    assert read_architecture(config).draft_layers == (attention, attention)
    for pattern in ({"mtp_hybrid_override_pattern": "*E"}, {"mtp_layers_block_type": ["attention", "moe"]}):
        assert read_architecture(config | pattern).draft_layers == (attention, UncachedLayer()) * 2


def test_layers_that_share_an_indexer_have_no_index_plane(configs: Path) -> None:
    config = published(configs, "deepseek-v3.2")
    indexed = read_architecture(config).layers[0]
    config["indexer_types"] = ["full"] + ["shared"] * 60
    architecture = read_architecture(config)
    assert architecture.layers == (indexed, *(LatentLayer(latent_dim=512, rope_dim=64),) * 60)
    assert architecture.draft_layers == (indexed,)
