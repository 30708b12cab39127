"""``kvsan peers --replay``: what is printed, what is bad input, and what the processes are told."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
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


COMMAND = [sys.executable, "-m", "kvsan", "peers", "spec.json", *PAIR, "--processes", "--json"]


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    ("kill_child", "status", "words"), [(False, 130, "kvsan: interrupted"), (True, 1, "ended by SIGKILL")]
)
def test_the_command_and_its_processes_end_together(spec, tmp_path, kill_child: bool, status: int, words: str) -> None:
    """SIGTERM to the command, and the loss of one of its three processes."""
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(
        COMMAND, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    end = time.monotonic() + 60
    while len(children := children_of(process.pid)) < 3:
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(children[1] if kill_child else process.pid, signal.SIGKILL if kill_child else signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, words in out + err) == (status, True), (out, err)
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_closed_standard_streams_disturb_no_process(spec, tmp_path) -> None:
    line = f"{shlex.join(COMMAND)} <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
