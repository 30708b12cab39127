"""What reaches the standard output: one JSON document, or a report made with rich.

Everything is written once, at the end. A reader that goes away (``| head``) is no error: the rest is dropped. While
somebody else's allocator runs, the standard output is kept for us (``stdout_kept``).
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

MIN_WIDTH: Final = 40
"""Columns that a report takes at least, whatever the terminal says of itself: narrower tables lose their text."""

PATIENCE_SECONDS: Final = 1
"""How long work goes on before its progress is shown."""

_STDOUT: Final = 1
_STDERR: Final = 2

_PLAIN: Final = str.maketrans({"✓": "ok", "✗": "x", "…": "...", "×": "x", "–": "-", "·": "|", "•": "*", "→": "->"})
"""What stands for our signs where the terminal's encoding has no room for them."""


class OutputFailed(Exception):
    """The standard output cannot be written (a full disk)."""


def write_json(document: Any) -> None:
    """Write ``document`` as one line of JSON; what UTF-8 cannot write (names of files that are no text) is escaped."""
    import msgspec

    try:
        text = msgspec.json.encode(document)
    except UnicodeEncodeError:
        text = msgspec.json.encode(_writable(document))
    write_bytes((text, b"\n"))


def _writable(value: Any) -> Any:
    """Return ``value`` with escapes in place of lone surrogates, which stand for bytes that are no UTF-8."""
    import msgspec

    if isinstance(value, msgspec.Struct):
        return _writable(msgspec.to_builtins(value))
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_writable(key): _writable(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(member) for member in value]
    return value


def write_text(text: str) -> None:
    """Write ``text``, in whatever encoding the standard output has."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        data = text.encode(encoding)
    except UnicodeEncodeError:
        data = text.translate(_PLAIN).encode(encoding, "replace")
    write_bytes((data,))


def write_bytes(pieces: Iterable[bytes]) -> None:
    """Write ``pieces`` one after the other; stop in silence when nobody reads any more.

    Raises ``OutputFailed`` when the system refuses to write for another reason.
    """
    if sys.stdout is None:
        return
    binary = getattr(sys.stdout, "buffer", None)
    try:
        sys.stdout.flush()
        for piece in pieces:
            if binary is not None:
                binary.write(piece)
            else:
                sys.stdout.write(piece.decode())
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_the_rest()
    except OSError as error:
        _drop_the_rest()
        raise OutputFailed(f"cannot write the standard output: {error.strerror or error}") from None


def _drop_the_rest() -> None:
    """Send what is still buffered nowhere, or the interpreter complains about it as it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def stdout_kept() -> Iterator[None]:
    """Keep the standard output for us: what others write to it meanwhile, native code too, goes to the standard error.

    Where there is no standard output, or no standard error, what they write is dropped.
    """
    if sys.stdout is None:  # descriptor 1 may be anything then
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    elsewhere = _standard_error()
    try:
        kept = os.dup(_STDOUT)
    except OSError:  # closed: nothing to keep
        kept = elsewhere
    os.dup2(elsewhere, _STDOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _flush_native()
        os.dup2(kept, _STDOUT)
        if kept != elsewhere:
            os.close(kept)
        os.close(elsewhere)


def _standard_error() -> int:
    """Return a new descriptor of the standard error, or of nowhere when that is closed."""
    try:
        return os.dup(_STDERR)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _flush_native() -> None:
    """Write out what native code has printed and the C library still buffers, while it goes to the standard error."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)


class _Draft(io.StringIO):
    """Text on its way to the standard output, which it looks like to rich: colours and signs are as if written there.

    rich writes and flushes whatever it prints on, and typer's help leaves us no choice of where: so it is this.
    """

    def __init__(self) -> None:
        super().__init__()
        self._output = sys.stdout

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._output, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        try:
            return self._output is not None and self._output.isatty()
        except ValueError:  # closed
            return False


@contextlib.contextmanager
def written_at_once() -> Iterator[None]:
    """Hold back what is printed meanwhile (the help, by typer), and write it like everything else at the end."""
    draft = _Draft()
    with contextlib.redirect_stdout(draft):
        yield
    write_text(draft.getvalue())


def terminal() -> Console:
    """Return a console for the report; ``print_report`` writes what was printed on it."""
    from rich.console import Console

    draft = _Draft()
    console = Console(file=draft, highlight=False)
    if console.width < MIN_WIDTH:
        console = Console(file=draft, highlight=False, width=MIN_WIDTH)
    return console


def print_report(console: Console) -> None:
    """Write what was printed on a console of ``terminal``."""
    text = console.file.getvalue()  # type: ignore[attr-defined]
    write_text("\n".join(line.rstrip() for line in text.split("\n")))


def watched(items: Sequence[T], label: str) -> Iterator[T]:
    """Yield ``items``; once they take long, show the progress on the standard error, if that is a terminal."""
    started = time.monotonic()
    left = iter(items)
    done = 0
    show = sys.stderr is not None and sys.stderr.isatty()
    for item in left:
        yield item
        done += 1
        if show and time.monotonic() - started > PATIENCE_SECONDS:
            break
    if done == len(items):
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=len(items), completed=done)
        for item in left:
            yield item
            progress.advance(task)
