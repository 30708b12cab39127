"""A transfer with a process for each rank: what is moved, and that no process is left, whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from kvsan.ci.transfer_processes import ProcessesFailed, move_between_processes, processes_for
from kvsan.kernels.transfers.child import Job
from kvsan.model.errors import SpecError
from kvsan.model.parallel import ParallelLayout
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
    assert one.bytes_sent == other.bytes_received == 2 * 2 * 8 * 2 * 8
    assert one.bytes_received == other.bytes_sent == 0
    assert one.differences == other.differences == ()
    assert min(one.seconds, other.seconds, one.plain_seconds) > 0


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_processes_have_the_ranks_among_them(count: int) -> None:
    """Two ranks of the source and one of the destination: rank by rank, and what stays in a process is not sent."""
    both = msgspec.structs.replace(SPEC, parallel=ParallelLayout(tp=2))
    job = msgspec.structs.replace(JOB, pair=Pair(source=both, destination=SPEC), senders=2, processes=count)
    reports = move_between_processes(job)
    assert [report.differences for report in reports] == [()] * count
    half = 2 * 1 * 8 * 2 * 8
    moved = [(report.bytes_sent, report.bytes_received) for report in reports]
    assert moved == ([(2 * half, 2 * half)] if count == 1 else [(half, 2 * half), (half, 0)])


def test_a_gpu_has_as_many_ranks_as_it_must(monkeypatch) -> None:
    import torch

    assert processes_for("cpu", 5) == 5
    for count, ranks, wanted in ((1, 5, 1), (4, 5, 4), (8, 5, 5)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert processes_for("cuda", ranks) == wanted
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SpecError, match="--device: found no GPU that torch can use"):
        processes_for("cuda", 2)


def stub(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """Return the name of a child module that runs ``body``, having noted its process id; a note is whole or not there,
    as the child may be killed while it writes."""
    place = f"pathlib.Path({str(folder)!r}, 'part-' + sys.argv[2])"
    noted = f"{place}.write_text(str(os.getpid())); {place}.replace({place}.with_name('pid-' + sys.argv[2]))"
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
        ("sys.stderr.write('NCCL\\n  is not\\nwell\\n\\n'); sys.exit(7)", "ended with status 7, and said: well$"),
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


ANSWER = (
    "import msgspec\n"
    "def answer(text):\n"
    "    place = pathlib.Path(sys.argv[1]).with_name('answer-' + sys.argv[2])\n"
    "    place.with_suffix('.part').write_bytes(msgspec.msgpack.encode({'error': text}))\n"
    "    place.with_suffix('.part').replace(place)\n"
)
"""A child's way of answering."""


@pytest.mark.parametrize(
    ("first", "words"),
    [("answer('ValueError: mine')", "process 1 of 2 failed: ValueError: mine"), ("os._exit(9)", "ended with status 9")],
)
def test_the_first_failure_is_told_and_not_what_follows_from_it(tmp_path, monkeypatch, first: str, words: str) -> None:
    """The other process loses its peer, and says so before anybody has looked."""
    import kvsan.ci.transfer_processes as module

    body = f"{ANSWER}if sys.argv[2] == '1':\n    {first}\nelse:\n    time.sleep(1)\n    answer('RuntimeError: reset')"
    monkeypatch.setattr(module, "POLL_SECONDS", 4)
    with pytest.raises(ProcessesFailed, match=words):
        move_between_processes(JOB, child=stub(tmp_path, monkeypatch, body))


def test_kernels_are_compiled_in_processes_on_gpus(tmp_path, monkeypatch) -> None:
    """Though this process may have replayed on the host, and told Triton to interpret."""
    body = f"{ANSWER}answer('ValueError: TRITON_INTERPRET is ' + os.environ['TRITON_INTERPRET'])"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for device, wanted in (("cpu", "1"), ("cuda", "0")):
        job = msgspec.structs.replace(JOB, device=device, processes=1)
        with pytest.raises(ProcessesFailed, match=f"TRITON_INTERPRET is {wanted}"):
            move_between_processes(job, child=stub(tmp_path, monkeypatch, body))


def test_a_parent_that_is_killed_leaves_nothing(tmp_path) -> None:
    """The real processes, while they start: they end, and their folder goes."""
    code = (
        "from tests_job import JOB\nimport msgspec\nfrom kvsan.ci.transfer_processes import move_between_processes\n"
        "if __name__ == '__main__':\n    move_between_processes(JOB)\n"
    )
    job = (
        "from kvsan.kernels.transfers.child import Job\nimport msgspec\n"
        f"JOB = msgspec.msgpack.decode({msgspec.msgpack.encode(JOB)!r}, type=Job)\n"
    )
    (tmp_path / "tests_job.py").write_text(job)
    (tmp_path / "parent.py").write_text(code)
    paths = os.pathsep.join([str(tmp_path), *[path for path in sys.path if path]])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], env=environment)
    wait_until(lambda: len(list(temporary.glob("kvsan-peers-*/said-*"))) == 2)
    process.kill()
    process.wait()
    wait_until(lambda: not list(temporary.iterdir()))


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


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
