"""The process in which layouts are replayed: ``python -m kvsan.ci.replay.child DEVICE MAX_BYTES WORK ANSWERS``.

``WORK`` and ``ANSWERS`` are the numbers of two pipes, so that whatever prints to the standard output disturbs nothing.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Sequence

from ...kernels.device import Device, open_device
from ...kernels.replay import Replayed, Replayer
from ...model.errors import SpecError
from ...sim.arena.findings import MEMORY_RULES
from ...sim.checking import check
from .messages import TASKS, Answer, Done, Failed, Gone, Hello, Task, receive, send

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
    send(answers, Hello(device.name, _versions()))
    gc.collect()
    gc.freeze()  # what was imported is no garbage
    try:
        while True:
            tasks = receive(work, TASKS)
            for task, replayed in zip(tasks, replayer.replay(task.layout for task in tasks), strict=True):
                send(answers, _answer(task, replayed))
            send(answers, Done())
    except Gone:
        return 0
    except Exception as error:  # an illegal address leaves the device unusable: the process ends, and says why
        text = " ".join(f"{type(error).__name__}: {error}".split())
        send(answers, Failed("crashed", text))
        return 1


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _answer(task: Task, replayed: Replayed) -> Answer:
    broken = {finding.rule for finding in check(replayed.layout, allocated=True)} if replayed.refusal is None else set()
    return Answer(
        number=task.number,
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
