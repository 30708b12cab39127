"""The shadow of an engine's cache manager: silent over a sound one, and every planted fault is told by its rule."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvsan.ci.campaign import Options
from kvsan.ci.cases import load_case
from kvsan.ci.engines import comparison, installed, vllm
from kvsan.ci.engines.installed import SERVING, Installed
from kvsan.ci.engines.running import EngineCache
from kvsan.ci.engines.supervisor import EngineProcess
from kvsan.ci.ledger import SavedCases
from kvsan.ci.traces.campaign import run_trace_campaign
from kvsan.ci.traces.coverage import coverage_of_traces, new_counts
from kvsan.ci.traces.judging import judge_trace
from kvsan.cli.fuzz_run import result_document
from kvsan.cli.output import print_report, terminal
from kvsan.cli.report_fuzz import report_result
from kvsan.model.errors import SpecError
from kvsan.model.layers import AttentionLayer
from kvsan.model.spec import CacheSpec
from kvsan.sim.cache.managers import ENGINE_KINDS, running_cache
from kvsan.sim.cache.trace import Operation
from kvsan.sim.finding import Finding
from kvsan.sim.rejection import Rejected
from kvsan.strategies.worlds import worlds_for

MANAGER = Path(__file__).with_name("fake_manager.py")
TRACES = 40
OPERATIONS = 60

FAULTS = {
    "leak": ("conservation",),
    "a shared block is freed": ("conservation",),
    "a block is handed out twice": ("conservation", "namespace", "refcount"),
    "preempt keeps the table": ("conservation",),
    "a key without scope": ("cache-key",),
    "a key of the block alone": ("cache-key",),
    "a key outlives its block": ("freshness",),
    "a block is cached too early": ("freshness",),
    "a hit on all tokens": ("freshness",),
    "a shared block is written": ("freshness", "refcount"),
    "a table too short": ("capacity",),
    "half of the room is not given": ("capacity",),
    "the null block is handed out": ("sentinel",),
    "groups share blocks": ("namespace",),
    "a window is dropped too early": ("window",),
    "ends": ("unexplained-rejection",),
}
"""What the manager does wrong, and the rules of which one must say so first."""

Maker = Callable[[str], EngineProcess]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a maker of processes of the manager with one fault."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made: list[EngineProcess] = []

    def make(fault: str) -> EngineProcess:
        text = MANAGER.read_text(encoding="utf-8")
        assert fault in text
        (tmp_path / "fake_manager.py").write_text(text.replace('FAULT = ""', f"FAULT = {fault!r}"), encoding="utf-8")
        made.append(EngineProcess((sys.executable, str(SERVING), "fake_manager")))
        return made[-1]

    yield make
    for process in made:
        process.close()


def drawn(rng: random.Random) -> list[Operation]:
    operations = []
    for _ in range(OPERATIONS):
        kind = rng.choice((*ENGINE_KINDS, "admit", "step", "step", "step", "complete", "complete", "extend"))
        request = rng.randrange(3)
        if kind == "admit":
            operations.append(Operation("admit", request, rng.randint(1, 9), rng.choice((0, 0, 0, 2, 8, 3))))
        elif kind == "extend":
            operations.append(Operation("extend", request, rng.randint(1, 3)))
        elif kind == "step":
            operations.append(Operation("step", rng.randint(1, 7), rng.choice((0, 0, 1, 3))))
        elif kind == "complete":
            operations.append(Operation("complete"))
        else:
            operations.append(Operation(kind, request))
    return operations


def run(process: EngineProcess, operations: list[Operation]) -> tuple[list[Finding], set[str], list[str]]:
    cache = EngineCache(process, {})
    refused = []
    for number, operation in enumerate(operations):
        refusal = cache.apply(number, operation)
        refused += [refusal.reason] if refusal is not None else []
        if cache.shadow.findings:
            break
    return cache.shadow.findings, cache.seen, refused


def test_a_sound_manager_has_no_finding_and_every_situation_comes_about(manager: Maker) -> None:
    process = manager("")
    rng = random.Random(1)
    seen: set[str] = set()
    reasons: set[str] = set()
    for _ in range(TRACES):
        findings, met, refused = run(process, drawn(rng))
        assert findings == []
        seen |= met
        reasons |= set(refused)
    assert seen >= {
        *("full-block hit", "eviction", "two steps in flight", "prompt in chunks", "free under a step"),
        *("window passed", "resume in other slots", "preempted for room"),
    }
    assert reasons >= {"no-room", "unknown-request", "known-request", "suspended", "not-suspended", "nothing-waits"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_by_its_rule(manager: Maker, fault: str) -> None:
    process = manager(fault)
    rng = random.Random(2)
    for _ in range(TRACES):
        operations = drawn(rng)
        findings, _, _ = run(process, operations)
        if findings:
            again, _, _ = run(process, operations)
            assert again == findings, "the same trace, the same findings"
            assert findings[0].rule in FAULTS[fault], findings
            assert findings[0].message.startswith("Fake 1.2")
            return
    pytest.fail(f"{fault!r} was not found in {TRACES} traces")


def test_tokens_are_never_given_twice(manager: Maker) -> None:
    cache = EngineCache(manager(""), {})
    for number, (operation, reason) in enumerate(
        [
            (Operation("admit", 0, 0), "no-tokens"),
            (Operation("step", 1), "nothing-waits"),
            (Operation("complete"), "no-step"),
            (Operation("admit", 0, 3), None),
            (Operation("extend", 0), "no-tokens"),
            (Operation("step", 1), None),
            (Operation("step", 1), "nothing-waits"),
            (Operation("extend", 0, 254), "table-width"),
            (Operation("fork", 0, 2), "not-supported"),
            (Operation("free", 1), "unknown-request"),
            (Operation("free", 0), None),
            (Operation("complete"), None),
        ]
    ):
        refusal = cache.apply(number, operation)
        assert (None if refusal is None else refusal.reason) == reason, operation
    assert cache.shadow.findings == []
    assert cache.state.free_count == cache.state.blocks - 1, "all but the null block are free again"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('"blocks": BLOCKS', '"blocks": "many"'),
        ('"free": self.free_blocks', '"free": [99]'),
        ('"references": self.references', '"references": []'),
        ('[number, request["rows"]]', "[number, []]"),
    ],
)
def test_an_answer_that_makes_no_sense_is_one_line(manager: Maker, tmp_path: Path, change: str, words: str) -> None:
    process = manager("")
    path = tmp_path / "fake_manager.py"
    text = path.read_text(encoding="utf-8")
    assert change in text
    path.write_text(text.replace(change, words), encoding="utf-8")
    with pytest.raises(SpecError, match=r"engine: Fake 1\.2 answered") as caught:
        run(process, [Operation("admit", 0, 3)])
    assert "\n" not in str(caught.value)


@pytest.fixture
def installed_manager(manager: Maker, monkeypatch: pytest.MonkeyPatch):
    """Let ``vllm`` stand for the manager with one fault."""

    def install(fault: str) -> None:
        manager(fault)
        fake = Installed("vLLM", "vllm", "KVSAN_VLLM_PYTHON", "fake_manager", ".ci/engine-vllm")
        monkeypatch.setattr(vllm, "VLLM", fake)
        monkeypatch.setenv("KVSAN_VLLM_PYTHON", sys.executable)
        installed.warm_process(fake).close()
        worlds_for.cache_clear()

    yield install
    worlds_for.cache_clear()


def test_a_campaign_reduces_a_fault_and_its_case_runs_again(installed_manager, tmp_path: Path) -> None:
    installed_manager("a window is dropped too early")
    folder = tmp_path / "cases"
    result = run_trace_campaign(Options(allocator="vllm", examples=20, seed=1, cases=folder))
    [fault] = result.faults
    assert fault.rule == "window"
    assert fault.size <= 5, fault.trace
    [path] = folder.iterdir()
    case = load_case(path)
    judged = judge_trace(case.input, case.allocator)
    assert [found.message for found in judged.outside] == [fault.message]
    installed_manager("")
    assert judge_trace(case.input, case.allocator).faults == ()


def test_a_sound_campaign_covers_what_an_engine_can_meet(installed_manager) -> None:
    installed_manager("")
    result = run_trace_campaign(Options(allocator="vllm", examples=50, seed=1))
    assert (result.faults, result.coverage.classes_never, result.coverage.never) == ([], [], [])
    assert list(result.coverage.done) == list(ENGINE_KINDS)


def test_without_prefix_caching_no_hit_is_asked_for(installed_manager) -> None:
    installed_manager("")
    coverage = coverage_of_traces(new_counts(), "vllm-block-outermost", SavedCases())
    assert coverage.classes_never == [
        *("two steps in flight", "prompt in chunks", "free under a step", "window passed"),
        *("resume in other slots", "preempted for room"),
    ]


def test_a_trace_over_an_engine_is_not_recorded(installed_manager) -> None:
    installed_manager("")
    with pytest.raises(SpecError, match="allocator: a trace over vllm moves no bytes that could be recorded"):
        running_cache(CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=8),), slots=4), "vllm", record=True)


def test_what_its_model_refuses_is_not_asked_for(installed_manager) -> None:
    """Pages scattered by heads need one shape: no fault of an engine that says so in words of its own."""
    installed_manager("")
    layers = (AttentionLayer(kv_heads=1, head_dim=8), AttentionLayer(kv_heads=2, head_dim=8))
    with pytest.raises(Rejected) as caught:
        running_cache(CacheSpec(layers=layers, tokens_per_block=16, slots=4), "vllm-lhbnc")
    assert not caught.value.supported


def test_a_report_names_the_engine(installed_manager, capsys: pytest.CaptureFixture[str]) -> None:
    installed_manager("")
    options = Options(allocator="vllm", examples=2, seed=1)
    result = run_trace_campaign(options)
    assert result_document(result)["engine"] == "Fake 1.2"
    console = terminal()
    report_result(console, result, options)
    print_report(console)
    assert "vllm (Fake 1.2): 2 traces" in " ".join(capsys.readouterr().out.split())
    stopped = msgspec.structs.replace(result, allocator="vllm-bhlnc", interrupted=True)
    installed.warm_process(vllm.VLLM).close()
    installed._process.cache_clear()
    assert "engine" not in result_document(stopped), "an engine is not started for its name after Ctrl-C"


@pytest.mark.engine
@pytest.mark.parametrize("name", ["vllm", "vllm-block-outermost"])
def test_the_engines_own_manager_keeps_its_books(vllm_process: EngineProcess, name: str, monkeypatch) -> None:
    monkeypatch.setattr(comparison, "warm_process", lambda engine: vllm_process)
    worlds_for.cache_clear()
    result = run_trace_campaign(Options(allocator=name, examples=50, seed=9))
    worlds_for.cache_clear()
    assert result.faults == []
    assert result.operations > 5_000
    assert set(result.coverage.classes_never) <= {"window passed"}
