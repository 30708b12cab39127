"""A transfer with a process for each rank: what is moved, and that no process is left, whatever happens."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from kvsan.ci.transfer_processes import ProcessesFailed, move_between_processes
from kvsan.kernels.transfers.child import Job
from kvsan.model.errors import SpecError
from kvsan.model.spec import AttentionLayer, CacheSpec
from kvsan.sim.transfer.pair import Pair

SPEC = CacheSpec(layers=(AttentionLayer(kv_heads=2, head_dim=8),), tokens_per_block=4)
JOB = Job(
    Pair(source=SPEC, destination=msgspec.structs.replace(SPEC, tokens_per_block=2)),
    "transfer", "trtllm-v2", "trtllm-v2", "cpu", 1, 1, 60.0, message_bytes=100,
)  # fmt: skip


def test_two_processes_through_gloo() -> None:
    """In messages of 100 bytes, which cut runs; K and V of two heads x 8 x bf16 x 8 tokens are moved."""
    one, other = move_between_processes(JOB)
    assert one.bytes == other.bytes == 2 * 2 * 8 * 2 * 8
    assert one.differences == other.differences == ()
    assert min(one.seconds, other.seconds, one.plain_seconds) > 0


def stub(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """Return the name of a child module that runs ``body``, having noted its process id."""
    noted = f"pathlib.Path({str(folder)!r}, 'pid-' + sys.argv[2]).write_text(str(os.getpid()))"
    (folder / "stub_child.py").write_text(f"import os, pathlib, sys, time\n{noted}\n{body}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    return "stub_child"


def left(folder: Path) -> list[int]:
    """Return the noted processes that are still there."""
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit(7)", "ended with status 7"),
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("sys.exit(7) if sys.argv[2] == '1' else time.sleep(100)", "process 1 of 2 ended with status 7"),
        ("time.sleep(100)", "no answer from processes 0, 1 in time"),
    ],
)
def test_a_process_that_does_not_answer_ends_all(tmp_path, monkeypatch, body: str, words: str) -> None:
    child = stub(tmp_path, monkeypatch, body)
    started = time.monotonic()
    with pytest.raises(ProcessesFailed, match=words):
        move_between_processes(msgspec.structs.replace(JOB, seconds=1.0), child=child)
    assert time.monotonic() - started < 20
    assert left(tmp_path) == []


def test_an_interrupt_ends_all(tmp_path, monkeypatch) -> None:
    from kvsan.ci import transfer_processes

    real, raised = time.sleep, []

    def interrupt(seconds: float) -> None:
        if not raised and len(list(tmp_path.glob("pid-*"))) == 2:
            raised.append(True)
            raise KeyboardInterrupt
        real(seconds)

    child = stub(tmp_path, monkeypatch, "time.sleep(100)")
    monkeypatch.setattr(transfer_processes.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        move_between_processes(JOB, child=child)
    assert left(tmp_path) == []


def test_what_cannot_be_done_is_bad_input() -> None:
    with pytest.raises(SpecError, match="--processes: found 66 ranks on both sides, needs at most 64"):
        move_between_processes(msgspec.structs.replace(JOB, senders=65))


def test_an_error_of_a_rank_is_told(tmp_path, monkeypatch) -> None:
    body = (
        "import msgspec\n"
        "text = 'SpecError: --device: needs 2 GPUs' if sys.argv[2] == '1' else 'ValueError: x'\n"
        "if sys.argv[2] == '0': time.sleep(100)\n"
        "pathlib.Path(sys.argv[1]).with_name('answer-1').write_bytes(msgspec.msgpack.encode({'error': text}))"
    )
    with pytest.raises(SpecError, match="--device: needs 2 GPUs"):
        move_between_processes(JOB, child=stub(tmp_path, monkeypatch, body))
