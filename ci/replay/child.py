"""The process in which layouts are replayed: ``python -m kvsan.ci.replay.child DEVICE MAX_BYTES WORK ANSWERS``.

``WORK`` and ``ANSWERS`` are the numbers of two pipes, so that whatever prints to the standard output disturbs nothing.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

from ...kernels.device import Device, open_device
from ...kernels.replay import Replayed, Replayer
from ...kernels.traces import replay_trace
from ...model.errors import SpecError
from ...sim.arena.findings import MEMORY_RULES
from ...sim.cache.run import run_trace
from ...sim.checking import check
from ...sim.rejection import Rejected
from .messages import TASKS, Answer, Done, Failed, Gone, Hello, LayoutWork, Task, TraceWork, receive, send

TRACE_MEMORY_RULES = ("freshness",)
"""What of a trace memory can show: bytes that their reader did not write. The others are about bookkeeping."""
PACKAGES = ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "numpy")


def main(arguments: Sequence[str], opened: Callable[[str], Device] = open_device) -> int:
    """Serve batches until the pipe ends; return the exit status."""
    kind, max_bytes, work, answers = arguments[0], int(arguments[1]), int(arguments[2]), int(arguments[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    os.dup2(2, 1)
    try:
        device = opened(kind)
        replayer = Replayer(device, max_bytes=max_bytes, allocated=True)
    except SpecError as error:
        send(answers, Failed("unusable", str(error)))
        return 2
    send(answers, Hello(device.name, versions()))
    gc.collect()
    gc.freeze()  # what was imported is no garbage
    try:
        while True:
            tasks = receive(work, TASKS)
            for answer in _answers(replayer, tasks):
                send(answers, answer)
            send(answers, Done())
    except Gone:
        return 0
    except Exception as error:  # an illegal address leaves the device unusable: the process ends, and says why
        text = " ".join(f"{type(error).__name__}: {error}".split())
        send(answers, Failed("crashed", text))
        return 1


def versions() -> dict[str, str]:
    """Return the versions of the packages that a replay depends on, of those that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _answers(replayer: Replayer, tasks: list[Task]) -> Iterator[Answer]:
    """Yield the answers to ``tasks``: to the layouts, which share launches, then to the traces."""
    layouts = [(task.number, task.work.layout) for task in tasks if isinstance(task.work, LayoutWork)]
    for (number, _), replayed in zip(layouts, replayer.replay(layout for _, layout in layouts), strict=True):
        yield _answer(number, replayed)
    for task in tasks:
        if isinstance(task.work, TraceWork):
            yield _trace_answer(replayer.device, task.number, task.work)


def _trace_answer(device: Device, number: int, work: TraceWork) -> Answer:
    try:
        replayed = replay_trace(device, work.trace, work.allocator)
    except (SpecError, Rejected) as error:
        return Answer(number, None, (), str(error), (), (), True, 0)
    broken = run_trace(work.trace, work.allocator, to_end=True).rules
    return Answer(
        number=number,
        digest=replayed.digest,
        findings=replayed.findings,
        refusal=None,
        notes=(f"{len(work.trace.operations)} operations, {replayed.refused} refused; {replayed.records} accesses",),
        static_rules=tuple([rule for rule in TRACE_MEMORY_RULES if rule in broken]),
        compared_on_host=True,
        size_bytes=replayed.size_bytes,
    )


def _answer(number: int, replayed: Replayed) -> Answer:
    broken = {finding.rule for finding in check(replayed.layout, allocated=True)} if replayed.refusal is None else set()
    return Answer(
        number=number,
        digest=replayed.digest,
        findings=replayed.findings,
        refusal=replayed.refusal,
        notes=replayed.layout.notes,
        static_rules=tuple([rule for rule in MEMORY_RULES if rule in broken]),
        compared_on_host=replayed.compared_on_host,
        size_bytes=sum(max(0, pool.size_bytes) for pool in replayed.layout.pools),
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
