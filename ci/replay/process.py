"""``Child``: one child process as its parent sees it; nothing here blocks.

The child runs in a session of its own, so that Ctrl-C on the terminal reaches the parent alone, and so that all it
started can be ended with it. What it writes to its standard error is read, and the end of it kept for the obituary.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TextIO

import msgspec

from ...model.errors import SpecError
from .messages import FrameReader, Reply, Request, decode_reply, frame

READ_BYTES: Final = 1 << 16
TAIL_BYTES: Final = 1 << 13
"""How much of what a child says on its standard error is kept."""
GRACE_SECONDS: Final = 5
"""How long a child whose pipe has closed may take to end."""
COMMAND: Final = (sys.executable, "-P", "-m", "kvsan.ci.replay.child")


class Child:
    """A child process and the three pipes to it."""

    def __init__(self, command: Sequence[str], *, stderr: TextIO | None = None) -> None:
        """Start ``command`` with two file descriptors behind it: where it reads requests and where it writes replies.

        What it writes to its standard error is passed on to ``stderr``. Raises ``SpecError`` where it cannot start.
        """
        self._pass_on = stderr
        self._tail = bytearray()
        self._reader = FrameReader()
        self._unsent = bytearray()
        theirs_in, self.requests = os.pipe()
        self.replies, theirs_out = os.pipe()
        self.errors, their_errors = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs_in), str(theirs_out)],
                stdin=subprocess.DEVNULL,
                stdout=their_errors,
                stderr=their_errors,
                pass_fds=(theirs_in, theirs_out),
                start_new_session=True,
                env=child_environment(),
            )
        except OSError as error:
            self._close()
            raise SpecError("device", f"cannot start {command[0]}: {error.strerror or error}") from None
        finally:
            for descriptor in (theirs_in, theirs_out, their_errors):
                os.close(descriptor)
        for descriptor in (self.requests, self.replies, self.errors):
            os.set_blocking(descriptor, False)

    @property
    def unsent(self) -> bool:
        """Whether some of what was said to the child is still on this side."""
        return bool(self._unsent)

    def say(self, message: Request) -> None:
        """Have ``message`` sent; ``write`` does it, as far as the pipe takes it."""
        self._unsent += frame(message)

    def write(self) -> None:
        """Send what the pipe takes; a child that no longer reads is found out when its replies end."""
        try:
            sent = os.write(self.requests, memoryview(self._unsent)[: 1 << 20])
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)
        del self._unsent[:sent]

    def read(self) -> Iterator[Reply] | None:
        """Return the replies that have come, None once there will be no more.

        The iterator raises ``ValueError`` (of msgspec's, for a message of another kind) on what is no reply.
        """
        try:
            data = os.read(self.replies, READ_BYTES)
        except BlockingIOError:
            return iter(())
        return self._replies(data) if data else None

    def _replies(self, data: bytes) -> Iterator[Reply]:
        try:
            for body in self._reader.feed(data):
                yield decode_reply(body)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None

    def read_errors(self) -> bool:
        """Read what the child wrote to its standard error; return False once there will be no more."""
        if self.errors < 0:
            return False
        try:
            data = os.read(self.errors, READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            os.close(self.errors)
            self.errors = -1
        self._tail += data
        del self._tail[:-TAIL_BYTES]
        if data and self._pass_on is not None:
            with contextlib.suppress(OSError, ValueError):
                self._pass_on.write(data.decode("utf-8", "replace"))
        return bool(data)

    def obituary(self) -> str:
        """Return how the child ended, waiting a little for that; one that goes on is ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        code = self._process.poll()
        while code is not None and self._more_errors():
            pass
        if code is None:
            return "it closed its pipe and did not end"
        if code >= 0:
            return f"it ended with status {code}" + self._last_words()
        try:
            name = f" ({signal.Signals(-code).name})"
        except ValueError:
            name = ""
        return f"it was ended by signal {-code}{name}"

    def _more_errors(self) -> bool:
        """Read on; say whether there may be more. A grandchild may hold the pipe open for ever."""
        before = bytes(self._tail)
        return self.read_errors() and bytes(self._tail) != before

    def _last_words(self) -> str:
        lines = [line for line in self._tail.decode("utf-8", "replace").splitlines() if line.strip()]
        return f": {' '.join(lines[-1].split())[:300]}" if lines else ""

    def finish(self, seconds: float) -> int | None:
        """Let an idle child end by itself within ``seconds``; return its exit status, None where it did not."""
        with contextlib.suppress(OSError):
            os.close(self.requests)
        self.requests = -1
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            self.read_errors()
            time.sleep(0.01)
        while self._more_errors():
            pass
        return self._process.poll()

    def end(self) -> None:
        """End the child and everything it started, and close the pipes."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close()

    def _close(self) -> None:
        for descriptor in (self.requests, self.replies, self.errors):
            if descriptor >= 0:
                os.close(descriptor)
        self.requests = self.replies = self.errors = -1


def child_environment() -> dict[str, str]:
    """Return the environment of a child process that is to find kvsan where this process found it."""
    spec = importlib.util.find_spec("kvsan")
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    homes = [str(Path(place).parent) for place in places]
    found = [home for home in homes if any(Path(entry or ".").absolute() == Path(home) for entry in sys.path)]
    before = os.environ.get("PYTHONPATH")
    paths = [*found, *([before] if before else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} if paths else dict(os.environ)
