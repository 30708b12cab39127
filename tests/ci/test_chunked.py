"""Campaigns over pairs on worker processes: their order, and workers that an allocator takes down."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from kvsan.ci import transfer_campaign
from kvsan.ci.campaign import Options
from kvsan.ci.cases import load_case
from kvsan.ci.transfer_campaign import PairCampaign, run_pair_campaign
from kvsan.ci.transfer_judging import JudgedTransfer
from kvsan.model.errors import SpecError
from kvsan.sim.transfer.pair import Pair

ALLOCATORS = '''
"""Allocators of somebody's own that end their process, or give what nothing can be moved between."""
import os
import time
import traceback

from kvsan.sim.allocators.trtllm.allocators import allocate_dense

REDUCING = os.path.join(os.path.dirname(__file__), "reducing")
PIDS = os.path.join(os.path.dirname(__file__), "pids")


def ending(spec):
    if spec.parallel.tp == 6:
        os._exit(7)
    return allocate_dense(spec)


def killed(spec):
    if spec.parallel.tp == 6:
        os.kill(os.getpid(), 9)
    return allocate_dense(spec)


def ends_at_once(spec):
    os._exit(8)


def chokes(spec):
    return 12 if spec.parallel.tp == 6 else allocate_dense(spec)


def slow(spec):
    open(PIDS, "a").write(f"{os.getpid()}\\n")
    time.sleep(0.02)
    return allocate_dense(spec)


def ends_reduced(spec):
    if any(frame.name == "settle" for frame in traceback.extract_stack()):
        open(REDUCING, "w").close()
    if os.path.exists(REDUCING):
        os._exit(9)
    return allocate_dense(spec)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put the module of allocators into a folder of its own, from which workers find it; return its name."""
    (tmp_path / "odd_pair_allocators.py").write_text(ALLOCATORS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_pair_allocators", raising=False)  # that of another folder
    return "odd_pair_allocators"


def campaign(name: str, cases: Path | None, *, workers: int = 2, examples: int = 150, **more: object) -> PairCampaign:
    options = Options(allocator=name, seed=1, examples=examples, cases=cases, workers=workers, **more)
    return run_pair_campaign(options)


def test_any_number_of_workers_finds_the_same(tmp_path: Path) -> None:
    name = "fault:conv-state-as-one"
    one, other = (campaign(name, None, workers=workers, examples=250, reduce=False) for workers in (1, 2))
    assert one.examples == other.examples == 250
    assert [(fault.rule, fault.pair, fault.examples_to_find) for fault in one.faults] == [
        (fault.rule, fault.pair, fault.examples_to_find) for fault in other.faults
    ]
    assert one.coverage == other.coverage


@pytest.mark.parametrize(
    ("name", "workers", "words"),
    [
        ("ending", 2, "ends the process (status 7) in chunk"),
        ("killed", 1, "ends the process (signal 9) in chunk 0"),
        ("chokes", 1, "returned 12, needs a kvsan.Layout in chunk 0"),
    ],
)
def test_an_allocator_that_takes_its_worker_down_leaves_the_pair_that_did_it(
    own: str, tmp_path: Path, name: str, workers: int, words: str
) -> None:
    """One worker is a process of its own too, where the allocator is somebody's own."""
    with pytest.raises(SpecError) as raised:
        campaign(f"{own}:{name}", tmp_path / "cases", workers=workers, isolate=True)
    (path,) = (tmp_path / "cases").glob("*.json")
    message = str(raised.value)
    assert message.startswith(f"allocator: '{own}:{name}' ")
    assert words in message
    assert message.endswith(f", on the pair of {path}")
    pair = load_case(path).input
    assert isinstance(pair, Pair)
    assert 6 in (pair.source.parallel.tp, pair.destination.parallel.tp)


def test_one_that_dies_while_a_pair_is_reduced_is_named(own: str, tmp_path: Path) -> None:
    cases = tmp_path / "cases"
    options = Options(allocator=f"{own}:ends_reduced", seed=1, examples=100, cases=cases, isolate=True)
    with pytest.raises(SpecError, match=r"ends the process \(status 9\) while a case is reduced, on the pair of"):
        run_pair_campaign(options, refusals="differs in")


def test_a_worker_that_is_killed_from_outside_is_one_line(own: str, tmp_path: Path) -> None:
    """No pair does it again, so the line names the chunk and asks for memory."""

    def kill() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not (tmp_path / "pids").exists():
            time.sleep(0.02)
        os.kill(int((tmp_path / "pids").read_text().split()[0]), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(SpecError, match=r"workers: a worker process ended while .* ran chunk .*memory enough"):
        campaign(f"{own}:slow", None, examples=2000)
    thread.join()


def test_an_interrupt_keeps_what_was_found(own: str, tmp_path: Path) -> None:
    """Of the chunks that were begun too, in workers and here."""
    for workers in (1, 2):
        (tmp_path / "pids").unlink(missing_ok=True)

        def interrupt() -> None:
            end = time.monotonic() + 60
            while time.monotonic() < end and not (tmp_path / "pids").exists():
                time.sleep(0.02)
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        found = campaign(f"{own}:slow", None, workers=workers, examples=5000)
        thread.join()
        assert found.interrupted
        assert 0 < found.examples < 5000
        assert sum(found.coverage.verdicts.values()) == found.examples


def test_what_judging_raises_is_raised_and_not_dropped_with_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by hand: Hypothesis runs the last example again, and its second answer was taken for the end of a chunk."""
    real, judged = transfer_campaign.judge_transfer, []

    def broken(pair: Pair, allocator: str) -> JudgedTransfer:
        judged.append(pair)
        if len(judged) == 20:
            raise ZeroDivisionError("in a rule")
        return real(pair, allocator)

    monkeypatch.setattr(transfer_campaign, "judge_transfer", broken)
    with pytest.raises(SpecError, match=r"'transfer' gave layouts .*\(ZeroDivisionError: in a rule\) in chunk 0"):
        campaign("transfer", None, workers=1)
    judged.clear()
    monkeypatch.setattr(transfer_campaign, "judge_pair", lambda pair, *_, **__: broken(pair, "transfer").verdict)
    with pytest.raises(ZeroDivisionError):
        transfer_campaign.run_pairs(200, seed=1)
