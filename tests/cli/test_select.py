"""``kvsan select``: the decision, its path, the audit, KV formats; and ``check --allocator auto``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvsan.model.layers import AttentionLayer, LatentLayer, RecurrentLayer
from kvsan.model.selection import RULE_SETS
from kvsan.model.spec import CacheSpec, encode_spec

KEYS = [
    "ruleset",
    "status",
    "inputs",
    "manager",
    "predicted",
    "asked",
    "warning",
    "refusal",
    "seats",
    "index_rows",
    "numbers",
    "allocator",
    "kv_dtype",
    "path",
    "findings",
]
DENSE = AttentionLayer(kv_heads=2, head_dim=64)
WIDE = AttentionLayer(kv_heads=2, head_dim=128)
STATE = RecurrentLayer(algorithm="gdn", heads=2, head_dim=64, groups=2, state_dim=64)


@pytest.fixture
def save(tmp_path):
    def save_spec(**fields: object) -> str:
        file = tmp_path / "spec.json"
        file.write_bytes(encode_spec(CacheSpec(**fields)))
        return str(file)

    return save_spec


def test_the_document(run) -> None:
    ran = run("select", "--sparse", "skip_softmax", "--no-v2", "--beam", 4, "--json")
    document = ran.document
    assert (ran.status, ran.err, ran.out.count("\n")) == (0, "", 1)
    assert list(document) == KEYS
    assert (document["ruleset"], document["status"]) == ("after-21553", "clean")
    assert (document["manager"], document["predicted"], document["allocator"]) == ("v1", "v1", "trtllm-v1")
    assert (document["seats"], document["index_rows"]) == (8, 16)
    assert (document["inputs"]["v2"], document["inputs"]["beam_width"]) == ("false", 4)
    assert document["path"] == [
        "selector: skip-softmax-on-v1 -> v1",
        "validator: v1-needs-no-check -> keep",
        "predictor: otherwise-v1 -> v1",
    ]
    assert document["findings"] == []


def test_the_rule_set_of_before_has_a_finding(run) -> None:
    ran = run("select", "--sparse", "skip_softmax", "--attention-dp", "--ruleset", "before-21553", "--json")
    document = ran.document
    assert (ran.status, document["status"]) == (1, "findings")
    assert (document["manager"], document["predicted"], document["seats"]) == ("v1", "v2", 16)
    assert [finding["rule"] for finding in document["findings"]] == ["manager", "follows-dense-rule"]
    assert document["inputs"]["v2_beams"] is False
    report = run("select", "--sparse", "skip_softmax", "--ruleset", "before-21553")
    assert "! manager" in report.out
    assert "let the predictor ask for every reason" in report.out


def test_explain_names_every_rule_consulted_and_its_source(run) -> None:
    ran = run("select", "--sparse", "dsa", "--sleep", "--explain")
    assert ran.status == 1
    assert "selector: rocket does not apply" in ran.out
    assert "selector: dsa-v2 -> v2-dsa" in ran.out
    assert "https://github.com/NVIDIA/TensorRT-LLM/pull/16060" in ran.out
    assert "V2 lacks sleep" in ran.out
    document = run("select", "--sparse", "dsa", "--sleep", "--explain", "--json").document
    assert list(document) == [*KEYS, "consulted"]
    assert list(document["consulted"][0]) == ["table", "rule", "applied", "outcome", "source"]
    assert document["refusal"]["rule"] == "sparse-cannot-fall-back"
    assert (document["manager"], document["seats"], document["allocator"]) == (None, None, None)


def test_a_fall_back_is_clean_and_warns(run) -> None:
    ran = run("select", "--sleep")
    assert ran.status == 0
    assert "v1, in the place of v2" in ran.out
    assert "! warning" in ran.out


def test_a_model_and_its_layout(run, reference) -> None:
    document = run("select", reference, "--layout", "adp4", "--kv-dtype", "fp8", "--quota", "1GiB", "--json").document
    assert document["manager"] == "v2-hybrid-qsa"
    assert document["allocator"] == "trtllm-v2-qsa-packed"
    assert document["inputs"]["attention_dp"] is True
    numbers = {number["name"]: number["value"] for number in document["numbers"]}
    token_bytes = 12 * (2 * 2 * 256 + 256) + 12
    assert numbers["bytes per token"] == token_bytes == 15372
    assert numbers["budget"] == (1 << 30) // token_bytes
    assert document["kv_dtype"] == {"requested": "fp8", "effective": "fp8", "refusal": None, "reference": None}
    report = run("select", reference, "--quota", "1GiB")
    assert "qwen3_8_flash_next" in report.out
    assert "tokens" in report.out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ("v2", "v2")),
        (["--no-v2"], ("v2", "v1")),
        (["--no-v2", "--ruleset", "consistent"], ("v2", "v2")),
        (["--no-v2", "--geometry", "uniform"], ("v1", "v1")),
        (["--v2-auto", "--geometry", "uniform", "--model-prefers-v2"], ("v2", "v1")),
        (["--no-v2", "--sparse", "skip_softmax"], ("v1", "v1")),
        (["--hybrid", "some", "--no-v2", "--py-mamba"], ("v1-hybrid-python", "v1")),
        (["--hybrid", "some", "--disaggregated", "--transceiver", "python-nixl"], ("v2-hybrid", "v2")),
        (["--hybrid", "some", "--disaggregated", "--transceiver", "python-ucx"], (None, "v2")),
        (["--hybrid", "some", "--reuse", "--rebalance"], (None, "v2")),
        (["--hybrid", "some", "--mamba-preference", "mixed", "--no-v2"], ("v1-hybrid-python", "v1")),
        (["--beam", "4", "--no-v2-beams"], (None, "v1")),
    ],
)
def test_options_win_over_the_model(run, save, options, expected) -> None:
    """A model whose layers differ in head dim."""
    document = run("select", save(layers=(DENSE, WIDE)), *options, "--json").document
    assert (document["manager"], document["predicted"]) == expected


def test_kv_formats_and_references(run) -> None:
    ran = run("select", "--kv-dtype", "nvfp4", "--kv-formats", "bf16,fp8", "--json")
    assert (ran.status, ran.document["status"]) == (1, "rejected")
    assert ran.document["kv_dtype"]["effective"] is None
    assert "have only bf16, fp8" in ran.document["kv_dtype"]["refusal"]
    ran = run("select", "--kv-dtype", "fp8", "--references", "none,fp8", "--json")
    assert (ran.status, ran.document["kv_dtype"]["reference"]) == (0, "fp8")
    ran = run("select", "--kv-dtype", "fp8", "--references", "none", "--json")
    assert (ran.status, ran.document["kv_dtype"]["reference"]) == (0, None)
    faulty = ("--ruleset", "fault:reference-without-kv-selector")
    ran = run("select", "--kv-dtype", "fp8", "--references", "none,fp8", *faulty, "--json")
    assert ran.status == 1
    assert [finding["rule"] for finding in ran.document["findings"]] == ["kv-dtype"]
    ran = run("select", "--kv-dtype", "nvfp4", "--kv-formats", "bf16,fp8", "--ruleset", "fault:kv-dtype-falls-back")
    assert "the KV format nvfp4 is asked for, and the run has fp8" in " ".join(ran.out.split())
    assert run("select", "--references", "none").out.count("compared with the reference without a KV selector") == 1


def test_the_audit_document(run) -> None:
    ran = run("select", "--audit", "after-21553", "--json")
    document = ran.document
    assert (ran.status, ran.err, ran.out.count("\n")) == (1, "", 1)
    assert list(document) == ["ruleset", "points", "disagreements"]
    assert (document["ruleset"], document["points"]) == ("after-21553", 14155776)
    rows = document["disagreements"]
    assert all(list(row) == ["check", "inputs", "selected", "predicted", "path", "derived"] for row in rows)
    hole = {"v2": "false", "geometry": "variable"}
    assert [(row["check"], row["derived"]) for row in rows if row["inputs"] == hole] == [("manager", False)]


def test_the_audit_report(run) -> None:
    ran = run("select", "--audit", "before-21553")
    assert ran.status == 1
    assert "manager: sparse skip_softmax; v2 true" in ran.out
    assert "predictor: flag-and-features -> v2" in ran.out
    assert "derived from the rules" in ran.out
    assert "14,155,776 points" in ran.out
    ran = run("select", "--audit", "consistent")
    assert (ran.status, "✓ selector and predictor agree everywhere" in ran.out) == (0, True)
    ran = run("select", "--audit", "fault:kv-dtype-falls-back")
    assert (ran.status, "kv-dtype: unsupported bf16" in ran.out) == (1, True)


BAD = [
    (["--sparse", "dense"], "--sparse: found 'dense', needs one of none, skip_softmax"),
    (["--beam", "x"], "--beam: found 'x', needs a whole number"),
    (["--beam", "0"], "--beam: found 0, needs a whole number from 1"),
    (["--max-batch", "-1"], "--max-batch: found -1"),
    (["--hybrid", "two"], "--hybrid: found 'two', needs one of no, zero, some"),
    (["--geometry", "odd"], "--geometry: found 'odd'"),
    (["--mamba-preference", "x"], "--mamba-preference: found 'x', needs one of unset, mixed, cpp"),
    (["--transceiver", "python"], "--transceiver: found 'python', needs one of cpp-nixl"),
    (["--ruleset", "after"], "--ruleset: unknown rule set 'after', needs one of before-21553"),
    (["--audit", "fault:x"], "--audit: unknown rule set 'fault:x', needs one of fault:skip-softmax"),
    (["--audit", "consistent", "--sparse", "dsa"], "--audit and --sparse were both given, but"),
    (["x.json", "--audit", "consistent"], "--audit and CONFIG were both given, but"),
    (["--v2", "--v2-auto"], "--v2-auto and --v2 or --no-v2 were both given, but"),
    (["--kv-dtype", "fp9"], "--kv-dtype: found 'fp9'"),
    (["--kv-formats", "fp8,"], "--kv-formats: found 'fp8,', needs names with commas"),
    (["--references", "all"], "--references: found 'all', needs one of fp32"),
    (["--layout", "tp2", "--pp", "2"], "--layout and --pp were both given"),
    (["--pp", "0"], "--pp: found 0"),
    (["--quota", "1GiB"], "--quota: given without CONFIG"),
    (["--rank", "1"], "--rank: given without CONFIG"),
    (["no-such-file.json"], "no-such-file.json"),
    (["--no-such"], "No such option"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_one_line(run, options, message) -> None:
    ran = run("select", *options)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"kvsan: {message}")
    assert ran.err.count("\n") == 1


def test_selecting_imports_nothing_heavy(reference) -> None:
    code = (
        "import sys; from kvsan.cli import run; status = run(sys.argv[1:]);"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "select", str(reference), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not {"numpy", "hypothesis", "islpy", "torch", "rich"} & set(done.stderr.split())


# The allocator follows the selection.


@pytest.mark.parametrize(
    ("fields", "allocator"),
    [
        ({"layers": (DENSE, WIDE)}, "trtllm-v2"),
        ({"layers": (DENSE, STATE)}, "trtllm-v2"),
        ({"layers": (LatentLayer(latent_dim=512, rope_dim=64),), "sparse_algorithm": "dsa"}, "trtllm-v2"),
        ({"layers": (DENSE,), "sparse_algorithm": "skip_softmax"}, "trtllm-v2"),
    ],
)
def test_check_auto_runs_the_allocator_of_the_manager(run, save, fields, allocator) -> None:
    file = save(**fields)
    ran = run("check", file, "--allocator", "auto", "--json")
    assert (ran.status, ran.document["allocator"]) == (0, allocator)
    assert run("select", file, "--json").document["allocator"] == allocator


def test_check_auto_of_the_reference_model(run, reference) -> None:
    ran = run("check", reference, "--allocator", "auto", "--tp", 2, "--kv-dtype", "fp8", "--json")
    assert ran.document["allocator"] == "trtllm-v2-qsa-packed"
    assert ran.document["side_planes_bytes"] == 98688
    ranks = run("check", reference, "--allocator", "auto", "--pp", 2, "--all-ranks", "--json").document["ranks"]
    assert {rank["allocator"] for rank in ranks} == {"trtllm-v2-qsa-packed"}


def test_check_auto_is_refused_where_the_engine_refuses(run, save) -> None:
    file = save(layers=(DENSE, STATE), sparse_algorithm="dsa")
    ran = run("check", file, "--allocator", "auto", "--json")
    assert (ran.status, ran.document["status"]) == (1, "rejected")
    assert "the engine selects no cache manager" in ran.document["rejection"]["message"]
    assert ran.document["rejection"]["remedy"]


def test_check_auto_says_which_manager_nobody_lays_out(run, save) -> None:
    file = save(layers=(DENSE,), sparse_algorithm="rocket")
    ran = run("check", file, "--allocator", "auto")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("kvsan: --allocator: the engine would hold the manager v1-rocket, which no allocator")


def test_every_rule_set_is_audited(run) -> None:
    statuses = {ruleset.name: run("select", "--audit", ruleset.name, "--json").status for ruleset in RULE_SETS}
    assert statuses == {"before-21553": 1, "after-21553": 1, "consistent": 0}
