"""Supervised replays: crashes, hangs and noise of a child, attributed to the layout that brought them about."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import msgspec
import pytest

from kvsan.ci.replay.messages import Answer
from kvsan.ci.replay.supervisor import Crash, Options, Supervisor, Unusable
from kvsan.ci.replay.verdict import disagreements
from kvsan.model.formats import ElementFormat
from kvsan.sim.arena import Arena
from kvsan.sim.finding import Finding
from kvsan.sim.layout import Buffer, Layout, LifeCycle, Pool
from kvsan.sim.page import dense_page

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "triton")), reason="needs torch and triton"
)

CHILD = """
import ctypes, os, signal, sys, time
from kvsan.ci.replay import child
from kvsan.kernels.replay import Replayer

replay = Replayer.replay

def unsafe(self, layouts):
    layouts = list(layouts)
    print("noise on the standard output", flush=True)
    os.write(1, b"more noise")
    for layout in layouts:
        if layout.notes == ("crash",):
            ctypes.string_at(0)
        if layout.notes == ("exit",):
            os._exit(7)
        if layout.notes == ("raise",):
            raise RuntimeError("an illegal memory access\\nwas encountered")
        if layout.notes == ("hang",):
            time.sleep(60)
    yield from replay(self, layouts)

Replayer.replay = unsafe
raise SystemExit(child.main(sys.argv[1:]))
"""


@pytest.fixture
def unsafe_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a child module that crashes where a layout's note tells it to."""
    name = f"unsafe_child_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    return name


def layout_with(*notes: str, size: int = 64) -> Layout:
    page = dense_page(ElementFormat.UINT8, ("byte",), (5,))
    return Layout(
        allocator="raw",
        pools=(Pool("target", 0, 0, 4, 16, size),),
        life_cycles=(LifeCycle("target", 0),),
        buffers=(Buffer("target", 0, "key", 0, 0, 1, 16, 4, 5, page),),
        notes=notes,
    )


def options(child: str = "kvsan.ci.replay.child", **fields: object) -> Options:
    return msgspec.structs.replace(Options(device="cpu", max_bytes=1 << 20, child=child), **fields)


def test_layouts_come_back_in_order_with_the_arenas_digest() -> None:
    layouts = [layout_with(size=64 + extra) for extra in range(11)]
    for workers in (1, 2):
        with Supervisor(options(workers=workers)) as supervisor:
            assert supervisor.hello is not None
            assert {"torch", "triton"} <= set(supervisor.hello.versions)
            answers = list(supervisor.replay(layouts))
        assert [answer.number for answer in answers] == list(range(11))
        assert [answer.digest for answer in answers] == [Arena.build(layout).digest() for layout in layouts]


@pytest.mark.parametrize(
    ("note", "words"),
    [
        ("crash", "its process ended by SIGSEGV"),
        ("exit", "its process ended with status 7"),
        ("raise", "RuntimeError: an illegal memory access was encountered"),
    ],
)
def test_a_crash_is_its_layouts_and_the_others_are_replayed(unsafe_child: str, note: str, words: str) -> None:
    layouts = [layout_with(), layout_with(note), layout_with(), layout_with(size=70)]
    with Supervisor(options(unsafe_child)) as supervisor:
        results = list(supervisor.replay(layouts))
    crash = results.pop(1)
    assert isinstance(crash, Crash)
    assert (crash.number, crash.message) == (1, words)
    assert crash.finding.rule == "replay-mismatch"
    assert all(isinstance(result, Answer) and result.digest for result in results)


def test_a_hang_is_ended_and_attributed(unsafe_child: str) -> None:
    with Supervisor(options(unsafe_child, patience_seconds=4.0)) as supervisor:
        results = list(supervisor.replay([layout_with("hang"), layout_with()]))
    assert isinstance(results[0], Crash)
    assert results[0].message == "no answer for 4 s"
    assert isinstance(results[1], Answer)


def test_a_device_that_cannot_be_opened_is_one_line() -> None:
    with pytest.raises(Unusable) as caught, Supervisor(options(device="tpu")):
        pass
    assert str(caught.value) == "device: found 'tpu', needs cpu or cuda"


def test_a_child_that_does_not_start_is_one_line() -> None:
    words = "the replay's process did not start: its process ended with status 1"
    with pytest.raises(Unusable, match=words), Supervisor(options("no_such_module_anywhere")):
        pass


def answer_with(rules: tuple[str, ...], static: tuple[str, ...]) -> Answer:
    findings = tuple([Finding(rule=rule, message="", remedy="") for rule in rules])
    return Answer(0, "0", findings, None, (), static, True, 1)


@pytest.mark.parametrize(
    ("seen", "static", "words"),
    [
        (("alias",), ("alias",), []),
        ((), (), []),
        (("alias",), (), ["memory breaks the rule alias, and the static check does not"]),
        ((), ("op-address",), ["the static check breaks the rule op-address, and memory does not"]),
        ((), ("int32", "bounds", "sentinel"), []),
        (("int32",), (), ["memory breaks the rule int32, and the static check does not"]),
        (("replay-mismatch",), (), []),
    ],
)
def test_a_rule_that_one_side_alone_breaks_is_never_hidden(
    seen: tuple[str, ...], static: tuple[str, ...], words: list[str]
) -> None:
    assert [finding.message for finding in disagreements(answer_with(seen, static))] == words
