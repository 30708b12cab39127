"""``kvsan peers --replay``: what is printed, what is bad input, and what the processes are told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kvsan.ci.cases import Case, FoundRule, save_case
from kvsan.ci.transfer_faults import TRANSFER_FAULTS

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
    pytest.skip("needs torch and triton", allow_module_level=True)  # importing triton settles how it runs

CONV = next(fault for fault in TRANSFER_FAULTS if fault.name == "fault:conv-state-as-one")
PAIR = ("--src", "tp1", "--dst", "tp2", "--replay")


@pytest.fixture
def spec(tmp_path) -> Path:
    layers = [{"kind": "attention", "kv_heads": 2, "head_dim": 8}]
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"kvsan": "spec", "layers": layers, "tokens_per_block": 2}))
    return path


def test_a_replay_is_reported(run, spec) -> None:
    ran = run("peers", spec, *PAIR, "--json")
    assert (ran.status, ran.document["status"]) == (0, "clean")
    replay = ran.document["replay"]
    assert (replay["findings"], replay["processes"], replay["copies"]) == ([], 0, len(ran.document["copies"]))
    assert replay["bytes"] == 2 * ran.document["bytes"], "two blocks are moved"
    assert replay["rows_probed"] > 0 < replay["ratio"]
    report = run("peers", spec, *PAIR).out.replace("\n", " ")
    assert "as the simulator says" in report
    assert "times the speed of a plain copy" in report


def test_a_saved_pair_is_replayed(run, tmp_path) -> None:
    found = (FoundRule(rule="record-layout", message="as it was"),)
    path = save_case(Case(allocator=CONV.name, input=CONV.minimum, found=found), tmp_path)
    document = run("peers", path, "--replay", "--json").document
    assert (document["status"], document["case"]["still_fails"]) == ("findings", True)
    assert (document["replay"]["findings"], document["replay"]["rows_probed"]) == ([], 0)


def test_nothing_is_replayed_of_a_refused_pair(run, spec) -> None:
    ran = run("peers", spec, *PAIR, "--dst-kv-dtype", "fp8", "--json")
    assert (ran.status, ran.document["status"], ran.document["replay"]) == (1, "refused", None)


def test_processes_are_told_the_pair_and_heard(run, spec, monkeypatch) -> None:
    from kvsan.ci import transfer_processes
    from kvsan.kernels.transfers.child import Job, Report
    from kvsan.kernels.transfers.one_device import Difference

    jobs: list[Job] = []
    answers: list[list[Report]] = []

    def moved(job: Job) -> list[Report]:
        jobs.append(job)
        if not answers:
            raise transfer_processes.ProcessesFailed("process 1 of 3 ended by SIGKILL")
        return answers.pop()

    monkeypatch.setattr(transfer_processes, "move_between_processes", moved)
    wrong = Report((Difference("destination", 1, 0, 3, 17, 1, 2),), 0, 64, 0.5, 0.25)
    answers.append([Report((), 128, 0, 1.0, 0.5), Report((), 0, 64, 0.5, 0.25), wrong])
    ran = run("peers", spec, *PAIR, "--processes", "--timeout", "9", "--json")
    replay = ran.document["replay"]
    assert (ran.status, ran.document["status"]) == (1, "clean")
    assert (replay["processes"], replay["bytes"], replay["seconds"], replay["ratio"]) == (3, 128, 1.0, 0.5)
    assert "3 bytes of pool 0 on the destination's rank 1" in replay["findings"][0]["message"]
    assert (jobs[0].senders, jobs[0].receivers, jobs[0].seconds, jobs[0].device) == (1, 2, 9.0, "cpu")
    assert (jobs[0].method, jobs[0].source_allocator, jobs[0].destination_allocator) == ("transfer", *["trtllm-v2"] * 2)
    ran = run("peers", spec, *PAIR, "--processes")
    assert ran.status == 1
    assert "the transfer did not end: process 1 of 3 ended by SIGKILL" in ran.out.replace("\n", " ").replace("  ", " ")


def test_bench_transfer(run, spec) -> None:
    from kvsan.ci.bench import transfers

    options = ("bench", "transfer", "--device", "cpu", "--config", spec)
    ran = run(*options, "--memory", "1MiB", "--json")
    assert ran.status == 0
    pairs = ran.document["pairs"]
    assert [(pair["source"], pair["destination"]) for pair in pairs] == [*transfers.PAIRS]
    for pair in pairs:
        assert 2 <= pair["blocks"] <= 512
        assert pair["of_plain_copy"] == pytest.approx(pair["plain_ms"] / pair["ms"])
    assert pairs[0]["bytes"] == pairs[0]["blocks"] * 2 * 2 * 8 * 2, "K and V of 2 heads x 8 x fp8 x 2 tokens"
    ran = run(*options, "--memory", "1KiB")
    assert (ran.status, ran.out) == (2, "")
    assert "--memory: found 1024 B, needs at least" in ran.err


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--save", ""), "--save: found an empty path, needs a folder"),
        (("--save", "/dev/null/x"), "--save: /dev/null is not a folder"),
        (("--device", "cpu"), "--device: found without --replay, needs it"),
        (("--processes",), "--processes: found without --replay, needs it"),
        (("--max-memory", "1GiB"), "--max-memory: found without --replay, needs it"),
        (("--replay", "--device", "tpu"), "--device: found 'tpu', needs one of cpu, cuda"),
        (("--replay", "--max-memory", "1KiB"), "--max-memory: the pools of both sides take"),
        (("--replay", "--max-memory", "much"), "--max-memory: found 'much'"),
        (("--replay", "--timeout", "0"), "--timeout: found 0, needs a whole number from 1 to 86400"),
        (("--matrix", "--replay"), "--replay: found together with --matrix, needs a single pair"),
    ],
)
def test_bad_input_is_one_line(run, spec, options: tuple[str, ...], line: str) -> None:
    ran = run("peers", spec, *options)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"kvsan: {line}")
    assert ran.err.count("\n") == 1
