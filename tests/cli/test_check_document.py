"""The JSON document of ``kvsan check``: its keys, and the numbers of the reference model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, RecurrentLayer
from kvsan.model.spec import CacheSpec, ParallelLayout, encode_spec

QSA_LAYERS = list(range(3, 48, 4))
DOCUMENT_KEYS = [
    "allocator",
    "status",
    "spec",
    "pools",
    "buffers",
    "side_planes_bytes",
    "findings",
    "rejection",
    "notes",
]
POOL_KEYS = ["manager", "group", "pool", "slots", "slot_bytes", "page_bytes", "pages_per_slot", "life_cycles"]
BUFFER_KEYS = [
    "manager",
    "layer",
    "role",
    "group",
    "pool",
    "life_cycle",
    "offset",
    "page_bytes",
    "index_scale",
    "mapping_offset",
]


def save(folder: Path, spec: CacheSpec) -> Path:
    """Return a file that holds ``spec``."""
    file = folder / "spec.json"
    file.write_bytes(encode_spec(spec))
    return file


def rows(document: Any, role: str) -> list[dict[str, Any]]:
    """Return the buffers of one role."""
    return [buffer for buffer in document["buffers"] if buffer["role"] == role]


def test_the_document_has_its_keys_and_the_reference_numbers(run, reference) -> None:
    ran = run("check", reference, "--tp", 2, "--kv-dtype", "fp8", "--json")
    document = ran.document
    assert (ran.status, ran.err, ran.out.count("\n")) == (0, "", 1)
    assert list(document) == DOCUMENT_KEYS
    assert document["allocator"] == "trtllm-v2-qsa-packed"
    assert document["status"] == "clean"
    assert document["rejection"] is None
    assert document["findings"] == []
    assert document["side_planes_bytes"] == 98688
    assert all(list(pool) == POOL_KEYS for pool in document["pools"])
    assert all(list(buffer) == BUFFER_KEYS for buffer in document["buffers"])
    key_pool = {"manager": "target", "slots": 4, "slot_bytes": 196608, "page_bytes": 8192, "pages_per_slot": 24}
    (found,) = [pool for pool in document["pools"] if pool["slot_bytes"] == 196608]
    assert key_pool.items() <= found.items()
    keys = rows(document, "key")
    assert [buffer["layer"] for buffer in keys] == QSA_LAYERS
    assert [buffer["offset"] for buffer in keys] == [16384 * ordinal for ordinal in range(12)]
    assert [buffer["mapping_offset"] for buffer in keys] == list(range(12))
    assert {buffer["index_scale"] for buffer in keys} == {24}
    assert {buffer["mapping_offset"] for buffer in document["buffers"] if buffer["role"] != "key"} == {None}
    assert [(buffer["layer"], buffer["page_bytes"]) for buffer in rows(document, "side_planes")] == [(3, 98688)]
    layers = [buffer["layer"] for buffer in document["buffers"]]
    assert layers == sorted(layers)
    assert set(layers) == set(range(48))


def test_the_spec_in_the_document_can_be_saved_and_checked_again(run, reference, tmp_path) -> None:
    first = run("check", reference, "--tp", 4, "--rank", 2, "--kv-dtype", "nvfp4", "--tokens-per-block", 64, "--json")
    spec = first.document["spec"]
    assert (spec["kvsan"], spec["tokens_per_block"], spec["rank"], spec["kv_format"]) == ("spec", 64, 2, "nvfp4")
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(spec), encoding="utf-8")
    second = run("check", saved, "--json")
    assert second.document["spec"] == spec
    assert second.document["buffers"] == first.document["buffers"]


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (["--slots", "7"], "slots", 7),
        (["--quota", "4GiB"], "quota_bytes", 4 << 30),
        (["--quota", "512 mib"], "quota_bytes", 512 << 20),
        (["--quota", "3000000000"], "quota_bytes", 3_000_000_000),
        (["--quota", "3GB"], "quota_bytes", 3_000_000_000),
        (["--state-slots", "3"], "state_slots", 3),
        (["--state-dtype", "torch.bfloat16"], "state_format", "bf16"),
        (["--kv-dtype", "float8_e4m3fn"], "kv_format", "fp8"),
        (["--rank", "1", "--tp", "2"], "rank", 1),
    ],
)
def test_options_reach_the_spec(run, reference, options, field, value) -> None:
    ran = run("check", reference, "--json", *options)
    assert ran.status == 0
    assert ran.document["spec"][field] == value


def test_parallel_options_reach_the_spec(run, reference) -> None:
    degrees = run("check", reference, "--tp", 4, "--pp", 2, "--ep", 2, "--cp", 2, "--attention-dp", "--json")
    assert degrees.document["spec"]["parallel"] == {
        "tp": 4,
        "pp": 2,
        "ep": 2,
        "cp": 2,
        "attention_dp": True,
        "pp_partition": None,
    }
    named = run("check", reference, "--layout", "tep4", "--json")
    assert (named.document["spec"]["parallel"]["tp"], named.document["spec"]["parallel"]["ep"]) == (4, 4)
    parted = run("check", reference, "--pp-partition", "8,40", "--rank", 1, "--json").document
    assert parted["spec"]["parallel"]["pp_partition"] == [8, 40]
    assert min(buffer["layer"] for buffer in parted["buffers"]) == 8


def test_the_consumer_and_the_draft_reach_the_spec(run, reference) -> None:
    spec = run("check", reference, "--kv-layout", "nhd", "--alignment", 16, "--draft", "folded", "--json").document[
        "spec"
    ]
    assert (spec["consumer"]["kv_layout"], spec["consumer"]["alignment_bytes"]) == ("NHD", 16)
    assert spec["draft"]["mode"] == "folded"


@pytest.mark.parametrize("mode", ["folded", "separate"])
def test_draft_layers_follow_the_targets(run, reference, mode) -> None:
    # thirteen layers with K pages when folded: index scale 26, mapping offsets 0 to 12
    document = run("check", reference, "--tp", 2, "--kv-dtype", "fp8", "--draft", mode, "--json").document
    keys = rows(document, "key")
    assert [buffer["layer"] for buffer in keys] == [*QSA_LAYERS, 48]
    last = keys[-1]
    wanted = ("target", 26, 12) if mode == "folded" else ("draft", 2, 0)
    assert (last["manager"], last["index_scale"], last["mapping_offset"]) == wanted


def test_what_was_inferred_is_in_the_notes(run, reference) -> None:
    notes = run("check", reference, "--json").document["notes"]
    assert [note for note in notes if note.startswith("kv dtype bf16")]
    assert not [
        note
        for note in run("check", reference, "--kv-dtype", "bf16", "--json").document["notes"]
        if note.startswith("kv dtype")
    ]
    # 2 KV heads over 4 ranks: each head is held twice
    assert any(
        "2 KV heads over 4 ranks" in note for note in run("check", reference, "--tp", 4, "--json").document["notes"]
    )


def test_a_refusal_has_its_cause_and_its_way_out(run, reference) -> None:
    ran = run("check", reference, "--tp", 2, "--kv-dtype", "fp8", "--allocator", "trtllm-v2-qsa-legacy", "--json")
    document = ran.document
    assert (ran.status, ran.err) == (1, "")
    assert list(document) == DOCUMENT_KEYS
    assert (document["status"], document["pools"], document["buffers"]) == ("rejected", [], [])
    assert document["side_planes_bytes"] == 0
    rejection = document["rejection"]
    assert list(rejection) == ["rule", "message", "remedy", "where", "supported"]
    assert (rejection["rule"], rejection["supported"]) == ("rejected", True)
    assert rejection["message"].startswith(
        "Layer 7's K page starts 24576 B into its pool slot, which is not a multiple of one layer's K/V pages (16384 B)"
    )
    assert "trtllm-v2-qsa-packed" in rejection["remedy"]
    assert {place["layer"] for place in rejection["where"]} == {3, 7}


def test_a_pool_whose_life_cycles_have_different_pages_has_no_page_size(run, tmp_path) -> None:
    # full attention: K and V of 2 heads; window: K and V of 1 head in two layers: both slots are 2 * 16384 B
    layers = (
        AttentionLayer(kv_heads=2, head_dim=128),
        AttentionLayer(kv_heads=1, head_dim=128, window=64),
        AttentionLayer(kv_heads=1, head_dim=128, window=64),
    )
    file = save(tmp_path, CacheSpec(layers=layers, kv_format=ElementFormat.BF16))
    (pool,) = run("check", file, "--json").document["pools"]
    assert (pool["slot_bytes"], pool["page_bytes"], pool["pages_per_slot"]) == (32768, None, None)
    assert pool["life_cycles"] == [0, 1]
    keys = rows(run("check", file, "--json").document, "key")
    assert [(key["life_cycle"], key["page_bytes"], key["index_scale"]) for key in keys] == [
        (0, 16384, 2),
        (1, 8192, 4),
        (1, 8192, 4),
    ]


@pytest.mark.parametrize("layer_count", [1, 3])
def test_recurrent_states_of_v1_lie_layer_by_layer(run, tmp_path, layer_count) -> None:
    layer = RecurrentLayer(algorithm="mamba2", heads=8, head_dim=64, groups=1, state_dim=64)
    file = save(tmp_path, CacheSpec(layers=(layer,) * layer_count))
    document = run("check", file, "--allocator", "trtllm-v1", "--json").document
    (pool,) = document["pools"]
    state_bytes, conv_bytes = 8 * 64 * 64 * 2, (8 * 64 + 2 * 64) * 3 * 2
    assert (pool["slot_bytes"], pool["page_bytes"]) == (layer_count * (state_bytes + conv_bytes), None)
    assert {buffer["index_scale"] for buffer in document["buffers"]} == {1}
    assert [buffer["layer"] for buffer in document["buffers"]] == [n for n in range(layer_count) for _ in range(2)]
    second = document["buffers"][2]["offset"] if layer_count > 1 else None
    assert second in (None, 4 * (state_bytes + conv_bytes))  # four slots of the first layer lie before it


def test_all_ranks_have_a_document_each(run, reference) -> None:
    ran = run("check", reference, "--layout", "tp1pp5", "--kv-dtype", "fp8", "--all-ranks", "--json")
    ranks = ran.document["ranks"]
    assert (ran.status, list(ran.document), ran.err) == (0, ["ranks"], "")
    assert [document["side_planes_bytes"] for document in ranks] == [16768, 24960, 16768, 16768, 24960]
    assert [document["spec"]["rank"] for document in ranks] == [0, 1, 2, 3, 4]
    assert [[buffer["layer"] for buffer in rows(document, "key")] for document in ranks] == [
        [3, 7],
        [11, 15, 19],
        [23, 27],
        [31, 35],
        [39, 43, 47],
    ]


def test_each_document_of_all_ranks_is_the_document_of_that_rank(run, reference) -> None:
    options = ["--layout", "tp2pp3", "--kv-dtype", "nvfp4", "--json"]
    together = run("check", reference, *options, "--all-ranks").document["ranks"]
    assert together == [run("check", reference, *options, "--rank", rank).document for rank in range(6)]


def test_all_ranks_of_a_refused_spec(run, reference) -> None:
    options = ["--layout", "tp2pp12", "--kv-dtype", "fp8", "--all-ranks", "--json"]
    ran = run("check", reference, "--allocator", "trtllm-v2-qsa-legacy", *options)
    # one layer with K pages on every stage: nothing to be off by
    assert {document["status"] for document in ran.document["ranks"]} == {"clean"}
    two_each = ["--layout", "tp2pp6", "--kv-dtype", "fp8", "--all-ranks", "--json"]
    ran = run("check", reference, "--allocator", "trtllm-v2-qsa-legacy", *two_each)
    assert ran.status == 1
    assert {document["status"] for document in ran.document["ranks"]} == {"rejected"}


def test_a_saved_rank_is_no_obstacle_to_all_ranks(run, tmp_path) -> None:
    spec = CacheSpec(layers=(AttentionLayer(kv_heads=8, head_dim=64),), parallel=ParallelLayout(tp=8), rank=7)
    ran = run("check", save(tmp_path, spec), "--tp", 2, "--all-ranks", "--json")
    assert [document["spec"]["rank"] for document in ran.document["ranks"]] == [0, 1]
