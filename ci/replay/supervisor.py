"""Supervised replays: child processes that are given layouts in batches, watched, and started again when they die.

A batch whose child crashes, or says nothing for too long, is given out again one layout at a time, so that the crash is
attributed to the layout that brings it about, and all others are replayed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from ...model.errors import SpecError
from ...sim.finding import Finding
from ...sim.layout import Layout
from .messages import (
    FRAMES,
    Answer,
    Done,
    Failed,
    Frame,
    Gone,
    Hello,
    Late,
    LayoutWork,
    Task,
    TraceWork,
    receive,
    send,
)

START_SECONDS: Final = 300
"""How long a child may take to open its device: imports and the driver's start included."""
BATCH_LAYOUTS: Final = {"cpu": 8, "cuda": 256}
"""Layouts that a child is given at a time; the interpreter takes about a second for each."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to replay: ``max_bytes`` of device memory for each layout; no frame for ``patience_seconds`` is a hang.

    ``child`` is the module that serves, ``wrapper`` words before its command line (a sanitizer).
    """

    device: str
    max_bytes: int
    workers: int = 1
    patience_seconds: float = 600.0
    child: str = "kvsan.ci.replay.child"
    wrapper: tuple[str, ...] = ()


class Crash(msgspec.Struct, frozen=True):
    """A layout that took the device, or the process, with it."""

    number: int
    message: str

    @property
    def finding(self) -> Finding:
        """The crash as a finding."""
        return Finding(
            rule="replay-mismatch",
            message=f"the replay of this layout crashed: {self.message}",
            remedy="report this case: no layout that passes the simulator's bounds may bring a device down",
        )


class Unusable(SpecError):
    """No child can open the device."""


class _Died(Exception):
    """A child is gone; the text says how."""


class _Child:
    """One child process and its pipes."""

    def __init__(self, options: Options) -> None:
        self.options = options
        work_read, self.work = os.pipe()
        self.answers, answers_write = os.pipe()
        command = [
            *options.wrapper, sys.executable, "-m", options.child,
            options.device, str(options.max_bytes), str(work_read), str(answers_write),
        ]  # fmt: skip
        interpreted = {"TRITON_INTERPRET": "1" if options.device == "cpu" else "0"}
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(work_read, answers_write),
                env=os.environ | interpreted,
            )
        finally:
            os.close(work_read)
            os.close(answers_write)
        self.hello = self._greeting()

    def _greeting(self) -> Hello:
        try:
            frame = self._frame(START_SECONDS)
        except _Died as died:
            self.kill()
            raise Unusable("device", f"the replay's process did not start: {died}") from None
        if isinstance(frame, Hello):
            return frame
        self.kill()
        if isinstance(frame, Failed) and frame.kind == "unusable":
            field, _, problem = frame.message.partition(": ")
            raise Unusable(field, problem)
        raise Unusable("device", f"the replay's process did not start: {getattr(frame, 'message', 'no greeting')}")

    def answers_to(self, tasks: list[Task]) -> Iterator[Answer]:
        """Yield the answers to ``tasks``; raises ``_Died``."""
        try:
            send(self.work, tasks)
        except Gone:
            raise _Died(self._how()) from None
        while True:
            frame = self._frame(self.options.patience_seconds)
            if isinstance(frame, Done):
                return
            if isinstance(frame, Failed):
                raise _Died(frame.message)
            if isinstance(frame, Answer):
                yield frame

    def _frame(self, seconds: float) -> Frame:
        try:
            return receive(self.answers, FRAMES, seconds)
        except Gone:
            raise _Died(self._how()) from None
        except Late:
            raise _Died(f"no answer for {seconds:g} s") from None
        except msgspec.MsgspecError as error:
            raise _Died(f"an answer that cannot be read ({error})") from None

    def _how(self) -> str:
        """Return how the process ended."""
        try:
            status = self.process.wait(10)
        except subprocess.TimeoutExpired:
            return "its process closed the pipe"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"its process ended by {signal.Signals(-status).name}"
        return f"its process ended with status {status}"

    def kill(self) -> None:
        """End the process, whatever it does."""
        for descriptor in (self.work, self.answers):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


class Supervisor:
    """Replays layouts on children of its own; a context manager that ends them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.children: list[_Child] = []
        self.hello: Hello | None = None
        self.lock = threading.Lock()
        self.stopped = False

    def __enter__(self) -> Supervisor:
        child = _Child(self.options)
        self.children.append(child)
        self.hello = child.hello
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        for child in self.children:
            child.kill()

    def replay(self, works: Iterable[Layout | TraceWork]) -> Iterator[Answer | Crash]:
        """Yield what memory says of ``works``, in their order; they are asked for as they are needed."""
        tasks = (
            Task(number, LayoutWork(work) if isinstance(work, Layout) else work) for number, work in enumerate(works)
        )
        batches = _batches(tasks, BATCH_LAYOUTS[self.options.device])
        if self.options.workers == 1:
            for batch in batches:
                yield from self._batch(batch)
            return
        yield from self._on_workers(batches)

    def _on_workers(self, batches: Iterator[list[Task]]) -> Iterator[Answer | Crash]:
        """Give batches to as many threads as there are workers; the layouts are drawn on this thread alone."""
        running: list[tuple[threading.Thread, list[Answer | Crash], list[BaseException]]] = []
        try:
            for batch in batches:
                while len(running) >= self.options.workers:
                    yield from _finished(running.pop(0))
                running.append(self._started(batch))
            while running:
                yield from _finished(running.pop(0))
        finally:
            self.stopped = self.stopped or bool(running)

    def _started(self, batch: list[Task]) -> tuple[threading.Thread, list[Answer | Crash], list[BaseException]]:
        results: list[Answer | Crash] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.extend(self._batch(batch))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread, results, errors

    def _batch(self, batch: list[Task]) -> list[Answer | Crash]:
        """Return the results of ``batch``; layouts without an answer after a crash are tried one by one."""
        answers: dict[int, Answer | Crash] = {}
        child = self._take()
        try:
            for answer in child.answers_to(batch):
                answers[answer.number] = answer
            self._give_back(child)
        except _Died as died:
            self._bury(child)
            left = [task for task in batch if task.number not in answers]
            if len(batch) == 1:
                return [Crash(batch[0].number, str(died))]
            for task in left:
                for result in self._batch([task]):
                    answers[task.number] = result
        return [answers[task.number] for task in batch]

    def _take(self) -> _Child:
        """Return a child that nobody uses, or a new one."""
        with self.lock:
            if self.stopped:
                raise KeyboardInterrupt
            if self.children:
                return self.children.pop()
        return _Child(self.options)

    def _give_back(self, child: _Child) -> None:
        with self.lock:
            self.children.append(child)
        if self.stopped:
            child.kill()

    def _bury(self, child: _Child) -> None:
        child.kill()


def _finished(work: tuple[threading.Thread, list[Answer | Crash], list[BaseException]]) -> list[Answer | Crash]:
    thread, results, errors = work
    thread.join()
    if errors:
        raise errors[0]
    return results


def _batches(tasks: Iterator[Task], size: int) -> Iterator[list[Task]]:
    while batch := list(itertools.islice(tasks, size)):
        yield batch
