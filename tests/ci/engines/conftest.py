"""Engines for the tests marked ``engine``: those that the environment names, or a reason to skip."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsan.ci.engines.installed import SERVING, SGLANG, VLLM, Installed, process_for
from kvsan.ci.engines.supervisor import EngineProcess

FAKE = """
import os, signal, time


class Fake:
    greeting = {"engine": "Fake", "version": "1.2", "era": 3, "pid": os.getpid()}

    def answer(self, request):
        return answer(request, self.greeting)


def load():
    return Fake()
"""


def named_engine(engine: Installed) -> Iterator[EngineProcess]:
    """Yield a warm process of the engine that the environment names, or skip with the reason."""
    python = os.environ.get(engine.variable)
    if not python:
        pytest.skip(f"needs {engine.name}: set {engine.variable} to the python of its environment")
    process = process_for(engine, python)
    yield process
    process.close()


@pytest.fixture(scope="session")
def vllm_process() -> Iterator[EngineProcess]:
    yield from named_engine(VLLM)


@pytest.fixture(scope="session")
def sglang_process() -> Iterator[EngineProcess]:
    yield from named_engine(SGLANG)


@pytest.fixture
def fake_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EngineProcess]]:
    """Return a maker of processes of ``fake_engine``, which is on their path: of a function ``answer`` as text."""
    folder = tmp_path / "fake"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    made: list[EngineProcess] = []

    def make(answer: str, seconds: int = 60) -> EngineProcess:
        (folder / "fake_engine.py").write_text(FAKE + answer, encoding="utf-8")
        made.append(EngineProcess((sys.executable, str(SERVING), "fake_engine"), answer_seconds=seconds))
        return made[-1]

    yield make
    for process in made:
        process.close()
