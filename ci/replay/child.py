"""The child process: opens a device, replays the batches that it is sent, and answers on a pipe of its own.

Triton decides when its kernels are decorated whether it interprets them, and a kernel that reaches an illegal address
takes the whole CUDA context with it; so every device is opened in a process of its own, which may die.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Final, NoReturn

import msgspec

from ...kernels.device import Device, open_device
from ...kernels.replay import Replayed, Replayer
from ...kernels.traces import replay_trace
from ...model.errors import SpecError
from ...model.spec import decode_spec, one_line
from ...sim.layout import Layout
from ...sim.registry import allocate
from ...sim.rejection import Rejected
from .comparison import disagreements, trace_disagreements
from .messages import (
    Answer,
    Batch,
    Done,
    Failed,
    FrameReader,
    LayoutJob,
    Outcome,
    Ready,
    Reply,
    Request,
    SpecJob,
    Start,
    TraceJob,
    Unusable,
    decode_request,
    frame,
)

READ_BYTES: Final = 1 << 16


def main(requests: int, replies: int) -> NoReturn:
    """Serve the parent over two file descriptors until it closes ``requests``; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt ends
    for descriptor in (requests, replies):
        os.set_inheritable(descriptor, False)
    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # whatever prints, here or in native code, is no answer
    sys.stdout = sys.stderr
    faulthandler.enable()
    waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, waiting), daemon=True).start()
    _Child(replies).serve(waiting)
    sys.stderr.flush()
    os._exit(1)


def _listen(requests: int, waiting: queue.SimpleQueue[Request]) -> None:
    """Pass requests on as they come; end this process when the parent has no more, by whatever means."""
    reader = FrameReader()
    while data := os.read(requests, READ_BYTES):
        for body in reader.feed(data):
            waiting.put(decode_request(body))
    os._exit(0)


class _Child:
    """The device, once it is open, and the way back to the parent."""

    def __init__(self, replies: int) -> None:
        self._replies = replies

    def _say(self, message: Reply) -> None:
        data = memoryview(frame(message))
        while data:
            data = data[os.write(self._replies, data) :]

    def serve(self, waiting: queue.SimpleQueue[Request]) -> None:
        """Open the device and answer batches; return when the device can no longer be used."""
        start = waiting.get()
        if not isinstance(start, Start):
            return
        device = self._open(start.device)
        if device is None:
            return
        replayer = Replayer(device, max_bytes=start.max_bytes, allocated=True)
        gc.collect()
        gc.freeze()  # what was imported is no garbage, and need not be searched for any again and again
        while True:
            batch = waiting.get()
            if not isinstance(batch, Batch):
                return
            try:
                self._answer(replayer, batch, start)
            except Exception as error:  # whatever the replay itself does wrong is told, and costs one case
                alive = _works(device)
                self._say(Failed(_told(error), alive))
                if not alive:
                    return
                replayer = Replayer(device, max_bytes=start.max_bytes, allocated=True)
            else:
                self._say(Done())

    def _open(self, kind: str) -> Device | None:
        try:
            device = open_device(kind)
            self._say(Ready(device.name, versions(kind)))
        except SpecError as error:
            self._say(Unusable(error.field, error.problem))
        except Exception as error:  # a broken installation may fail in any way
            self._say(Unusable("device", f"{kind} cannot be opened: {_told(error)}"))
        else:
            return device
        return None

    def _answer(self, replayer: Replayer, batch: Batch, start: Start) -> None:
        """Answer every job of ``batch``: refusals at once, layouts as they are replayed, traces one by one."""
        numbers: list[int] = []

        def layouts() -> Iterator[Layout]:
            for number, job in enumerate(batch.jobs):
                if isinstance(job, TraceJob):
                    continue
                found = layout_of(job)
                if isinstance(found, Outcome):
                    self._say(Answer(number, found))
                else:
                    numbers.append(number)
                    yield found

        for place, result in enumerate(replayer.replay(layouts())):
            outcome = outcome_of(result, start.static)
            if start.kernels is not None:
                outcome = with_kernels(replayer.device, result, outcome, start.kernels)
            self._say(Answer(numbers[place], outcome))
        for number, job in enumerate(batch.jobs):
            if isinstance(job, TraceJob):
                self._say(Answer(number, outcome_of_trace(replayer.device, job, start.static)))


def layout_of(job: SpecJob | LayoutJob) -> Layout | Outcome:
    """Return the layout of ``job``, or why there is none."""
    if isinstance(job, LayoutJob):
        return job.layout
    try:
        return allocate(decode_spec(job.spec), job.allocator)
    except Rejected as rejection:
        return Outcome.rejected(rejection)
    except SpecError as error:
        return Outcome(status="refused", message=str(error))


def outcome_of(result: Replayed, static: bool) -> Outcome:
    """Return what came of one replayed layout, with the verdict of the static rules beside it."""
    layout = result.layout
    if result.refusal is not None:
        return Outcome(status="refused", message=result.refusal, notes=layout.notes)
    findings = result.findings
    if static:
        findings += tuple(disagreements(layout, findings))
    return Outcome(
        status="findings" if findings else "clean",
        digest=result.digest,
        findings=findings,
        notes=layout.notes,
        size_bytes=sum([max(0, pool.size_bytes) for pool in layout.pools]),
        compared_on_host=result.compared_on_host,
    )


def with_kernels(device: Device, result: Replayed, outcome: Outcome, kernels: str) -> Outcome:
    """Return ``outcome`` with what reference kernels find on the layout, and a note for each layer that none ran on."""
    if result.refusal is not None:
        return outcome
    from ...kernels.results.judging import judge_kernels

    try:
        report = judge_kernels(device, result.layout, kernels)
    except SpecError as error:
        return msgspec.structs.replace(outcome, notes=(*outcome.notes, f"no kernel was run: {error}"))
    findings = (*outcome.findings, *report.findings)
    notes = (*outcome.notes, *[f"no kernel was run on it: {reason}" for reason in report.refused])
    return msgspec.structs.replace(outcome, status="findings" if findings else "clean", findings=findings, notes=notes)


def outcome_of_trace(device: Device, job: TraceJob, static: bool) -> Outcome:
    """Replay a trace and return what came of it, with the verdict of the simulated cache beside it."""
    try:
        result = replay_trace(device, job.trace, job.allocator)
    except Rejected as rejection:
        return Outcome.rejected(rejection)
    except SpecError as error:
        return Outcome(status="refused", message=str(error))
    findings = result.findings
    if static:
        findings += tuple(trace_disagreements(job.trace, job.allocator, findings))
    words = f"{len(job.trace.operations)} operations, {result.refused} refused; {result.records} accesses"
    return Outcome(
        status="findings" if findings else "clean",
        digest=result.digest,
        findings=findings,
        notes=(words,),
        size_bytes=result.size_bytes,
        compared_on_host=True,
    )


def versions(kind: str) -> dict[str, str]:
    """Return the versions of what a device of ``kind`` is driven by, all of it loaded."""
    names = ("numpy", "torch", "triton", *(("cupy",) if kind == "cuda" else ()))
    found = {name: str(getattr(importlib.import_module(name), "__version__", "unknown")) for name in names}
    if kind == "cuda":
        runtime = importlib.import_module("cupy").cuda.runtime
        found["cuda"] = _dotted(runtime.runtimeGetVersion())
        found["cuda driver"] = _dotted(runtime.driverGetVersion())
    return {"python": ".".join(map(str, sys.version_info[:3])), **found}


def _dotted(version: int) -> str:
    """Return CUDA's number of a version, such as 12040, as ``12.4``."""
    major, rest = divmod(version, 1000)
    return f"{major}.{divmod(rest, 10)[0]}"


def _works(device: Device) -> bool:
    """Say whether the device still does what it is told: after an illegal address it never does again."""
    try:
        device.synchronize()
    except Exception:  # of CuPy's, torch's or the driver's
        return False
    return True


def _told(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}")[:400]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
