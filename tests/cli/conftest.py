"""What the tests of the command line share: running it in this process, and allocators of somebody's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvsan.cli import main

REFERENCE = Path(__file__).resolve().parents[2] / "examples" / "qwen3.8-flash-next" / "config.json"

OWN_ALLOCATORS = '''
"""Allocators as a user would write them, sound and broken."""
import sys

import msgspec

import kvsan

called = []


def packed(spec):
    print("printed by an allocator")
    called.append(spec.rank)
    return kvsan.allocate(spec, "trtllm-v2-qsa-packed")


def moved(spec):
    layout = packed(spec)
    buffers = [
        msgspec.structs.replace(buffer, offset_bytes=10) if buffer.role == "value" else buffer
        for buffer in layout.buffers
    ]
    return msgspec.structs.replace(layout, buffers=tuple(buffers))


def bare(spec):
    raise KeyError("two\\nlines")


def leaves(spec):
    sys.exit(0)


def interrupted(spec):
    raise KeyboardInterrupt


def number(spec):
    return 3


def junk(spec):
    return msgspec.structs.replace(packed(spec), buffers=(1, 2))


def two(spec, other):
    called.append("two")


class Class:
    def __init__(self, spec):
        called.append("Class")
'''


class Ran(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON document on the standard output, which holds nothing else."""
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs ``kvsan`` with some arguments in this process, in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run_command(*argv: object) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in argv])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, out, err)

    return run_command


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Put a module of allocators into the current folder; return its name."""
    (tmp_path / "own_allocators.py").write_text(OWN_ALLOCATORS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield "own_allocators"
    sys.modules.pop("own_allocators", None)


@pytest.fixture
def reference() -> Path:
    """Return the config of the reference model: 48 layers, of which 12 (3, 7, …, 47) have K/V pages and side planes."""
    return REFERENCE
