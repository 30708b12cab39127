"""Engines that are installed: found or not, their errors as refusals, and a campaign that outlives them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvsan.ci.campaign import Chunk, Options, run_campaign
from kvsan.ci.cases import load_case
from kvsan.ci.engines import comparison, differential, installed, vllm
from kvsan.ci.engines.installed import VLLM, Installed, python_of, refusal_of
from kvsan.ci.engines.supervisor import EngineProcess
from kvsan.ci.engines.vllm import VllmAllocator
from kvsan.ci.replay.messages import LayoutJob
from kvsan.cli.replay_input import Source, prepare
from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer
from kvsan.model.spec import CacheSpec, Consumer, encode_spec
from kvsan.sim.allocators.vllm import allocators as models
from kvsan.sim.engines.difference import differences
from kvsan.sim.layout import Layout
from kvsan.sim.registry import ALLOCATORS, allocate, resolve
from kvsan.sim.rejection import Rejected
from kvsan.sim.verdict import judge

Maker = Callable[..., EngineProcess]

FULL = AttentionLayer(kv_heads=8, head_dim=128)
SPEC = CacheSpec(layers=(FULL,), tokens_per_block=16, slots=2, consumer=Consumer(kv_layout="NHD"))
NAMES = [entry.name for entry in ALLOCATORS if entry.kind == "installed"]

ONE_LAYER = """
def answer(request, greeting):
    [stage] = request["stages"]
    [entry] = stage
    axes = ["block", "head", "token", "content"]
    view = {"name": entry["name"], "part": 0, "group": 0, "allocation": 0, "axes": axes, "offset": 0,
            "shape": [2, 8, 16, 256], "stride": [32768, 256, 2048, 1], "item": 2}
    plan = {"blocks": 2, "allocations": [131072], "groups": [[entry["name"]]], "views": [view]}
    return change(plan, view)
"""


def asked(make: Maker, change: str) -> Layout:
    """Return what ``vllm`` makes of a fake engine's plan of one layer, after ``change`` to plan and view."""
    process = make(ONE_LAYER + f"\n\ndef change(plan, view):\n    {change}\n    return plan\n")
    return VllmAllocator("vllm", process)(SPEC)


def test_views_become_a_layout_equal_to_the_models(fake_process: Maker) -> None:
    layout = asked(fake_process, "pass")
    assert list(differences(layout, allocate(SPEC, "vllm-e3"))) == []
    assert layout.notes == ("planned and viewed by Fake 1.2",)


def test_a_replay_asks_the_engine_once_and_sends_its_layout(fake_process: Maker, tmp_path, monkeypatch) -> None:
    """The child that has the device knows no engine: found by replaying one, which was refused there."""
    process = fake_process(ONE_LAYER + "\n\ndef change(plan, view):\n    return plan\n")
    monkeypatch.setenv("KVSAN_VLLM_PYTHON", sys.executable)
    monkeypatch.setattr(comparison, "warm_process", lambda engine: process)
    (tmp_path / "spec.json").write_bytes(encode_spec(SPEC))
    [prepared] = prepare([Source(str(tmp_path / "spec.json"), True)], {}, "vllm")
    assert prepared.allocator == "vllm"
    assert isinstance(prepared.item, LayoutJob)
    assert prepared.item.layout.notes[-1] == "planned and viewed by Fake 1.2"
    assert list(differences(prepared.item.layout, allocate(SPEC, "vllm-e3"))) == []


KERNEL = """
def answer(request, greeting):
    assert request["kernel"] == 16
    [[entry]] = request["stages"]
    axes = ["block", "head", "token", "content"]
    view = {"name": entry["name"], "part": 0, "group": 0, "allocation": 0, "axes": axes, "offset": 0,
            "shape": [4, 8, 16, 256], "stride": [32768, STRIDE, 1], "item": 2}
    return {"blocks": 2, "allocations": [262144], "groups": [[entry["name"]]], "views": [view]}
"""


@pytest.mark.parametrize(("kv_layout", "strides"), [("NHD", "256, 2048"), ("HND", "4096, 256")])
def test_kernel_blocks_are_an_axis_of_a_block(fake_process: Maker, kv_layout: str, strides: str) -> None:
    spec = msgspec.structs.replace(SPEC, tokens_per_block=32, consumer=Consumer(kv_layout=kv_layout))
    layout = VllmAllocator("vllm-kernel-blocks", fake_process(KERNEL.replace("STRIDE", strides)))(spec)
    assert list(differences(layout, models.allocate_e3(spec, kernel_tokens=16))) == []
    # heads before tokens: kernel blocks lie elsewhere than the planner's would
    whole = list(differences(layout, models.allocate_e3(spec)))
    assert bool(whole) == (kv_layout == "HND")
    assert dict(zip(layout.buffers[0].page.axes, layout.buffers[0].page.shape, strict=True))["page"] == 2


@pytest.mark.parametrize("change", [{"tokens_per_block": 24}, {"kv_format": ElementFormat.NVFP4}])
def test_kernel_blocks_are_asked_for_where_they_divide(fake_process: Maker, change: dict[str, Any]) -> None:
    with pytest.raises(Rejected, match="kernel blocks of 16 tokens need blocks of a multiple") as caught:
        VllmAllocator("vllm-kernel-blocks", fake_process(KERNEL))(msgspec.structs.replace(SPEC, **change))
    assert not caught.value.supported


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('view["offset"] += 2', "layer 0's key is at byte 2, 2 slots by 65536"),
        ('view["stride"][1], view["stride"][2] = 4096, 256', "16 token by 512"),
        ('view["stride"][0] += 16', "2 slots by 65568"),
        ('plan["allocations"] = [131074]', "131074 B in vllm, 131072 B in vllm-e3"),
    ],
)
def test_whatever_moved_is_a_difference(fake_process: Maker, change: str, words: str) -> None:
    found = list(differences(asked(fake_process, change), allocate(SPEC, "vllm-e3")))
    assert any(words in sentence for sentence in found), found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('del plan["views"]', "Fake 1.2 answered what is no plan"),
        ('plan["allocations"] = [131073]', "131073 B for 2 blocks, which do not divide"),
        ('view["name"] = "x"', "answered a view of 'x', which is not in its group"),
        ('view["allocation"] = 1', "a view of allocation 1, which it did not list"),
        ('view["axes"] = ["block"]', "whose axes do not fit"),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error_in_one_line(fake_process: Maker, change: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        asked(fake_process, change)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('view["shape"][1] = 4', "as 2 block, 4 head, 16 token, 256 content, and the layer needs 2 blocks, 8 head"),
        ('view["shape"][0] = 3', "as 3 block, 8 head"),
        ('view["shape"][2:] = [32, 128]', "32 token, 128 content"),
    ],
)
def test_a_view_that_is_not_the_layers_is_a_fault(fake_process: Maker, change: str, words: str) -> None:
    with pytest.raises(Rejected) as caught:
        asked(fake_process, change)
    assert words in caught.value.message
    assert caught.value.rule == "unexplained-rejection"


@pytest.mark.parametrize(
    ("answer", "rule", "supported"),
    [
        ({"error": "AssertionError", "message": ""}, "unexplained-rejection", True),
        ({"error": "ZeroDivisionError", "message": "integer modulo by zero"}, "unexplained-rejection", True),
        ({"error": "ValueError", "message": ""}, "unexplained-rejection", True),
        ({"error": "NotImplementedError", "message": "page size is not divisible"}, "rejected", True),
        ({"error": "ValueError", "message": "No available memory for the cache blocks"}, "rejected", False),
    ],
)
def test_an_error_becomes_a_refusal_of_its_class(answer: dict[str, object], rule: str, supported: bool) -> None:
    refusal = refusal_of(answer, "vLLM 0.33.0")
    assert (refusal.rule, refusal.supported) == (rule, supported)
    assert refusal.message.startswith("vLLM 0.33.0")


def test_what_the_model_refuses_too_is_no_fault_if_the_engine_says_why() -> None:
    expected = Rejected("pages differ", "use fewer", supported=False)
    assert not refusal_of({"error": "ValueError", "message": "mixed page sizes"}, "vLLM", expected).supported
    assert refusal_of({"error": "StopIteration", "message": ""}, "vLLM", expected).rule == "unexplained-rejection"


@pytest.mark.parametrize("name", NAMES)
def test_without_an_engine_one_line_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "KVSAN_SGLANG_PYTHON" if name.startswith("sglang") else "KVSAN_VLLM_PYTHON"
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match=rf"engine: \w+ is not installed beside kvsan: \.ci/engine-.*{variable}"):
        resolve(name)
    monkeypatch.setenv(variable, "/nowhere/python")
    with pytest.raises(SpecError, match=rf"engine: {variable} names .*python, which is no program"):
        resolve(name)


def test_the_named_interpreter_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSAN_VLLM_PYTHON", sys.executable)
    assert python_of(VLLM) == sys.executable


def test_what_the_model_does_not_know_is_not_asked() -> None:
    class Untouched(EngineProcess):
        def __init__(self) -> None:
            self.greeting = {"engine": "vLLM", "version": "0.33.0", "era": 3}

        def start(self) -> None:
            pass

        def ask(self, question: dict[str, Any]) -> dict[str, Any]:
            raise AssertionError("asked")

    sinks = msgspec.structs.replace(FULL, window=64, sink_tokens=4)
    with pytest.raises(Rejected, match="sinks"):
        VllmAllocator("vllm", Untouched())(msgspec.structs.replace(SPEC, layers=(sinks,)))


BAD = """
def answer(request, greeting):
    count = sum(len(stage) for stage in request["stages"])
    if count % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if count % 3 == 1:
        os._exit(9)
    raise ZeroDivisionError("no pages")
"""


COUNTED = """
seen = []


def answer(request, greeting):
    seen.append(1)
    raise ValueError(f"question {len(seen)}")
"""


def test_a_campaign_asks_each_spec_once_and_judges_all(
    fake_process: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine works on the next spec while one is judged: none may be lost, or asked twice."""
    fake_process(COUNTED)
    fake = Installed("vLLM", "vllm", "KVSAN_VLLM_PYTHON", "fake_engine", ".ci/engine-vllm")
    monkeypatch.setattr(vllm, "VLLM", fake)
    monkeypatch.setenv("KVSAN_VLLM_PYTHON", sys.executable)
    chunk = Chunk(Options(allocator="vllm", seed=3), 0)
    chunk.run(40)
    result = chunk.result()
    asked = installed.warm_process(fake).ask({"the": "last"})["message"]
    assert (result.examples, result.refused) == (40, 40)
    assert sum(result.rows.values()) == 40
    assert int(asked.split()[1]) - 1 <= 40
    assert int(asked.split()[1]) - 1 >= 30, "some are not asked: their model does not know them"
    installed.warm_process(fake).close()


def test_a_campaign_outlives_its_engine_and_saves_what_ended_it(
    fake_process: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_process(BAD)
    fake = Installed("vLLM", "vllm", "KVSAN_VLLM_PYTHON", "fake_engine", ".ci/engine-vllm")
    monkeypatch.setattr(vllm, "VLLM", fake)
    monkeypatch.setenv("KVSAN_VLLM_PYTHON", sys.executable)
    result = run_campaign(Options(allocator="vllm", examples=30, seed=3, cases=tmp_path / "cases", reduce=False))
    assert result.examples == 30
    [fault] = [fault for fault in result.faults if fault.rule == "unexplained-rejection"]
    [saved] = (tmp_path / "cases").iterdir()
    again = judge(load_case(saved).input, "vllm")
    assert [found.rule for found in again.faults] == ["unexplained-rejection"]
    assert "Fake 1.2" in again.faults[0].message
    assert fault.case is not None
    installed.warm_process(fake).close()


def test_a_comparison_without_an_engine_is_bad_input(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("KVSAN_VLLM_PYTHON", "/nowhere/python")
    with pytest.raises(SystemExit) as caught:
        differential.main(["--allocator", "vllm"])
    assert caught.value.code == 2
    assert "error: engine: KVSAN_VLLM_PYTHON names" in capsys.readouterr().err
