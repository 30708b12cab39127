"""``kvsan check CASE``: a saved case run again, and whether it still fails; bad case files in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from kvsan.ci.cases import MAX_CASE_BYTES, Case, FoundRule, encode_case, save_case
from kvsan.ci.faults import FAULTS, fault_named, rules_fired
from kvsan.model.layers import LatentLayer
from kvsan.model.spec import AttentionLayer, CacheSpec

CANARY = fault_named("fault:canary")
SOUND = CacheSpec(layers=(AttentionLayer(kv_heads=2, head_dim=64),), slots=2)


def saved(folder: Path, allocator: str, spec: CacheSpec, *rules: str) -> Path:
    found = tuple(FoundRule(rule=rule, message="as it was") for rule in rules)
    return save_case(Case(allocator=allocator, input=spec, found=found), folder)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.kind == "layout"], ids=lambda fault: fault.name)
def test_every_fault_fails_on_its_minimum(run, tmp_path, fault) -> None:
    path = saved(tmp_path, fault.name, fault.minimum, *fault.rules)
    ran = run("check", path, "--json")
    assert (ran.status, ran.err) == (1, "")
    document = ran.document
    assert document["allocator"] == fault.name
    assert document["case"] == {
        "path": str(path),
        "rules": list(fault.rules),
        "rules_now": document["case"]["rules_now"],
        "still_fails": True,
    }
    assert set(document["case"]["rules_now"]) == rules_fired(fault.minimum, fault.name)
    assert msgspec.convert(document["spec"], CacheSpec) == fault.minimum


def test_a_case_that_is_mended_says_so(run, tmp_path) -> None:
    path = saved(tmp_path, "trtllm-v2", SOUND, "alias")
    ran = run("check", path, "--json")
    assert ran.status == 0
    assert ran.document["case"] == {"path": str(path), "rules": ["alias"], "rules_now": [], "still_fails": False}
    assert "no longer breaks alias" in run("check", path).out


def test_the_same_case_under_another_allocator(run, tmp_path) -> None:
    path = saved(tmp_path, "fault:canary", CANARY.minimum, "alias")
    assert "still breaks alias" in run("check", path).out
    ran = run("check", path, "--allocator", "trtllm-v2", "--json")
    assert (ran.status, ran.document["case"]["still_fails"], ran.document["allocator"]) == (0, False, "trtllm-v2")


def test_a_case_that_breaks_another_rule_now(run, tmp_path) -> None:
    path = saved(tmp_path, "fault:canary", CANARY.minimum, "bounds")
    ran = run("check", path, "--json")
    assert ran.status == 1, "there are findings"
    assert ran.document["case"]["still_fails"] is False


def test_a_hand_written_case_fails_with_any_rule(run, tmp_path) -> None:
    spec = {"kvsan": "spec", "layers": [{"kind": "attention", "kv_heads": 1, "head_dim": 128}]}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"kvsan": "case", "version": 1, "allocator": "fault:canary", "input": spec}))
    ran = run("check", path, "--json")
    assert (ran.status, ran.document["case"]["still_fails"]) == (1, True)
    assert ran.document["case"]["rules"] == []
    path.write_text(json.dumps({"kvsan": "case", "version": 1, "allocator": "trtllm-v2", "input": spec}))
    ran = run("check", path, "--json")
    assert (ran.status, ran.document["case"]["still_fails"]) == (0, False)


def test_a_refusal_that_is_the_allocators_right_is_no_failure(run, tmp_path) -> None:
    """Latent layers are outside of what QSA supports: still exit status 1, since nothing was built."""
    path = saved(tmp_path, "trtllm-v2-qsa-packed", CacheSpec(layers=(LatentLayer(latent_dim=512),)), "rejected")
    ran = run("check", path, "--json")
    assert ran.status == 1
    assert ran.document["rejection"]["supported"] is False
    assert ran.document["case"]["still_fails"] is False
    legacy = saved(tmp_path, "trtllm-v2-qsa-legacy", fault_named("fault:bare-assert").minimum, "rejected")
    assert run("check", legacy, "--json").document["case"]["still_fails"] is True


def test_a_saved_spec_is_no_case(run, tmp_path) -> None:
    path = tmp_path / "spec.json"
    path.write_bytes(msgspec.json.encode(SOUND))
    assert "case" not in run("check", path, "--json").document


# Strangers' cases.


@pytest.mark.parametrize("name", ["os:system", "own_allocators:packed", "shutil:rmtree"])
def test_a_case_from_a_stranger_never_runs_code(run, own, tmp_path, monkeypatch, name) -> None:
    called = []
    monkeypatch.setattr(os, "system", called.append)
    path = saved(tmp_path, name, SOUND, "alias")
    for command in ("check", "shrink"):
        ran = run(command, path)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.count("\n") == 1
        assert "code is never loaded because a file says so" in ran.err
        assert "printed by an allocator" not in ran.err
    assert not called


def test_an_own_allocator_counts_when_it_is_given_too(run, own, tmp_path) -> None:
    path = saved(tmp_path, f"{own}:bare", SOUND, "unexplained-rejection")
    ran = run("check", path, "--allocator", f"{own}:bare", "--json")
    assert (ran.status, ran.document["case"]["still_fails"]) == (1, True)


def test_what_is_no_allocator_is_not_called_even_when_it_is_given(run, tmp_path, monkeypatch) -> None:
    called = []
    monkeypatch.setattr(os, "system", called.append)
    path = saved(tmp_path, "os:system", SOUND, "alias")
    for command in ("check", "shrink"):
        ran = run(command, path, "--allocator", "os:system")
        assert (ran.status, ran.out) == (2, "")
        assert "needs a Python function that takes a CacheSpec" in ran.err
    assert not called


def _text(**fields: object) -> bytes:
    case = Case(allocator="trtllm-v2", input=SOUND)
    return json.dumps(json.loads(encode_case(case)) | fields).encode()


LAYERS = json.loads(encode_case(Case(allocator="trtllm-v2", input=SOUND)))["input"]

BAD = {
    "version 0": _text(version=0),
    "version 2": _text(version=2),
    "version text": _text(version="1"),
    "no version": _text(version=None),
    "unknown field": _text(comment="hi"),
    "no allocator": json.dumps({"kvsan": "case", "version": 1, "input": LAYERS}).encode(),
    "20,000 layers": _text(input=LAYERS | {"layers": LAYERS["layers"] * 20_000}),
    "layers as a number": _text(input=LAYERS | {"layers": 10**12}),
    "truncated": _text()[:-9],
    "nothing": b"",
    "deep": b'{"kvsan":"case","version":1,"input":' + b"[" * 100_000,
    "NaN": _text().replace(b'"slots": 2', b'"slots": NaN'),
    "no UTF-8": _text().replace(b"attention", b"att\xff\xfe"),
    "unknown allocator": _text(allocator="trtllm-v9"),
    "unknown fault": _text(allocator="fault:nothing"),
    "control characters": _text(allocator="a\u001b[31mb\nc"),
    "a long allocator": _text(allocator="x" * 100_000),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", ["check", "shrink"])
def test_a_bad_case_is_one_line(run, tmp_path, command, name) -> None:
    path = tmp_path / "case.json"
    path.write_bytes(BAD[name])
    ran = run(command, path)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert ran.err.rstrip("\n").isprintable()
    assert ran.err.startswith("kvsan: ")
    assert len(ran.err) < 700
    assert os.listdir(tmp_path) == ["case.json"]


@pytest.mark.parametrize("command", ["check", "shrink"])
def test_what_is_no_file_of_a_case_is_one_line(run, tmp_path, command) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_CASE_BYTES * 100)
    for name in ("missing", "fifo", "folder", "huge"):
        ran = run(command, tmp_path / name)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.count("\n") == 1
        assert name in ran.err


@pytest.mark.parametrize("command", ["check", "shrink"])
def test_a_case_that_is_too_large_is_told_as_a_case(run, tmp_path, command) -> None:
    path = tmp_path / "case.json"
    text = encode_case(Case(allocator="fault:canary", input=CANARY.minimum))
    path.write_bytes(text + b" " * (MAX_CASE_BYTES - len(text) + 1))
    ran = run(command, path)
    assert (ran.status, ran.out) == (2, "")
    problem = f"a file of {MAX_CASE_BYTES + 1} B, needs at most {MAX_CASE_BYTES} B"
    assert ran.err == f"kvsan: {path}: {problem}\n"
