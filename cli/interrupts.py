"""Ctrl-C and SIGTERM as ``KeyboardInterrupt``, none of which is lost.

Python drops an exception that is raised in a callback of the garbage collector, in ``__del__`` or in a callback of a
weak reference, and Hypothesis has the collector call it back: of campaigns that were stopped by SIGTERM, one in twenty
went on. What is dropped is raised again here, a moment later.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from typing import Final

AGAIN_SECONDS: Final = 0.01


def install() -> None:
    """Let SIGTERM (a job that is cancelled, or runs into its time limit) end the process as Ctrl-C does."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    dropped = sys.unraisablehook

    def raise_again(lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            dropped(lost)
            return
        timer = threading.Timer(AGAIN_SECONDS, _interrupt)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = raise_again


def settle() -> None:
    """Let nothing interrupt the end of the process, whose exit status is known.

    CPython remembers an interrupt that left a string that was run by ``exec``, as modules do that make classes, and
    dies of SIGINT in the end though it was caught; the next string that is run makes it forget.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    exec("")


def _interrupt() -> None:
    """Interrupt the main thread by a signal that it does not ignore."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.default_int_handler:
            main = threading.main_thread().ident
            if hasattr(signal, "pthread_kill") and main is not None:
                signal.pthread_kill(main, number)  # wakes it from a wait, too
            else:
                _thread.interrupt_main(number)
            return
