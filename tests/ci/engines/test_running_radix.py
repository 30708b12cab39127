"""The shadow of slot allocators and a radix tree: silent over sound ones, and each planted fault told by its rule."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsan.ci.campaign import Options
from kvsan.ci.cases import load_case
from kvsan.ci.engines import comparison, installed, sglang
from kvsan.ci.engines.installed import SERVING, SGLANG, Installed, python_of
from kvsan.ci.engines.running_radix import RadixEngineCache
from kvsan.ci.engines.supervisor import EngineProcess
from kvsan.ci.traces.campaign import run_trace_campaign
from kvsan.ci.traces.judging import judge_trace
from kvsan.model.errors import SpecError
from kvsan.model.layers import AttentionLayer, RecurrentLayer
from kvsan.model.spec import CacheSpec
from kvsan.sim.cache.managers import ENGINE_KINDS, running_cache
from kvsan.sim.cache.trace import Operation
from kvsan.sim.finding import Finding
from kvsan.sim.rejection import Rejected
from kvsan.strategies.worlds import worlds_for

ENGINE = Path(__file__).with_name("fake_radix.py")
TRACES = 40
OPERATIONS = 60
SEEN = {
    *("full-block hit", "eviction", "two steps in flight", "prompt in chunks", "free under a step"),
    *("window passed", "resume in other slots", "preempted for room"),
}

FAULTS = {
    "leak": ("conservation",),
    "a page is handed out twice": ("conservation", "refcount"),
    "page 0 is handed out": ("sentinel",),
    "tokens are out of order": ("freshness",),
    "the tree's pages are freed too": ("conservation",),
    "duplicates are lost": ("conservation",),
    "duplicates are read": ("refcount",),
    "a prefix is not held": ("refcount",),
    "a prefix is held for ever": ("conservation",),
    "what is held is evicted": ("refcount",),
    "counts are off": ("conservation",),
    "a key without scope": ("freshness",),
    "a page is published too early": ("freshness", "refcount"),
    "a hit on all tokens": ("freshness",),
    "a window is dropped too early": ("window",),
    "half of the room is not given": ("capacity",),
    "ends": ("unexplained-rejection",),
}
"""What the engine does wrong, and the rules of which one must say so first."""

Maker = Callable[[str], EngineProcess]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a maker of processes of the engine with one fault."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made: list[EngineProcess] = []

    def make(fault: str) -> EngineProcess:
        text = ENGINE.read_text(encoding="utf-8")
        assert f'"{fault}"' in text
        (tmp_path / "fake_radix.py").write_text(text.replace('FAULT = ""', f"FAULT = {fault!r}"), encoding="utf-8")
        made.append(EngineProcess((sys.executable, str(SERVING), "fake_radix")))
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
            operations.append(Operation("admit", request, rng.randint(1, 17), rng.choice((0, 0, 0, 2, 8, 3))))
        elif kind == "extend":
            operations.append(Operation("extend", request, rng.randint(1, 3)))
        elif kind == "step":
            operations.append(Operation("step", rng.randint(1, 7), rng.choice((0, 0, 1, 3, 8))))
        elif kind == "complete":
            operations.append(Operation("complete"))
        else:
            operations.append(Operation(kind, request))
    return operations


def run(process: EngineProcess, operations: list[Operation]) -> tuple[list[Finding], set[str], list[str]]:
    cache = RadixEngineCache(process, {})
    refused = []
    for number, operation in enumerate(operations):
        refusal = cache.apply(number, operation)
        refused += [refusal.reason] if refusal is not None else []
        if cache.shadow.findings:
            break
    return cache.shadow.findings, cache.seen, refused


def test_a_sound_engine_has_no_finding_and_every_situation_comes_about(engine: Maker) -> None:
    process = engine("")
    rng = random.Random(1)
    seen: set[str] = set()
    reasons: set[str] = set()
    for _ in range(3 * TRACES):
        findings, met, refused = run(process, drawn(rng))
        assert findings == []
        seen |= met
        reasons |= set(refused)
    assert seen >= SEEN
    assert reasons >= {"no-room", "unknown-request", "known-request", "suspended", "not-suspended", "nothing-waits"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_by_its_rule(engine: Maker, fault: str) -> None:
    process = engine(fault)
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


def test_all_planted_faults_are_tried() -> None:
    text = ENGINE.read_text(encoding="utf-8")
    planted = text.count("FAULT == ") + text.count("FAULT != ")
    assert planted == len(FAULTS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('"pages": PAGES', '"pages": "many"'),
        ('"free": self.free_pages', '"free": [[99], []]'),
        ('"free": self.free_pages', '"free": [[1]]'),
        ('"tokens": TOKENS,\n            "groups"', '"tokens": 0,\n            "groups"'),
        ('self.requests[n]["rows"], self', "[[999], [1]], self"),
        ('"tree": tree', '"tree": [[[1, 2, 3]], []]'),
    ],
)
def test_an_answer_that_makes_no_sense_is_one_line(engine: Maker, tmp_path: Path, change: str, words: str) -> None:
    process = engine("")
    path = tmp_path / "fake_radix.py"
    text = path.read_text(encoding="utf-8")
    assert change in text
    path.write_text(text.replace(change, words), encoding="utf-8")
    with pytest.raises(SpecError, match=r"engine: Fake 1\.2 answered") as caught:
        run(process, [Operation("admit", 0, 3), Operation("step", 1)])
    assert "\n" not in str(caught.value)


@pytest.fixture
def installed_engine(engine: Maker, monkeypatch: pytest.MonkeyPatch):
    """Let ``sglang-engine`` stand for the engine with one fault."""

    def install(fault: str) -> None:
        engine(fault)
        fake = Installed("SGLang", "sglang", "KVSAN_SGLANG_PYTHON", "fake_radix", ".ci/engine-sglang")
        monkeypatch.setattr(sglang, "SGLANG", fake)
        monkeypatch.setenv("KVSAN_SGLANG_PYTHON", sys.executable)
        installed.warm_process(fake).close()
        worlds_for.cache_clear()

    yield install
    worlds_for.cache_clear()


def test_a_campaign_reduces_a_fault_and_its_case_runs_again(installed_engine, tmp_path: Path) -> None:
    installed_engine("a window is dropped too early")
    folder = tmp_path / "cases"
    result = run_trace_campaign(Options(allocator="sglang-engine", examples=20, seed=1, cases=folder))
    [fault] = result.faults
    assert fault.rule == "window"
    assert fault.size <= 6, fault.trace
    [path] = folder.iterdir()
    case = load_case(path)
    judged = judge_trace(case.input, case.allocator)
    assert [found.message for found in judged.outside] == [fault.message]
    installed_engine("")
    assert judge_trace(case.input, case.allocator).faults == ()


@pytest.mark.parametrize("name", ["sglang-engine", "vllm"])
@pytest.mark.parametrize(("slots", "tokens"), [(10**12, 1), (4097, 1), (4096, 2048)])
def test_more_slots_than_a_trace_takes_are_not_asked_for(
    installed_engine, monkeypatch: pytest.MonkeyPatch, name: str, slots: int, tokens: int
) -> None:
    installed_engine("")
    monkeypatch.setenv("KVSAN_VLLM_PYTHON", sys.executable)  # it is not started
    with pytest.raises(Rejected, match=f"at most 4096 slots .* found {slots} slots of {tokens} tokens") as caught:
        running_cache(CacheSpec(layers=(FULL,), tokens_per_block=tokens, slots=slots), name)
    assert not caught.value.supported


def test_a_campaign_over_nothing_that_is_driven_says_why(installed_engine) -> None:
    installed_engine("")
    with pytest.raises(SpecError, match="sglang-engine-unified are not driven: its buffer has an allocator"):
        worlds_for("sglang-engine-unified")


FULL = AttentionLayer(kv_heads=1, head_dim=8)
WINDOW = AttentionLayer(kv_heads=1, head_dim=8, window=16)
STATE = RecurrentLayer(algorithm="mamba2", heads=1, head_dim=8, state_dim=8, groups=1, conv_kernel=2)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("sglang-engine", (FULL, STATE)),
        ("sglang-engine", (WINDOW,)),
        ("sglang-engine-unified", (FULL, STATE)),
    ],
)
def test_what_is_not_driven_is_refused_with_a_reason(installed_engine, name: str, layers: tuple) -> None:
    installed_engine("")
    with pytest.raises(Rejected, match="traces over sglang-engine") as caught:
        running_cache(CacheSpec(layers=layers, tokens_per_block=1, slots=4, state_slots=2), name)
    assert not caught.value.supported


@pytest.mark.engine
@pytest.mark.parametrize("name", ["sglang-engine", "sglang-engine-envelope", "sglang-engine-speculative"])
def test_the_engines_own_allocators_keep_their_books(sglang_process: EngineProcess, name: str, monkeypatch) -> None:
    monkeypatch.setattr(comparison, "warm_process", lambda engine: sglang_process)
    worlds_for.cache_clear()
    result = run_trace_campaign(Options(allocator=name, examples=50, seed=9))
    worlds_for.cache_clear()
    assert result.faults == []
    assert result.operations > 3_000
    assert result.coverage.classes_never == []


@pytest.mark.engine
def test_traces_over_pages_of_several_tokens_with_and_without_a_window(sglang_process: EngineProcess) -> None:
    full = {"kind": "mha", "dim": 8, "value_dim": 8, "heads": 1, "layers": [0], "dtype": "bfloat16"}
    seen: set[str] = set()
    rng = random.Random(3)
    for number in range(3 * TRACES):
        window = number % 2 * rng.choice((1, 2, 5, 9))
        manager = {"name": "target", "full": full, "window": {**full, "layers": [1]} if window else None}
        opening = {
            "tokens": rng.choice((1, 2, 4, 16)), "pages": rng.randint(4, 24), "window": window, "order": "NHD",
            "caching": number % 5 > 0, "sorted": number % 3 == 0, "managers": [{**manager, "states": None}],
        }  # fmt: skip
        cache = RadixEngineCache(sglang_process, opening)
        for place, operation in enumerate(drawn(rng)):
            cache.apply(place, operation)
        assert cache.shadow.findings == [], opening
        seen |= cache.seen
    assert seen >= SEEN


BROKEN = {
    "conservation": "Paged._release_page_ids = lambda self, *pages: release(self, *(one[1:] for one in pages))",
    "refcount": "Tree.inc_lock_ref = lambda self, node: IncLockRefResult(delta=0)\n"
    "Tree.lock = lambda self, node, **more: None\nTree.unlock = lambda self, lock: None",
    "freshness": "Key.__init__ = lambda self, *given, cache_salt=None, **named: init(self, *given, **named)",
    "unexplained-rejection": "Paged.evict_to_free_tokens = lambda self, tree, tokens: None",
}
"""What is broken in the installed engine, by the rule that tells it."""
BREAKING = """
import sglang_engine

def load():
    engine = sglang_engine.load()
    import sglang_cache
    from sglang.srt.mem_cache.base_prefix_cache import IncLockRefResult
    from sglang.srt.mem_cache.radix_cache import RadixKey as Key
    Paged, Tree = sglang_cache.PagedTokenToKVPoolAllocator, sglang_cache.UnifiedRadixCache
    release, init = Paged._release_page_ids, Key.__init__
"""


@pytest.mark.engine
@pytest.mark.parametrize("rule", BROKEN)
def test_a_fault_in_the_installed_engine_is_told_by_its_rule(
    sglang_process: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    lines = "".join(f"    {line}\n" for line in (*BROKEN[rule].splitlines(), "return engine"))
    (tmp_path / "broken_sglang.py").write_text(BREAKING + lines, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = EngineProcess((python_of(SGLANG), str(SERVING), "broken_sglang"))
    rng = random.Random(4)
    manager = {"name": "target", "window": None, "states": None}
    opening = {"tokens": 2, "pages": 9, "window": 0, "order": "NHD", "caching": True, "sorted": False}
    try:
        for _ in range(TRACES):
            cache = RadixEngineCache(process, {**opening, "managers": [{**manager, "full": {"layers": [0]}}]})
            for place, operation in enumerate(drawn(rng)):
                cache.apply(place, operation)
                if cache.shadow.findings:
                    assert cache.shadow.findings[0].rule == rule, cache.shadow.findings
                    return
    finally:
        process.close()
    pytest.fail(f"nothing was found in {TRACES} traces")
