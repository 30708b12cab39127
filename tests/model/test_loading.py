from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, RecurrentLayer
from kvsan.model.loading import Deployment, deploy, load, parallel_layout, read_source
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Consumer, Draft, encode_spec

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "float16",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "max_position_embeddings": 4096,
}
DENSE = AttentionLayer(kv_heads=2, head_dim=64)
SAVED = CacheSpec(
    model="saved",
    layers=(DENSE,) * 4,
    kv_format=ElementFormat.FP8,
    parallel=ParallelLayout(tp=2),
    rank=1,
    draft=Draft(mode="folded", layers=(DENSE,)),
    slots=9,
    state_slots=5,
    tokens_per_block=64,
    consumer=Consumer(kv_layout="NHD", alignment_bytes=16),
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "spec.json"
    path.write_bytes(encode_spec(SAVED))
    return path


def test_the_defaults() -> None:
    spec = load(CONFIG)
    assert spec == CacheSpec(
        model=spec.model,
        layers=(DENSE,) * 3,
        kv_format=ElementFormat.FP16,
        state_format=ElementFormat.FP16,
        conv_format=ElementFormat.FP16,
        tokens_per_block=32,
        max_sequence_tokens=4096,
        slots=4,
    )


def test_what_was_concluded_is_said() -> None:
    model = read_source(CONFIG)
    loaded = deploy(model, Deployment())
    assert "kv dtype fp16: the model's dtype, and none was asked for" in loaded.inferred
    asked = deploy(model, Deployment(kv_format=ElementFormat.FP8))
    assert not any("kv dtype" in sentence for sentence in asked.inferred)
    silent = {key: value for key, value in CONFIG.items() if key != "torch_dtype"}
    loaded = deploy(read_source(silent), Deployment())
    assert loaded.spec.kv_format is ElementFormat.BF16
    assert "kv dtype bf16: the model names no dtype, and none was asked for" in loaded.inferred


def test_a_deployment_in_full() -> None:
    spec = load(
        CONFIG,
        layout="tep2pp3",
        rank=5,
        kv_dtype="float8_e4m3fn",
        state_dtype="float32",
        tokens_per_block=64,
        quota_bytes=1 << 30,
        state_slots=3,
        draft="none",
        kv_layout="NHD",
        alignment_bytes=128,
    )
    assert spec.parallel == ParallelLayout(tp=2, ep=2, pp=3)
    assert (spec.rank, spec.tokens_per_block, spec.slots, spec.quota_bytes, spec.state_slots) == (
        5,
        64,
        None,
        1 << 30,
        3,
    )
    assert (spec.kv_format, spec.state_format) == (ElementFormat.FP8, ElementFormat.FP32)
    assert spec.conv_format is ElementFormat.FP16  # the convolution state keeps the model's dtype
    assert spec.consumer == Consumer(kv_layout="NHD", alignment_bytes=128)


def test_names_and_degrees_say_the_same() -> None:
    assert load(CONFIG, layout="tp2pp3") == load(CONFIG, tp=2, pp=3)
    assert load(CONFIG, layout="adp4") == load(CONFIG, tp=4, attention_dp=True)
    assert load(CONFIG, pp_partition=(1, 1)) == load(CONFIG, pp=2, pp_partition=(1, 1))
    assert load(CONFIG, layout="pp2", pp_partition=(2, 1)).parallel.pp_partition == (2, 1)
    assert parallel_layout(None, None, None, None, None, None, None) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layout": "tp2", "tp": 2}, "layout: given together with tp, needs either a name or the degrees"),
        ({"layout": "tp2", "pp": 2, "attention_dp": False}, "layout: given together with pp, attention_dp"),
        ({"slots": 4, "quota_bytes": 1 << 30}, "slots: found both of slots and quota_bytes"),
        ({"pp": 4}, "pp: found 4 pipeline stages for 3 layers"),
        ({"pp": 2, "pp_partition": (1,)}, "pp_partition: found 1"),
        ({"pp_partition": (1, 3)}, "pp_partition: found 4 layers in all, needs at most the model's 3"),
        ({"rank": 1}, "rank: found 1, needs a whole number from 0 to 0"),
        ({"tp": 2, "rank": -1}, "rank: found -1"),
        ({"tp": 0}, "tp: found 0"),
        ({"tp": "2"}, "tp: found '2'"),
        ({"ep": 2}, "ep: found 2, needs a divisor of the tensor-parallel size 1"),
        ({"layout": "tp2tp2"}, "gives tp twice"),
        ({"kv_dtype": "bf17"}, "kv_dtype: unknown element format 'bf17'"),
        ({"kv_dtype": "int32"}, "kv_format: found int32"),
        ({"state_dtype": "fp8"}, "state_format: found fp8"),
        ({"tokens_per_block": 0}, "tokens_per_block: found 0"),
        ({"slots": 0}, "slots: found 0"),
        ({"quota_bytes": -1}, "quota_bytes: found -1"),
        ({"alignment_bytes": 24}, "alignment_bytes: found 24, needs a power of two"),
        ({"kv_layout": "DHN"}, "kv_layout: found 'DHN', needs one of HND, NHD"),
        ({"draft": "folded"}, "draft: found folded, but"),
        ({"draft": "twice"}, "draft"),
    ],
)
def test_contradictions_and_bad_values(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(CONFIG, **arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# A saved spec, deployed again.


def test_a_saved_spec_is_taken_as_it_is(saved: Path) -> None:
    assert load(saved) == SAVED
    assert load(str(saved)) == SAVED


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ({"kv_dtype": "bf16"}, {"kv_format": ElementFormat.BF16}),
        ({"state_dtype": "fp32"}, {"state_format": ElementFormat.FP32}),
        ({"rank": 0}, {"rank": 0}),
        ({"tp": 4, "rank": 3}, {"parallel": ParallelLayout(tp=4), "rank": 3}),
        ({"layout": "adp2"}, {"parallel": ParallelLayout(tp=2, attention_dp=True)}),
        ({"tokens_per_block": 16}, {"tokens_per_block": 16}),
        ({"slots": 2}, {"slots": 2}),
        ({"state_slots": 2}, {"state_slots": 2}),
        ({"quota_bytes": 1 << 30}, {"slots": None, "quota_bytes": 1 << 30}),
        ({"draft": "none"}, {"draft": Draft()}),
        ({"draft": "separate"}, {"draft": Draft(mode="separate", layers=(DENSE,))}),
        ({"draft": "folded"}, {}),
        ({"kv_layout": "HND"}, {"consumer": Consumer(alignment_bytes=16)}),
        ({"alignment_bytes": 1}, {"consumer": Consumer(kv_layout="NHD")}),
    ],
)
def test_a_saved_spec_deployed_again(saved: Path, arguments: dict[str, Any], changes: dict[str, Any]) -> None:
    """Whatever is given replaces its own part of the spec; everything else stays."""
    assert load(saved, **arguments) == msgspec.structs.replace(SAVED, **changes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tp": 1}, "rank: found 1, needs a whole number from 0 to 0"),
        ({"slots": 2, "quota_bytes": 2}, "slots: found both of slots and quota_bytes"),
        ({"draft": "twice"}, "draft.mode: found 'twice', needs one of none, folded, separate"),
        ({"kv_dtype": "int64"}, "kv_format: found int64"),
        ({"pp": 9}, "pp: found 9 pipeline stages for 4 layers"),
    ],
)
def test_a_saved_spec_deployed_wrongly(saved: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(saved, **arguments)
    assert words in str(caught.value)


def test_a_spec_without_draft_layers_cannot_have_a_draft() -> None:
    with pytest.raises(SpecError, match=r"draft"):
        deploy(CacheSpec(layers=(DENSE,)), Deployment(draft="folded"))


def test_a_damaged_spec_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_bytes(encode_spec(SAVED).replace(b'"rank":1', b'"rank":7'))
    with pytest.raises(SpecError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "rank: found 7, needs a whole number from 0 to 1" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [None, 3, 1.5, b"bytes", ["list"], ("a",)])
def test_what_is_no_source(source: Any) -> None:
    with pytest.raises((SpecError, TypeError)):
        load(source)


@pytest.mark.parametrize("name", ["missing.json", "", "a\0b", "missing/config.json"])
def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_the_shipped_example(root: Path) -> None:
    """48 layers, every fourth with sparse attention and the others recurrent, and one draft layer."""
    example = root / "examples" / "qwen3.8-flash-next" / "config.json"
    spec = load(example)
    assert load(example.parent) == spec
    assert spec.kv_format is ElementFormat.BF16
    assert (spec.state_format, spec.conv_format) == (ElementFormat.FP32, ElementFormat.BF16)
    assert spec.sparse_algorithm == "qsa"
    sparse = [index for index, layer in enumerate(spec.layers) if isinstance(layer, AttentionLayer)]
    assert sparse == list(range(3, 48, 4))
    layer = spec.layers[3]
    assert isinstance(layer, AttentionLayer)
    assert (layer.kv_heads, layer.head_dim) == (2, 256)
    assert [(plane.role, plane.token_bytes, plane.scope) for plane in layer.side_planes] == [
        ("index_key", 256, "layer"),
        ("qsa_index_position", 12, "rank"),
    ]
    assert spec.layers[0] == RecurrentLayer(algorithm="gdn", heads=32, head_dim=128, groups=16, state_dim=128)
    assert spec.draft == Draft()
    assert load(example, draft="folded").draft.layers == (layer,)
