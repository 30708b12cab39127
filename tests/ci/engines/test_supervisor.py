"""A supervised engine: kept warm, and whatever it does to itself is an answer."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from kvsan.ci.engines.supervisor import AHEAD, EngineEnded, EngineProcess
from kvsan.model.errors import SpecError

ANSWER = """
import sys


def answer(request, greeting):
    asked = request["do"]
    if asked == "crash":
        print("Fatal: no such page", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if asked == "exit":
        os._exit(3)
    if asked == "hang":
        time.sleep(600)
    if asked == "raise":
        raise KeyError("page")
    print("noise of the engine")
    return {"asked": asked, "pid": os.getpid(), "large": "x" * 200000}
"""


@pytest.fixture
def process(fake_process: Callable[..., EngineProcess]) -> EngineProcess:
    return fake_process(ANSWER, seconds=1)


def test_one_process_answers_many_questions(process: EngineProcess) -> None:
    first, second = process.ask({"do": "one"}), process.ask({"do": "two"})
    assert (first["asked"], second["asked"]) == ("one", "two")
    assert first["pid"] == second["pid"] == process.greeting["pid"]
    assert (process.version, process.starts) == ("1.2", 1)
    assert second["seconds"] >= 0


def test_it_works_on_a_question_that_is_asked_later(process: EngineProcess) -> None:
    one, two = {"do": "one"}, {"do": "two"}
    process.begin(one)
    process.begin(two)  # reads the answer to the first
    assert [process.ask(question)["asked"] for question in (one, two)] == ["one", "two"]
    process.begin(one)
    assert process.ask(two)["asked"] == "two"
    assert process.ask(one)["asked"] == "one"
    process.begin({"do": "crash"})
    process.begin(two)  # in a new process
    assert process.ask(two)["asked"] == "two"
    with pytest.raises(EngineEnded, match="SIGSEGV"):
        process.ask({"do": "crash"})
    for number in range(30):  # begun and never asked for: not kept forever
        process.begin({"do": number})
    assert len(process._kept) <= AHEAD + 1


def test_what_the_engine_raises_is_an_answer(process: EngineProcess) -> None:
    raised = process.ask({"do": "raise"})
    assert (raised["error"], raised["message"]) == ("KeyError", "'page'")
    assert process.ask({"do": "one"})["asked"] == "one"
    assert process.starts == 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("crash", r"ended by SIGSEGV \(Fatal: no such page\)"),
        ("exit", "ended with status 3"),
        ("hang", "no answer after 1 s"),
    ],
)
def test_an_end_is_told_and_the_next_question_starts_anew(process: EngineProcess, asked: str, words: str) -> None:
    before = process.ask({"do": "one"})
    with pytest.raises(EngineEnded, match=words):
        process.ask({"do": asked})
    after = process.ask({"do": "two"})
    assert after["asked"] == "two"
    assert after["pid"] != before["pid"]
    assert process.starts == 2


def test_a_process_that_was_killed_in_between_is_started_again(process: EngineProcess) -> None:
    killed = process.ask({"do": "one"})["pid"]
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while process.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.ask({"do": "two"})["pid"] != killed


def test_no_process_is_left_behind(process: EngineProcess) -> None:
    pid = process.ask({"do": "one"})["pid"]
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


TALK = "print('{\"version\": \"1\"}', flush=True); import sys; sys.stdin.readline(); print('%s', flush=True)"


@pytest.mark.parametrize(("said", "words"), [("no json", "with no JSON"), ("[1]", "with no JSON object")])
def test_an_answer_that_is_no_document_ends_the_process(said: str, words: str) -> None:
    talking = EngineProcess((sys.executable, "-c", TALK % said))
    with pytest.raises(EngineEnded, match=f"answered {words}"):
        talking.ask({})
    assert not talking.running


def test_what_cannot_start_is_bad_input() -> None:
    with pytest.raises(SpecError, match="engine: cannot start 'no-such-python': No such file"):
        EngineProcess(("no-such-python",)).start()
    broken = EngineProcess((sys.executable, "-c", "raise SystemExit('no vllm here')"))
    with pytest.raises(SpecError, match=r"did not start: the process ended with status 1 \(no vllm here\)"):
        broken.ask({})
