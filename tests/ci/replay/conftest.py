"""Children whose device is made up, see ``fake_child``, and what is left of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest


class FakeChild:
    """The command of the child, and what is known of its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "pids").mkdir()
        script = Path(__file__).with_name("fake_child.py")
        self.command = (sys.executable, "-P", str(script), str(folder))

    @property
    def pids(self) -> list[int]:
        """The processes that ever opened the device."""
        return sorted(int(file.name) for file in (self.folder / "pids").iterdir())

    def require_gone(self, seconds: float = 10) -> None:
        """Assert that no process is left."""
        wait_for(lambda: not [pid for pid in self.pids if alive(pid)], seconds)


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until ``condition`` holds, and fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Say whether there is such a process, zombies of others not counted."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" or os.getpid() == os.getppid()


@pytest.fixture
def fake_child(tmp_path: Path) -> FakeChild:
    """Return a child with a made-up device."""
    folder = tmp_path / "fake"
    folder.mkdir()
    return FakeChild(folder)
