"""``EngineProcess``: one engine in a process of its own, started at the first question and kept warm.

A process that crashes, hangs past its time, or is killed is an answer like any other: ``EngineEnded`` says how, and the
next question starts a new one. Nothing that an engine does can take the campaign along.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from ...model.errors import SpecError, shown

START_SECONDS = 180.0  # float: a time
ANSWER_SECONDS = 60.0  # float: a time

AHEAD = 8
"""Questions begun at a time: enough that the engine has work while the caller looks at answers."""
PIPE_BYTES = 1 << 15
"""Bytes of questions begun at a time: a pipe takes twice as many before its writer waits."""


class EngineEnded(Exception):
    """The engine's process ended, or was ended, before it answered; the text says how."""


class EngineProcess:
    """A command that answers JSON lines. ``version`` is what it said of itself when it started.

    ``begin`` has it work on questions, in their order, while the caller does something else; an answer is kept until
    ``ask`` is called with its question.
    """

    def __init__(self, command: Sequence[str], *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._command = tuple(command)
        self._seconds = answer_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: BinaryIO | None = None
        self._rest = b""
        self._begun: list[bytes] = []
        self._kept: dict[bytes, dict[str, Any] | EngineEnded] = {}
        self.greeting: dict[str, Any] = {}
        self.starts = 0

    @property
    def version(self) -> str:
        """The engine's version, empty before the first question."""
        return str(self.greeting.get("version", ""))

    @property
    def running(self) -> bool:
        """Whether there is a process, and it has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process unless it runs; raise ``SpecError`` where it cannot be started."""
        if self.running:
            return
        self.close()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError as error:
            raise SpecError("engine", f"cannot start {shown(self._command[0])}: {error.strerror or error}") from None
        self._rest = b""
        self.starts += 1
        try:
            self.greeting = self._read(START_SECONDS)
        except EngineEnded as end:
            said = self._last_words()
            self.close()
            raise SpecError("engine", f"the engine did not start: {end}{said}") from None

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a question; raise ``EngineEnded`` where the process ends first."""
        asked = msgspec.json.encode(question)
        if asked not in self._begun and asked not in self._kept:
            self._begin(asked)
        while asked not in self._kept:
            self._collect()
        answer = self._kept.pop(asked)
        if isinstance(answer, EngineEnded):
            raise answer
        return answer

    def begin(self, question: dict[str, Any]) -> None:
        """Have the process work on a question that is asked later; no more than ``AHEAD`` are begun at a time."""
        asked = msgspec.json.encode(question)
        if asked not in self._begun and asked not in self._kept:
            self._begin(asked)

    def _begin(self, asked: bytes) -> None:
        """Write a question, as long as the pipe takes it without waiting: else the two processes might wait for each
        other, one to be read and the other as well."""
        while self._begun and (len(self._begun) >= AHEAD or sum(map(len, self._begun)) + len(asked) > PIPE_BYTES):
            self._collect()
        self._write(asked)
        self._begun.append(asked)

    def _write(self, asked: bytes) -> None:
        self.start()
        process = self._process
        if process is None or process.stdin is None:
            raise EngineEnded("the process is gone")
        try:
            process.stdin.write(asked + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: reading says how
        except BaseException:
            self.close()
            raise

    def _collect(self) -> None:
        """Read the answer to the first question that was begun, and keep it."""
        if not self._begun:
            raise EngineEnded("the process is gone")
        asked = self._begun[0]
        while len(self._kept) > AHEAD:  # begun and never asked for
            del self._kept[next(iter(self._kept))]
        try:
            self._kept[asked] = self._read(self._seconds)
            del self._begun[0]
        except EngineEnded as end:
            said = self._last_words()
            self._kept[asked] = EngineEnded(f"{end}{said}")
            rest = self._begun[1:]
            self.close()
            for question in rest:  # a new process has them to answer
                self._begin(question)
        except BaseException:
            self.close()  # an interrupt between question and answer: the next answer would be to the last question
            raise

    def _read(self, seconds: float) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdout is None:
            raise EngineEnded("the process is gone")
        deadline = time.monotonic() + seconds
        output = process.stdout.fileno()
        waiting = select.poll()
        waiting.register(output, select.POLLIN)
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not waiting.poll(left * 1000):  # in milliseconds
                raise EngineEnded(f"no answer after {seconds:.0f} s")
            piece = os.read(output, 1 << 16)
            if not piece:
                raise EngineEnded(self._how_it_ended())
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            answer = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise EngineEnded("answered with no JSON") from None
        if not isinstance(answer, dict):
            raise EngineEnded("answered with no JSON object")
        return answer

    def _how_it_ended(self) -> str:
        process = self._process
        if process is None:
            return "the process is gone"
        try:
            code = process.wait(5)
        except subprocess.TimeoutExpired:
            return "the process closed its output"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the process was ended by {signal.Signals(-code).name}"
            return f"the process was ended by signal {-code}"
        return f"the process ended with status {code}"

    def _last_words(self) -> str:
        """Return the last line that the process wrote to its standard error, as the end of a sentence."""
        if self._errors is None:
            return ""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 2000))
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = [" ".join(line.split()) for line in lines if line.strip()]
        return f" ({said[-1][:200]})" if said else ""

    def close(self) -> None:
        """End the process, and what it started."""
        self._begun = []
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None
