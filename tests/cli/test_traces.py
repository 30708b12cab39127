"""``fuzz --traces``, and ``check`` and ``shrink`` for the case of a trace."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvsan.ci.cases import Case, FoundRule, encode_input, save_case
from kvsan.ci.faults import fault_named
from kvsan.sim.cache.trace import Operation, Trace

FAULT = fault_named("fault:free-at-output")
NAMED = Path(__file__).parents[2] / "examples" / "cases" / "traces" / "beam-width-4.json"


def saved(folder: Path, trace: Trace = FAULT.trace, allocator: str = FAULT.name) -> Path:
    found = (FoundRule(rule="in-flight", message="as it was"),)
    return save_case(Case(allocator=allocator, input=trace, found=found), folder)


def test_fuzz_traces(run, tmp_path) -> None:
    options = ["--allocator", "fault:partial-allocation-kept", "--max-examples", "4", "--cases", tmp_path]
    ran = run("fuzz", "--traces", *options, "--json")
    assert ran.status == 1
    document = ran.document
    assert [fault["rule"] for fault in document["faults"]] == ["conservation"]
    assert document["faults"][0]["size"] == 1
    assert document["operations"] >= document["examples"] == 4
    assert document["coverage"]["done"]["admit"] > 0
    report = run("fuzz", "--traces", *options).out
    assert "smallest trace:" in report
    assert "1. admit request 0 with 2 tokens of text 0" in report


def test_fuzz_traces_of_a_sound_cache(run, tmp_path) -> None:
    ran = run("fuzz", "--traces", "--allocator", "trtllm-v2", "--max-examples", "3", "--cases", tmp_path / "new")
    assert ran.status == 0
    assert "no rule is broken outside known limits" in ran.out
    assert not (tmp_path / "new").exists()


def test_a_fault_of_a_running_cache_needs_traces(run) -> None:
    ran = run("fuzz", "--allocator", FAULT.name, "--max-examples", "1")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == f"kvsan: --allocator: {FAULT.name} is a fault of running caches: add --traces\n"


def test_traces_have_specs_of_their_own(run) -> None:
    ran = run("fuzz", "--traces", "--allocator", "trtllm-v2", "--family", "dense", "--max-examples", "1")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == "kvsan: --family: traces are drawn on small specs of their own: leave it out\n"


def test_check_runs_a_trace_again(run, tmp_path) -> None:
    path = saved(tmp_path)
    ran = run("check", path, "--json")
    document = ran.document
    assert (ran.status, document["status"], document["operations"]) == (1, "findings", 4)
    assert document["case"] == {
        "path": str(path),
        "rules": ["in-flight"],
        "rules_now": ["in-flight"],
        "still_fails": True,
    }
    assert msgspec.convert(document["trace"], Trace) == FAULT.trace
    report = run("check", path)
    assert "4. admit request 0 with 1 token of text 0" in report.out
    assert "still breaks in-flight" in report.out


def test_check_of_a_trace_under_the_sound_base(run, tmp_path) -> None:
    path = saved(tmp_path)
    ran = run("check", path, "--allocator", "trtllm-v2", "--json")
    assert (ran.status, ran.document["status"], ran.document["case"]["still_fails"]) == (0, "clean", False)
    named = run("check", NAMED)
    assert named.status == 0
    assert "let the beams of request 0 go on from beams 0, 0, 1, 3" in named.out


def test_check_says_what_was_refused(run, tmp_path) -> None:
    trace = msgspec.structs.replace(FAULT.trace, operations=(Operation("free", 0), *FAULT.trace.operations))
    path = saved(tmp_path, trace)
    assert run("check", path, "--json").document["refused"] == [{"operation": 0, "reason": "unknown-request"}]
    assert "1. free request 0 (refused: unknown-request)" in run("check", path).out


def test_a_trace_has_its_spec_with_it(run, tmp_path) -> None:
    ran = run("check", saved(tmp_path), "--tp", "2")
    assert (ran.status, ran.out) == (2, "")
    assert "--tp: the case is a trace, which has its spec with it: leave the option out" in ran.err


def test_a_trace_without_a_case_is_one_line(run, tmp_path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(encode_input(FAULT.trace))
    ran = run("check", path)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == f"kvsan: {path}: found a kvsan trace, needs a saved case with it as its input\n"


def test_an_allocator_that_cannot_run_it(run, tmp_path) -> None:
    ran = run("check", saved(tmp_path), "--allocator", "nothing")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("kvsan: --allocator: 'nothing': unknown allocator 'nothing'")


def test_shrink_a_trace(run, tmp_path) -> None:
    text = "admit 1 3 2;admit 2 1;step 6 2;complete;extend 1 2;step 2;free 1;admit 0 5"
    operations = tuple(Operation(kind, *map(int, rest)) for kind, *rest in map(str.split, text.split(";")))
    spec = msgspec.structs.replace(FAULT.trace.spec, tokens_per_block=2, slots=4)
    path = saved(tmp_path, Trace(spec=spec, operations=operations))
    ran = run("shrink", path, "--json")
    assert (ran.status, ran.document["rule"]) == (1, "in-flight")
    assert (ran.document["size"], ran.document["size_before"]) == (4, 8)
    assert msgspec.convert(ran.document["trace"], Trace) == FAULT.trace
    clean = run("shrink", path, "--allocator", "trtllm-v2")
    assert (clean.status, "nothing to shrink" in clean.out) == (0, True)


def test_shrink_keeps_a_rule(run, tmp_path) -> None:
    ran = run("shrink", saved(tmp_path), "--rule", "alias")
    assert (ran.status, ran.out) == (2, "")
    assert "does not break 'alias' on this case, it breaks in-flight" in ran.err


def test_bench_knows_traces(run, monkeypatch) -> None:
    from kvsan.ci.bench import traces

    monkeypatch.setattr(traces, "TRACES", 3)
    monkeypatch.setattr(traces, "ROUNDS", 1)
    monkeypatch.setattr(traces, "TRACE_ALLOCATORS", ("trtllm-v2",))
    document = run("bench", "traces", "--json").document
    assert document["ratio_limit"] == 0.5
    assert [rate["allocator"] for rate in document["rates"]] == ["trtllm-v2"]
    assert document["rates"][0]["ratio"] > 0
