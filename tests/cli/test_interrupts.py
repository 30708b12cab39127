"""An interrupt ends the process wherever it falls, also where Python drops what is raised."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PLACES = {
    "a callback of the collector": "gc.callbacks.append(lambda phase, info: once()); gc.collect()",
    "a finalizer": "type('Held', (), {'__del__': lambda self: once()})()",
    "a callback of a weak reference": "held = Held(); kept = weakref.ref(held, lambda gone: once()); del held",
    "the main program": "once()",
}

PROGRAM = """
import gc, signal, sys, time, weakref
from kvsan.cli import interrupts

interrupts.install()
signal.signal(signal.SIGINT, signal.{interrupt})

class Held:
    pass

left = [None]

def once():
    if left:
        left.pop()
        signal.raise_signal(signal.{number})
        sum(range(1000))  # the handler runs between two steps of Python

try:
    {place}
    time.sleep(30)
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("number", "interrupt"),
    [("SIGINT", "default_int_handler"), ("SIGTERM", "default_int_handler"), ("SIGTERM", "SIG_IGN")],
)
def test_no_interrupt_is_dropped(place: str, number: str, interrupt: str) -> None:
    program = PROGRAM.format(place=PLACES[place], number=number, interrupt=interrupt)
    ended = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, timeout=25, check=False)
    assert (ended.returncode, ended.stderr) == (7, "")


SETTLED = """
import os, signal, sys
from kvsan.cli import interrupts

interrupts.install()
try:
    exec("import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)")
except KeyboardInterrupt:
    pass
interrupts.settle()
for number in (signal.SIGINT, signal.SIGTERM):
    os.kill(os.getpid(), number)
sys.exit(7)
"""


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
def test_the_exit_status_is_kept_whatever_was_interrupted_and_whoever_is_impatient() -> None:
    ended = subprocess.run((sys.executable, "-c", SETTLED), capture_output=True, text=True, timeout=25, check=False)
    assert (ended.returncode, ended.stderr) == (7, "")


def test_other_exceptions_that_are_dropped_are_told() -> None:
    program = "from kvsan.cli import interrupts; interrupts.install()\nclass A:\n def __del__(self): 1 / 0\nA()"
    ended = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, timeout=25, check=False)
    assert ended.returncode == 0
    assert "ZeroDivisionError" in ended.stderr
