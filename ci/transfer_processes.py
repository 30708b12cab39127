"""``move_between_processes``: a transfer with a process for each rank, and no process left when it ends.

The processes meet in a folder of their own, which is removed with them, whatever happens: Ctrl-C, one that dies, one
that says nothing for too long. Each watches that this process is alive, should it be killed outright.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from ..kernels.transfers.child import Job, Report
from ..model.errors import SpecError

MAX_PROCESSES: Final = 64
"""Most ranks of both sides together that are given a process."""
POLL_SECONDS: Final = 0.05
KILL_SECONDS: Final = 10


class ProcessesFailed(Exception):
    """The transfer did not come to its end; the text says which process, and how."""


def move_between_processes(job: Job, *, child: str = "kvsan.kernels.transfers.child") -> list[Report]:
    """Carry out ``job`` and return what each process reports, in their order.

    Raises ``SpecError`` for too many ranks and for a device that is not there, and ``ProcessesFailed`` for a process
    that dies, fails, or is not done in ``job.seconds`` for the start and as much for the transfer.
    """
    world = job.senders + job.receivers
    if world > MAX_PROCESSES:
        raise SpecError("--processes", f"found {world} ranks on both sides, needs at most {MAX_PROCESSES}")
    with tempfile.TemporaryDirectory(prefix="kvsan-peers-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "job").write_bytes(msgspec.msgpack.encode(job))
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        processes = [
            stack.enter_context(_process([child, str(folder / "job"), str(number), str(os.getpid())], environment))
            for number in range(world)
        ]
        deadline = time.monotonic() + 2 * job.seconds
        return _answers(folder, processes, deadline)


@contextlib.contextmanager
def _process(words: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a Python process that runs a module, and end it afterwards."""
    command = [sys.executable, "-m", *words]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)


def _answers(folder: Path, processes: list[subprocess.Popen[bytes]], deadline: float) -> list[Report]:
    """Return the processes' reports; the first that fails ends the wait."""
    reports: dict[int, Report] = {}
    while len(reports) < len(processes):
        for number, process in enumerate(processes):
            if number in reports:
                continue
            ended = process.poll()
            answer = folder / f"answer-{number}"
            if answer.exists():
                report = reports[number] = msgspec.msgpack.decode(answer.read_bytes(), type=Report)
                if report.error.startswith("SpecError: "):
                    field, _, problem = report.error.removeprefix("SpecError: ").partition(": ")
                    raise SpecError(field, problem)
                if report.error:
                    raise ProcessesFailed(f"process {number} of {len(processes)} failed: {report.error}")
            elif ended is not None:
                raise ProcessesFailed(f"process {number} of {len(processes)} ended {_how(ended)}")
        if time.monotonic() > deadline:
            waiting = [number for number in range(len(processes)) if number not in reports]
            raise ProcessesFailed(f"no answer from processes {', '.join(map(str, waiting))} in time")
        time.sleep(POLL_SECONDS)
    return [reports[number] for number in range(len(processes))]


def _how(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-status).name}"
    return f"with status {status}"
