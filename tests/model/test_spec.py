from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsan.model.errors import SpecError
from kvsan.model.formats import KV_FORMATS, STATE_FORMATS, ElementFormat
from kvsan.model.layers import (
    AttentionLayer,
    AuxiliaryState,
    HybridLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    SidePlane,
    UncachedLayer,
)
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import MAX_LAYERS, CacheSpec, Consumer, Draft, decode_spec, encode_spec, one_line

DENSE = AttentionLayer(kv_heads=8, head_dim=128)
SPEC = CacheSpec(layers=(DENSE,))

GOLDEN = (
    '{"consumer":{"alignment_bytes":16,"index_bits":32,"kv_layout":"NHD","offset_bits":64},"conv_format":"bf16",'
    '"draft":{"layers":[{"head_dim":64,"kind":"attention","kv_format":"fp8","kv_heads":2,"side_planes":[],'
    '"sink_tokens":4,"tokens_per_block":16,"value_dim":64,"window":128}],"mode":"folded"},"kv_format":"nvfp4",'
    '"kvsan":"spec","layers":[{"head_dim":256,"kind":"attention","kv_format":null,"kv_heads":2,"side_planes":['
    '{"dim":128,"format":"bf16","heads":1,"role":"index_key","scope":"layer"}],"sink_tokens":0,'
    '"tokens_per_block":null,"value_dim":256,"window":null},{"kind":"latent","kv_format":null,"latent_dim":512,'
    '"rope_dim":64,"side_planes":[],"sink_tokens":0,"tokens_per_block":null,"window":null},{"algorithm":"gdn",'
    '"auxiliary":[{"format":"int64","role":"ple_context","shape":[3]}],"conv_format":null,"conv_kernel":4,'
    '"groups":16,"head_dim":128,"heads":32,"kind":"recurrent","ssm_format":"fp32","state_dim":128},'
    '{"kind":"uncached"}],"max_sequence_tokens":4096,"model":"small","parallel":{"attention_dp":false,"cp":1,"ep":1,'
    '"pp":2,"pp_partition":[1,3],"tp":2},"quota_bytes":1073741824,"rank":3,"slots":null,"sparse_algorithm":"qsa",'
    '"state_format":"fp32","state_slots":null,"tokens_per_block":32,"version":1}'
)
GOLDEN_SPEC = CacheSpec(
    model="small",
    layers=(
        AttentionLayer(
            kv_heads=2,
            head_dim=256,
            side_planes=(SidePlane(role="index_key", dim=128, format=ElementFormat.BF16),),
        ),
        LatentLayer(latent_dim=512, rope_dim=64),
        RecurrentLayer(
            algorithm="gdn",
            heads=32,
            head_dim=128,
            groups=16,
            state_dim=128,
            ssm_format=ElementFormat.FP32,
            auxiliary=(AuxiliaryState(role="ple_context", shape=(3,), format=ElementFormat.INT64),),
        ),
        UncachedLayer(),
    ),
    kv_format=ElementFormat.NVFP4,
    state_format=ElementFormat.FP32,
    max_sequence_tokens=4096,
    parallel=ParallelLayout(tp=2, pp=2, pp_partition=(1, 3)),
    rank=3,
    draft=Draft(
        mode="folded",
        layers=(
            AttentionLayer(
                kv_heads=2, head_dim=64, window=128, sink_tokens=4, kv_format=ElementFormat.FP8, tokens_per_block=16
            ),
        ),
    ),
    sparse_algorithm="qsa",
    slots=None,
    quota_bytes=1 << 30,
    consumer=Consumer(kv_layout="NHD", alignment_bytes=16),
)


def test_saved_specs_stay_readable() -> None:
    """This text is what version 1 writes, byte for byte; a change of it breaks every saved case."""
    assert encode_spec(GOLDEN_SPEC).decode() == GOLDEN
    assert decode_spec(GOLDEN.encode()) == GOLDEN_SPEC


def test_the_defaults_stay_what_they_are() -> None:
    text = encode_spec(SPEC)
    assert json.loads(text) == {
        "kvsan": "spec",
        "version": 1,
        "model": "",
        "layers": [
            {
                "kind": "attention",
                "kv_heads": 8,
                "head_dim": 128,
                "value_dim": 128,
                "window": None,
                "sink_tokens": 0,
                "kv_format": None,
                "tokens_per_block": None,
                "side_planes": [],
            }
        ],
        "kv_format": "bf16",
        "state_format": "bf16",
        "conv_format": "bf16",
        "tokens_per_block": 32,
        "max_sequence_tokens": None,
        "parallel": {"tp": 1, "pp": 1, "ep": 1, "cp": 1, "attention_dp": False, "pp_partition": None},
        "rank": 0,
        "draft": {"mode": "none", "layers": []},
        "sparse_algorithm": None,
        "slots": 4,
        "state_slots": None,
        "quota_bytes": None,
        "consumer": {"kv_layout": "HND", "alignment_bytes": 1, "index_bits": 32, "offset_bits": 64},
    }
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")).encode()


def test_a_short_text_means_its_defaults() -> None:
    short = b'{"kvsan":"spec","layers":[{"kind":"attention","kv_heads":8,"head_dim":128}]}'
    assert decode_spec(short) == SPEC
    assert encode_spec(decode_spec(short)) == encode_spec(SPEC)


# Round trips.

PLANES = st.lists(
    st.builds(
        SidePlane,
        role=st.sampled_from(["index_key", "qsa_index_position", "other"]),
        dim=st.integers(1, 300),
        format=st.sampled_from([member for member in ElementFormat if not member.block_scaled]),
        heads=st.integers(1, 4),
        scope=st.sampled_from(["layer", "rank"]),
    ),
    max_size=2,
    unique_by=lambda plane: plane.role,
).map(tuple)
WINDOWS = st.sampled_from([(None, 0), (1, 0), (128, 4), (4096, 128)])
OPTIONAL_FORMAT = st.none() | st.sampled_from(KV_FORMATS)
OPTIONAL_STATE = st.none() | st.sampled_from(STATE_FORMATS)
ATTENTION = st.builds(
    lambda window, **fields: AttentionLayer(window=window[0], sink_tokens=window[1], **fields),
    window=WINDOWS,
    kv_heads=st.integers(1, 256),
    head_dim=st.integers(1, 1024),
    value_dim=st.integers(0, 1024),
    kv_format=OPTIONAL_FORMAT,
    tokens_per_block=st.none() | st.integers(1, 256),
    side_planes=PLANES,
)
LATENT = st.builds(
    LatentLayer,
    latent_dim=st.integers(1, 1024),
    rope_dim=st.integers(0, 64),
    kv_format=OPTIONAL_FORMAT,
    side_planes=PLANES,
)
RECURRENT = st.builds(
    RecurrentLayer,
    algorithm=st.sampled_from(["mamba2", "gdn", "kda"]),
    heads=st.integers(1, 256),
    head_dim=st.integers(1, 256),
    groups=st.integers(1, 16),
    state_dim=st.integers(1, 256),
    conv_kernel=st.integers(2, 8),
    ssm_format=OPTIONAL_STATE,
    conv_format=OPTIONAL_STATE,
    auxiliary=st.just(())
    | st.tuples(
        st.builds(
            AuxiliaryState,
            role=st.just("ple"),
            shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
            format=st.sampled_from([ElementFormat.INT64, ElementFormat.UINT8]),
        )
    ),
)
LAYER: st.SearchStrategy[Layer] = (
    ATTENTION
    | LATENT
    | RECURRENT
    | st.builds(HybridLayer, attention=ATTENTION, recurrent=RECURRENT)
    | st.just(UncachedLayer())
)


@st.composite
def specs(draw: st.DrawFn) -> CacheSpec:
    layers = tuple(draw(st.lists(LAYER, min_size=1, max_size=3)))
    stages = draw(st.integers(1, len(layers)))
    partition = draw(st.none() | st.just((1,) * stages))
    parallel = ParallelLayout(
        tp=draw(st.integers(1, 8)), pp=stages, pp_partition=partition, attention_dp=draw(st.booleans())
    )
    mode = draw(st.sampled_from(["none", "folded", "separate"]))
    quota = draw(st.none() | st.integers(1, 1 << 60))
    return CacheSpec(
        model=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
        layers=layers,
        kv_format=draw(st.sampled_from(KV_FORMATS)),
        state_format=draw(st.sampled_from(STATE_FORMATS)),
        conv_format=draw(st.sampled_from(STATE_FORMATS)),
        tokens_per_block=draw(st.integers(1, 1 << 16)),
        max_sequence_tokens=draw(st.none() | st.integers(1, 1 << 31)),
        parallel=parallel,
        rank=draw(st.integers(0, parallel.world_size - 1)),
        draft=Draft() if mode == "none" else Draft(mode=mode, layers=(draw(ATTENTION),)),
        sparse_algorithm=draw(st.none() | st.sampled_from(["qsa", "dsa"])),
        slots=None if quota else draw(st.integers(1, 1 << 40)),
        state_slots=draw(st.none() | st.integers(1, 1 << 40)),
        quota_bytes=quota,
        consumer=Consumer(
            kv_layout=draw(st.sampled_from(["HND", "NHD"])),
            alignment_bytes=1 << draw(st.integers(0, 20)),
            index_bits=draw(st.sampled_from([32, 64])),
            offset_bits=draw(st.sampled_from([32, 64])),
        ),
    )


@settings(max_examples=60)
@given(specs())
def test_a_spec_survives_its_text(spec: CacheSpec) -> None:
    text = encode_spec(spec)
    again = decode_spec(text)
    assert again == spec
    assert encode_spec(again) == text
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@settings(max_examples=30)
@given(specs(), specs())
def test_equal_specs_have_equal_texts_and_others_do_not(one: CacheSpec, other: CacheSpec) -> None:
    assert (one == other) == (encode_spec(one) == encode_spec(other))


@settings(max_examples=25)
@given(specs())
def test_the_order_of_the_keys_does_not_matter(spec: CacheSpec) -> None:
    def reverse(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reverse(value[key]) for key in reversed(list(value))}
        return [reverse(member) for member in value] if isinstance(value, list) else value

    assert decode_spec(json.dumps(reverse(json.loads(encode_spec(spec)))).encode()) == spec


def test_a_list_is_as_good_as_a_tuple() -> None:
    listed = CacheSpec(
        layers=[DENSE],  # type: ignore[arg-type]
        draft=Draft(mode="folded", layers=[DENSE]),  # type: ignore[arg-type]
        parallel=ParallelLayout(pp=1, pp_partition=[1]),  # type: ignore[arg-type]
    )
    tupled = CacheSpec(
        layers=(DENSE,), draft=Draft(mode="folded", layers=(DENSE,)), parallel=ParallelLayout(pp_partition=(1,))
    )
    assert listed == tupled
    assert encode_spec(listed) == encode_spec(tupled)
    assert decode_spec(encode_spec(listed)) == listed


def test_a_name_stands_for_its_format() -> None:
    formats: Any = {"kv_format": "float8_e4m3fn", "state_format": "torch.float32"}
    named = CacheSpec(layers=(DENSE,), **formats)
    assert named == CacheSpec(layers=(DENSE,), kv_format=ElementFormat.FP8, state_format=ElementFormat.FP32)
    assert encode_spec(named) == encode_spec(decode_spec(encode_spec(named)))


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SPEC.rank = 1  # type: ignore[misc]
    with pytest.raises(SpecError, match=r"^rank: found 1"):
        msgspec.structs.replace(SPEC, rank=1)


# Bad values, given in Python.

NO_COUNT = [0, -1, 1.5, math.nan, math.inf, True, "1", [], {}, 10**400]


@pytest.mark.parametrize("field", ["tokens_per_block", "max_sequence_tokens", "slots", "state_slots", "quota_bytes"])
@pytest.mark.parametrize("value", NO_COUNT, ids=lambda value: str(value)[:8] if not isinstance(value, int) else "int")
def test_counts_are_positive_whole_numbers(field: str, value: object) -> None:
    changed: Any = {field: value} | ({"slots": None} if field == "quota_bytes" else {})
    with pytest.raises(SpecError) as caught:
        CacheSpec(layers=(DENSE,), **changed)
    assert str(caught.value).startswith(f"{field}: found ")
    assert "needs a whole number from 1 to " in str(caught.value)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"layers": ()}, "layers: found 0, needs 1 to 10000 layers"),
    ({"layers": (DENSE,) * (MAX_LAYERS + 1)}, "layers: found 10001, needs 1 to 10000 layers"),
    ({"layers": None}, "layers: found None, needs"),
    ({"layers": DENSE}, "layers: found AttentionLayer("),
    ({"layers": (DENSE, None)}, "layers[1]: found None, needs"),
    ({"layers": ({"kind": "attention"},)}, "layers[0]: found {'kind': 'attention'}, needs"),
    ({"kv_format": ElementFormat.INT32}, "kv_format: found"),
    ({"kv_format": "bf17"}, "kv_format: unknown element format 'bf17', needs one of fp32, fp16, bf16"),
    ({"kv_format": None}, "kv_format: unknown element format None, needs one of"),
    ({"state_format": ElementFormat.FP8}, "needs one of fp32, fp16, bf16"),
    ({"conv_format": []}, "conv_format: unknown element format [], needs one of"),
    ({"tokens_per_block": (1 << 16) + 1}, "tokens_per_block: found 65537, needs a whole number from 1 to 65536"),
    ({"rank": 1}, "rank: found 1, needs a whole number from 0 to 0"),
    ({"rank": -1}, "rank: found -1"),
    ({"rank": True}, "rank: found True"),
    ({"parallel": ParallelLayout(pp=2)}, "pp: found 2 pipeline stages for 1 layers"),
    ({"parallel": ParallelLayout(pp=1, pp_partition=(2,))}, "pp_partition: found 2 layers in all, needs at most the"),
    ({"parallel": "tp2"}, "parallel: found 'tp2', needs"),
    ({"draft": None}, "draft: found None, needs"),
    ({"consumer": {}}, "consumer: found {}, needs"),
    ({"sparse_algorithm": "magic"}, "sparse_algorithm: found 'magic', needs one of qsa, dsa"),
    ({"slots": None}, "slots: found neither of slots and quota_bytes, needs exactly one"),
    ({"quota_bytes": 1}, "slots: found both of slots and quota_bytes, needs exactly one"),
    ({"slots": (1 << 40) + 1}, "slots: found 1099511627777, needs a whole number from 1"),
    ({"model": None}, "model: found None, needs a name"),
    ({"model": "x" * 201}, "model: found 'xxx"),
    ({"version": 2}, "version: found 2, needs 1"),
    ({"version": "1"}, "version: found '1', needs 1"),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=[f"{next(iter(f))}-{at}" for at, (f, _) in enumerate(BAD)])
def test_a_bad_value_names_field_found_and_needed(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        CacheSpec(**{"layers": (DENSE,), **fields})
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mode": "shared", "layers": (DENSE,)}, "draft.mode: found 'shared', needs one of none, folded, separate"),
        ({"mode": "none", "layers": (DENSE,)}, "draft.layers: found 1 layers with mode none"),
        ({"mode": "folded"}, "draft.layers: found no layer with mode folded, needs at least one draft layer"),
        ({"mode": "folded", "layers": (UncachedLayer(),)}, "draft.layers"),
        ({"mode": "separate", "layers": ("x",)}, "draft.layers"),
    ],
)
def test_a_bad_draft(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        Draft(**fields)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_layout": "hnd"}, "kv_layout: found 'hnd', needs one of HND, NHD"),
        ({"alignment_bytes": 3}, "alignment_bytes: found 3, needs a power of two"),
        ({"alignment_bytes": 0}, "alignment_bytes: found 0, needs a whole number from 1"),
        ({"alignment_bytes": 1 << 21}, "alignment_bytes: found 2097152"),
        ({"index_bits": 16}, "index_bits: found 16, needs 32 or 64"),
        ({"offset_bits": "64"}, "offset_bits: found '64', needs 32 or 64"),
        ({"index_bits": 32.0}, "index_bits: found 32.0, needs 32 or 64"),
    ],
)
def test_a_bad_consumer(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        Consumer(**fields)
    assert words in str(caught.value)


def test_a_name_that_no_text_can_hold() -> None:
    """A lone surrogate has no UTF-8; it is refused when the spec is made, not when it is written."""
    with pytest.raises(SpecError, match=r"^model: found "):
        CacheSpec(layers=(DENSE,), model="\ud800")


# Bad texts.

TEXT = encode_spec(SPEC).decode()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"rank":0', '"rank":-1', "rank: found -1, needs a whole number from 0 to 0"),
        ('"rank":0', '"rank":"0"', "Expected `int`, got `str` - at `$.rank`"),
        ('"rank":0', '"rank":1.0', "$.rank"),
        ('"rank":0', '"rank":null', "$.rank"),
        ('"rank":0', '"rank":1e400', "$.rank"),
        ('"rank":0', '"rank":NaN', "invalid character"),
        ('"rank":0', '"rank":0,"rnk":0', "Object contains unknown field `rnk`"),
        ('"rank":0', f'"rank":{10**30}', "rank: found 1"),
        (
            '"head_dim":128',
            '"head_dim":0',
            "head_dim: found 0, needs a whole number from 1 to 1048576 - at `$.layers[0]`",
        ),
        ('"head_dim":128', '"head_dims":1', "unknown field `head_dims` - at `$.layers[0]`"),
        ('"attention"', '"attn"', "Invalid value 'attn' - at `$.layers[0].kind`"),
        ('"layers":[{', '"layers":[null,{', "Expected `object`, got `null` - at `$.layers[0]`"),
        ('"conv_format":"bf16"', '"conv_format":"bf17"', "Invalid enum value 'bf17' - at `$.conv_format`"),
        ('"attention_dp":false', '"attention_dp":1', "Expected `bool`, got `int` - at `$.parallel.attention_dp`"),
        ('"pp_partition":null', '"pp_partition":[1,2]', "pp_partition: found 2"),
        ('"version":1', '"version":2', "$.version"),
        ('"kvsan":"spec"', '"kvsan":"case"', "Invalid value 'case' - at `$.kvsan`"),
        ('"model":""', r'"model":"\ud800"', "surrogate"),
        ("}", "", "truncated"),
        ('{"consumer"', '[{"consumer"', "Expected `object`, got `array`"),
    ],
)
def test_a_bad_text_names_the_place(old: str, new: str, words: str) -> None:
    assert old in TEXT
    text = TEXT[: TEXT.rindex(old)] + new if old == "}" else TEXT.replace(old, new, 1)
    with pytest.raises(SpecError) as caught:
        decode_spec(text.encode())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 310


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"{",
        b"null",
        b"7",
        b"NaN",
        b"[]",
        b'"spec"',
        b"\xff\xfe",
        b"{}",
        TEXT.encode()[:-40],
        TEXT.encode() * 2,
        b"[" * 10**6,
        b'{"layers":' * 10**5,
        b'{"kvsan":"spec","layers":' + b"[" * 10**5,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_what_is_no_spec(text: bytes) -> None:
    with pytest.raises(SpecError) as caught:
        decode_spec(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 310


@settings(max_examples=200)
@given(st.binary(max_size=60), st.integers(0, len(TEXT)), st.integers(0, 30))
def test_a_damaged_text_is_bad_input_or_a_spec(noise: bytes, at: int, cut: int) -> None:
    damaged = TEXT.encode()[:at] + noise + TEXT.encode()[at + cut :]
    try:
        spec = decode_spec(damaged)
    except SpecError as error:
        assert "\n" not in str(error)
    else:
        assert decode_spec(encode_spec(spec)) == spec


def test_a_text_of_absurd_length_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsan.model.spec.MAX_SPEC_BYTES", 10)
    with pytest.raises(SpecError, match=r"^found \d+ bytes of JSON, needs at most 10$"):
        decode_spec(TEXT.encode())


def test_one_line() -> None:
    assert one_line("a\n  b\tc\r\nd") == "a b c d"
    assert len(one_line("x y " * 1000)) == 300
    assert one_line("x" * 300) == "x" * 300


def test_recurrent_layers_are_found() -> None:
    gdn = RecurrentLayer(algorithm="gdn", heads=1, groups=1, state_dim=1)
    assert not SPEC.has_recurrent
    assert CacheSpec(layers=(DENSE, gdn)).has_recurrent
    assert CacheSpec(layers=(HybridLayer(attention=DENSE, recurrent=gdn),)).has_recurrent
