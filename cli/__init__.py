"""The command line: ``kvsan check``, ``matrix``, ``peers``, ``fuzz``, ``sweep``, ``shrink``, ``replay``, ``select``,
``rules``, ``allocators``, ``bench``.

Each command has a module of its own, which imports little; whatever is heavy is imported inside the command. The exit
status is 0 when nothing is wrong, 1 for findings or a refused spec, 2 for bad input or usage, 130 when interrupted. Bad
input is one line on the standard error, nothing on the standard output, and never a traceback (set KVSAN_TRACEBACK=1 to
see where an internal error comes from).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from typing import Final, NoReturn

from . import interrupts
from .status import BAD_INPUT, CLEAN, INTERRUPTED

PATIENCE_SECONDS: Final = 2
"""How long each thread that is left may take to end before it is left behind."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with ``argv`` (None: the process's own arguments), and exit with its status.

    A process of our own ends then, whatever threads an allocator has left behind. SIGTERM (a job that is cancelled, or
    runs into its time limit) ends it as Ctrl-C does: with what was found so far saved and reported.
    """
    if argv is not None:
        raise SystemExit(run(argv))
    _hold_standard_descriptors()
    interrupts.install()
    status = run(sys.argv[1:])
    interrupts.settle()
    left = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    for thread in left:
        if not thread.daemon:
            thread.join(PATIENCE_SECONDS)
    if any(thread.is_alive() and not thread.daemon for thread in left):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)
    raise SystemExit(status)


def _hold_standard_descriptors() -> None:
    """Let no file or pipe become descriptor 0, 1 or 2 where we were started without one (``>&-``).

    A child process is given its standard streams at these numbers, and would lose a pipe that lies there.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def run(argv: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    try:
        return _dispatch(argv)
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except SystemExit:  # rich leaves this way when nobody reads the help any more
        return CLEAN
    except OSError as error:  # no room for a temporary file, too many open files or processes, ...
        if os.environ.get("KVSAN_TRACEBACK"):
            raise
        _complain(f"the system refuses: {error} (KVSAN_TRACEBACK=1 shows where)")
        return BAD_INPUT
    except Exception as error:  # the last resort: a user never sees a traceback unasked
        if os.environ.get("KVSAN_TRACEBACK"):
            raise
        _complain(f"internal error, please report it: {type(error).__name__}: {error} (KVSAN_TRACEBACK=1 shows more)")
        return BAD_INPUT


def _dispatch(argv: Sequence[str]) -> int:
    """Run the command; turn the errors of bad input and bad usage into one line."""
    import typer

    from ..model.errors import SpecError
    from .application import command
    from .output import OutputFailed, written_at_once

    usage_error: type[Exception] = typer.BadParameter.__bases__[0]  # typer's own, or click's in older versions
    asks_for_help = not argv or not {"-h", "--help"}.isdisjoint(argv)
    try:
        with written_at_once() if asks_for_help else contextlib.nullcontext():
            status = command().main(args=list(argv), prog_name="kvsan", standalone_mode=False)
    except SpecError as error:
        _complain(str(error))
        return BAD_INPUT
    except OutputFailed as error:
        _complain(str(error))
        return BAD_INPUT
    except typer.Abort:  # what older versions make of an interrupt
        raise KeyboardInterrupt from None
    except usage_error as error:
        _complain(f"{_usage_message(error)} ({_help_hint(error, argv)})")
        return BAD_INPUT
    if status == INTERRUPTED:
        _complain("interrupted")
    return status if isinstance(status, int) else 0


def _usage_message(error: Exception) -> str:
    message = getattr(error, "format_message", error.__str__)()
    return str(message).rstrip(".")


def _help_hint(error: Exception, argv: Sequence[str]) -> str:
    """Say where the usage is explained; an option without its value comes without a context."""
    context = getattr(error, "ctx", None)
    command = "kvsan" if not argv or argv[0].startswith("-") else f"kvsan {argv[0]}"
    return f"see {command if context is None else context.command_path} --help"


def _complain(message: str) -> None:
    """Write ``message`` as one printable line to the standard error."""
    from .wording import printable_line

    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"kvsan: {printable_line(message)}\n")
        sys.stderr.flush()
    except OSError:
        pass  # nobody is left to tell
