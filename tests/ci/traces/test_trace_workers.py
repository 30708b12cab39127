"""Campaigns over traces as processes: workers that an allocator takes down, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsan.ci.campaign import Options
from kvsan.ci.cases import load_case
from kvsan.ci.traces.campaign import run_trace_campaign
from kvsan.model.errors import SpecError
from kvsan.sim.cache.trace import Trace

ALLOCATORS = '''
"""Allocators of somebody's own that end their process, or give what no cache can run on."""
import os
import traceback

from kvsan.sim.allocators.trtllm.allocators import allocate_dense
from kvsan.sim.allocators.faulty.storage import allocate_canary

REDUCING = os.path.join(os.path.dirname(__file__), "reducing")


def ending(spec):
    if spec.slots == 12:
        os._exit(7)
    return allocate_dense(spec)


def ends_at_once(spec):
    os._exit(8)


def chokes(spec):
    if spec.slots == 12:
        return 12
    return allocate_dense(spec)


def ends_reduced(spec):
    if any(frame.name == "settle" for frame in traceback.extract_stack()):
        open(REDUCING, "w").close()
    if os.path.exists(REDUCING):
        os._exit(9)
    return allocate_canary(spec)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put the module of allocators into a folder of its own, from which workers find it; return its name."""
    (tmp_path / "odd_trace_allocators.py").write_text(ALLOCATORS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "odd_trace_allocators"


def ended(own: str, name: str, cases: Path, *, workers: int = 1, isolate: bool = True) -> str:
    options = Options(allocator=f"{own}:{name}", seed=1, examples=30, cases=cases, workers=workers, isolate=isolate)
    with pytest.raises(SpecError) as raised:
        run_trace_campaign(options)
    return str(raised.value)


def test_a_worker_that_dies_leaves_the_trace_that_killed_it(own: str, tmp_path: Path) -> None:
    message = ended(own, "ending", tmp_path / "cases")
    (path,) = (tmp_path / "cases").glob("*.json")
    wanted = f"allocator: '{own}:ending' ends the process (status 7) in chunk 0, on the trace of {path}"
    assert message == wanted
    trace = load_case(path).input
    assert isinstance(trace, Trace)
    assert trace.spec.slots == 12
    assert trace.operations


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ends_at_once", "(status 8) in chunk 0, on the trace of"),
        ("ends_reduced", "(status 9) while a case is reduced"),
    ],
)
def test_wherever_it_dies(own: str, tmp_path: Path, name: str, words: str) -> None:
    message = ended(own, name, tmp_path / "cases")
    assert words in message


@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_answer_that_no_cache_can_run_on_is_one_line_with_its_trace(own: str, tmp_path: Path, isolate: bool) -> None:
    message = ended(own, "chokes", tmp_path / "cases", isolate=isolate)
    assert "\n" not in message
    assert "in chunk 0, on the trace of" in message
    (path,) = (tmp_path / "cases").glob("*.json")
    assert isinstance(load_case(path).input, Trace)
