"""``move_between_processes``: a transfer with a process for each rank, and no process left when it ends.

The processes meet in a folder of their own, which is removed with them, whatever happens: Ctrl-C, one that dies, one
that says nothing for too long. Each watches that this process is alive, should it be killed outright. On GPUs there is
a process for each GPU, where there are more ranks.
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
END_SECONDS: Final = 5
"""How long processes may take to part once all have answered."""
SAID_CHARACTERS: Final = 300
"""How much of a dead process's last line is repeated."""


class ProcessesFailed(Exception):
    """The transfer did not come to its end; the text says which process, and how."""


def move_between_processes(job: Job, *, child: str = "kvsan.kernels.transfers.child") -> list[Report]:
    """Carry out ``job`` and return what each process reports, in their order.

    Raises ``SpecError`` for too many ranks and for a device that is not there, and ``ProcessesFailed`` for a process
    that dies, fails, or is not done in ``job.seconds`` for the start and as much for the transfer.
    """
    ranks, world = job.senders + job.receivers, job.world
    if ranks > MAX_PROCESSES:
        raise SpecError("--processes", f"found {ranks} ranks on both sides, needs at most {MAX_PROCESSES}")
    with tempfile.TemporaryDirectory(prefix="kvsan-peers-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "job").write_bytes(msgspec.msgpack.encode(job))
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if job.device == "cuda":
            environment["TRITON_INTERPRET"] = "0"  # a replay on the host may have set it here
        processes = []
        for number in range(world):
            command = [sys.executable, "-m", child, str(folder / "job"), str(number), str(os.getpid())]
            processes.append(stack.enter_context(_process(command, environment, _said(folder, number))))
        reports = _answers(folder, processes, time.monotonic() + 2 * job.seconds)
        for process in processes:  # a GPU's memory and its links are given back in order
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        return reports


def processes_for(device: str, ranks: int) -> int:
    """Return how many processes have ``ranks`` ranks among them: one each, on GPUs at most as many as there are GPUs.

    Raises ``SpecError`` where there is no GPU.
    """
    if device == "cpu":
        return ranks
    import torch

    count = int(torch.cuda.device_count())
    if not count:
        raise SpecError("--device", "found no GPU that torch can use, needs one at least: use --device cpu")
    return min(ranks, count)


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str], said: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process whose standard error goes to the file ``said``, and end it afterwards."""
    nowhere = subprocess.DEVNULL
    with said.open("wb") as file:
        process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=file, env=environment)
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
        died: list[int] = []
        for number, process in enumerate(processes):
            if number in reports:
                continue
            ended = process.poll()  # before the answer is looked for, which comes first
            answer = folder / f"answer-{number}"
            if answer.exists():
                reports[number] = msgspec.msgpack.decode(answer.read_bytes(), type=Report)
            elif ended is not None:
                died.append(number)
        _raise_failure(folder, processes, reports, died)
        if len(reports) < len(processes) and time.monotonic() > deadline:
            waiting = [number for number in range(len(processes)) if number not in reports]
            raise ProcessesFailed(f"no answer from processes {', '.join(map(str, waiting))} in time")
        time.sleep(POLL_SECONDS)
    return [reports[number] for number in range(len(processes))]


def _raise_failure(
    folder: Path, processes: list[subprocess.Popen[bytes]], reports: dict[int, Report], died: list[int]
) -> None:
    """Raise the error that the others follow from, if there is one: what was asked for, a death, the first to answer.

    Whoever talks to a process that has failed fails too, an instant later.
    """
    failed = [number for number, report in reports.items() if report.error]
    for number in failed:
        if reports[number].error.startswith("SpecError: "):
            field, _, problem = reports[number].error.removeprefix("SpecError: ").partition(": ")
            raise SpecError(field, problem)
    if died:
        number = died[0]
        last = _last_line(_said(folder, number))
        how = _how(processes[number].returncode) + (f", and said: {last}" if last else "")
        raise ProcessesFailed(f"process {number} of {len(processes)} ended {how}")
    if failed:
        number = min(failed, key=lambda each: (folder / f"answer-{each}").stat().st_mtime_ns)
        raise ProcessesFailed(f"process {number} of {len(processes)} failed: {reports[number].error}")


def _said(folder: Path, number: int) -> Path:
    return folder / f"said-{number}"


def _last_line(said: Path) -> str:
    """Return the end of what a process wrote to its standard error; empty where it wrote nothing."""
    with said.open("rb") as file:
        file.seek(max(0, said.stat().st_size - 10 * SAID_CHARACTERS))
        lines = file.read().decode(errors="replace").split("\n")
    text = [" ".join(line.split()) for line in lines if line.strip()]
    return text[-1][-SAID_CHARACTERS:] if text else ""


def _how(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-status).name}"
    return f"with status {status}"
