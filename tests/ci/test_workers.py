"""Campaigns as processes: signals, workers that an allocator takes down, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsan.ci.cases import load_case
from kvsan.ci.faults import CANARY
from kvsan.sim.verdict import judge

pytestmark = pytest.mark.slow

ALLOCATORS = '''
"""Allocators of somebody's own that are slow, loud, or the end of their process."""
import os
import threading
import time
import traceback

from kvsan.sim.allocators.faulty.storage import allocate_canary
from kvsan.sim.allocators.trtllm.allocators import allocate_dense


def loud(spec):
    print("printed by an allocator")
    return allocate_canary(spec)


def ending(spec):
    if spec.parallel.tp > 8:
        os._exit(7)
    return allocate_dense(spec)


def killed(spec):
    if spec.parallel.tp > 8:
        os.kill(os.getpid(), 9)
    return allocate_dense(spec)


def ends_once(spec):
    if not os.path.exists("ended"):
        open("ended", "w").close()
        os._exit(7)
    return allocate_dense(spec)


def slow(spec):
    time.sleep(0.05)
    return allocate_canary(spec)


def threads(spec):
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return allocate_canary(spec)


def reduced():
    """Whether a case is reduced, now or earlier."""
    if any(frame.filename.endswith("reduction.py") for frame in traceback.extract_stack()):
        open("reducing", "w").close()
    return os.path.exists("reducing")


def ends_reduced(spec):
    if reduced():
        os._exit(7)
    return allocate_canary(spec)


def slow_reduced(spec):
    if reduced():
        time.sleep(0.2)
    return allocate_canary(spec)
'''

LEAVES = "import os\n\nos._exit(0)\n"
"""A module that ends whoever imports it."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put the module of allocators into a folder of its own, and go there; return its name."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "odd_allocators.py").write_text(ALLOCATORS, encoding="utf-8")
    (tmp_path / "project" / "leaves.py").write_text(LEAVES, encoding="utf-8")
    monkeypatch.chdir(tmp_path / "project")
    return "odd_allocators"


@pytest.fixture(scope="module")
def library(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PYTHONPATH from which ``kvsan`` is importable, whatever the checkout's folder is called."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "kvsan").symlink_to(root)
    return folder


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(own: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts ``kvsan fuzz`` in a process group of its own; none outlives the test."""
    started: list[subprocess.Popen[str]] = []
    monkeypatch.setenv("PYTHONPATH", str(library))
    Path("temporary").mkdir()
    monkeypatch.setenv("TMPDIR", "temporary")

    def begin(allocator: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvsan", "fuzz", "--allocator", allocator, *options, "--json"]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True))
        return started[-1]

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if entry.name.isdigit() and int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def some_case() -> bool:
    return Path("cases").is_dir() and any(Path("cases").glob("*.json"))


def left_behind() -> list[str]:
    """Return the notes of workers that are still there."""
    return [name for name in os.listdir("temporary") if name.startswith("kvsan-workers-")]


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@linux
@pytest.mark.parametrize(
    ("number", "workers", "group"),
    [
        (signal.SIGINT, 1, True),
        (signal.SIGINT, 2, True),
        (signal.SIGINT, 2, False),
        (signal.SIGTERM, 1, False),
        (signal.SIGTERM, 2, True),
        (signal.SIGTERM, 2, False),
    ],
)
def test_ctrl_c_and_sigterm_save_report_and_leave_no_process(
    own: str, start: Start, number: signal.Signals, workers: int, group: bool
) -> None:
    options = ("--max-examples", "100000", "--workers", str(workers), "--cases", "cases")
    process = start(f"{own}:slow" if group else CANARY, *options)
    wait_for(some_case)
    workers_running = children(process.pid)
    (os.killpg if group else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "kvsan: interrupted\n"
    document = json.loads(out)
    assert document["interrupted"] is True
    assert 0 < document["examples"] < 100_000
    assert "alias" in {fault["rule"] for fault in document["faults"]}
    for fault in document["faults"]:
        assert fault["rule"] in {entry.rule for entry in load_case(Path(fault["case"])).found}
    assert {Path(fault["case"]).name for fault in document["faults"]} == set(os.listdir("cases"))
    wait_for(lambda: all(map(gone, workers_running)), 10)
    assert left_behind() == []


@linux
def test_an_impatient_ctrl_c_leaves_nothing_behind_either(own: str, start: Start) -> None:
    process = start(f"{own}:slow", "--max-examples", "100000", "--workers", "2", "--cases", "cases")
    wait_for(some_case)
    workers_running = children(process.pid)
    for _ in range(5):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.03)
    _, err = process.communicate(timeout=30)
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in err
    wait_for(lambda: all(map(gone, workers_running)), 10)
    assert left_behind() == []
    for path in Path("cases").glob("*.json"):
        assert load_case(path).found


@linux
def test_sigkill_leaves_whole_cases_and_no_process(own: str, start: Start) -> None:
    process = start(f"{own}:slow", "--max-examples", "100000", "--workers", "2", "--cases", "cases")
    wait_for(some_case)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    for path in Path("cases").glob("*.json"):
        case = load_case(path)
        assert {entry.rule for entry in case.found} <= {fault.rule for fault in judge(case.input, CANARY).faults}


@linux
def test_workers_do_not_outlive_a_killed_campaign(own: str, start: Start) -> None:
    process = start(f"{own}:slow", "--max-examples", "100000", "--workers", "2", "--cases", "cases")
    wait_for(some_case)
    running = children(process.pid)
    assert len(running) >= 2
    process.kill()
    wait_for(lambda: all(map(gone, running)), 20)
    wait_for(lambda: not left_behind(), 5)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("name", "words"), [("ending", "ends the process (status 7)"), ("killed", "ends the process (signal 9)")]
)
def test_an_allocator_that_takes_its_worker_down_is_one_line_with_its_spec(
    own: str, start: Start, name: str, words: str, workers: str
) -> None:
    process = start(f"{own}:{name}", "--max-examples", "1000", "--workers", workers, "--cases", "cases")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.startswith(f"kvsan: --allocator: '{own}:{name}' {words} in chunk ")
    assert err.count("\n") == 1
    (path,) = [path for path in Path("cases").iterdir() if str(path) in err]
    assert load_case(path).input.parallel.tp > 8


def test_a_worker_that_ends_for_no_visible_reason_is_one_line(own: str, start: Start) -> None:
    process = start(f"{own}:ends_once", "--max-examples", "1000", "--workers", "2", "--cases", "cases")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("kvsan: --workers: a worker process ended while ")
    assert err.count("\n") == 1


def test_an_allocator_that_ends_the_process_while_a_case_is_reduced(own: str, start: Start) -> None:
    process = start(f"{own}:ends_reduced", "--max-examples", "20", "--cases", "cases")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    problem = "ends the process (status 7) while a case is reduced, on the spec of cases/"
    assert err.startswith(f"kvsan: --allocator: '{own}:ends_reduced' {problem}")
    assert err.count("\n") == 1
    rules = {entry.rule for path in Path("cases").iterdir() for entry in load_case(path).found}
    assert "alias" in rules, "what the chunks found is saved"


def test_an_allocator_whose_import_ends_the_process(own: str, start: Start) -> None:
    out, err = (process := start("leaves:allocate")).communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err == "kvsan: --allocator: 'leaves:allocate' ends the process while it is imported\n"


def test_threads_of_an_allocator_keep_no_process_alive(own: str, start: Start) -> None:
    process = start(f"{own}:threads", "--max-examples", "20", "--cases", "cases")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
    assert json.loads(out)["faults"]


def test_sigint_while_a_case_is_reduced(own: str, start: Start) -> None:
    process = start(f"{own}:slow_reduced", "--max-examples", "20", "--cases", "cases")
    wait_for(Path("reducing").exists)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "kvsan: interrupted\n")
    document = json.loads(out)
    assert (document["interrupted"], document["examples"]) == (True, 20)
    for fault in document["faults"]:
        assert fault["rule"] in {entry.rule for entry in load_case(Path(fault["case"])).found}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_an_allocator_prints_is_no_output(own: str, start: Start, workers: str) -> None:
    process = start(f"{own}:loud", "--max-examples", "30", "--workers", workers, "--cases", "cases")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "printed by an allocator" in err
    assert json.loads(out)["faults"]
    assert set(os.listdir()) <= {"__pycache__", "cases", "leaves.py", "odd_allocators.py", "temporary"}, (
        "no .hypothesis in a user's folder"
    )
