from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvsan.ci.cases import Case, FoundRule, load_case, save_case
from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, HybridLayer, RecurrentLayer, SidePlane
from kvsan.model.spec import CacheSpec
from kvsan.sim.checking import check
from kvsan.sim.finding import Where
from kvsan.sim.layout import Layout
from kvsan.sim.registry import ALLOCATORS, allocate, default_allocator, resolve
from kvsan.sim.rejection import MAX_TEXT_CHARACTERS, Rejected
from kvsan.sim.verdict import judge

DENSE = AttentionLayer(kv_heads=8, head_dim=128)
SPEC = CacheSpec(layers=(DENSE, DENSE))
HYBRID = CacheSpec(layers=(DENSE, RecurrentLayer(algorithm="mamba1", heads=2, state_dim=4)))
POSITION = SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank")
ENGINES = [entry.name for entry in ALLOCATORS if entry.kind == "engine"]


def test_the_engines_by_name() -> None:
    assert ENGINES == [
        "trtllm-v1",
        "trtllm-v2",
        "trtllm-v2-qsa-legacy",
        "trtllm-v2-qsa-packed",
        "trtllm-v2-qsa-packed-rank-local",
        "vllm-e1",
        "vllm-e2",
        "vllm-e2-packed",
        "vllm-e3",
        "vllm-e3-block-outermost",
        "sglang",
        "sglang-envelope",
        "sglang-speculative",
        "sglang-unified",
    ]
    assert len({entry.name for entry in ALLOCATORS}) == len(ALLOCATORS)
    for entry in ALLOCATORS:
        if entry.kind != "installed":  # tests/ci/engines asks for those
            assert callable(resolve(entry.name))
        assert entry.summary
        assert entry.kind in ("engine", "installed", "fault")


@pytest.mark.parametrize("name", ENGINES)
def test_the_layout_says_where_it_comes_from(name: str) -> None:
    spec = HYBRID if name == "sglang-unified" else SPEC  # one buffer for pages and states needs both
    layout = allocate(spec, name)
    assert layout.allocator == name
    assert layout.spec is spec


@pytest.mark.parametrize("name", ["trtllm", "TRTLLM-V1", " trtllm-v1", "v2", "fault", "no\nsuch", "x" * 1000])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve(name)
    message = str(caught.value)
    assert message.startswith("allocator: unknown allocator ")
    assert all(engine in message for engine in ENGINES)
    assert "module:function" in message
    assert "\n" not in message
    assert len(message) < 400


def test_an_unknown_fault_is_not_imported() -> None:
    with pytest.raises(SpecError, match="unknown allocator 'fault:no-such'"):
        resolve("fault:no-such")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return the name of an importable module with allocators of every manner."""
    name = f"allocators_{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}"
    (tmp_path / f"{name}.py").write_text(
        "from kvsan.sim.registry import allocate\n"
        "from kvsan import Rejected\n"
        "number = 7\n"
        "def good(spec): return allocate(spec, 'trtllm-v2')\n"
        "def asserts(spec): assert spec.slots == 0\n"
        "def refuses(spec): raise Rejected('too many', 'use fewer')\n"
        "def nothing(spec): pass\n"
        "def text(spec): return 'layout ' * 1000\n"
        "def no_arguments(): pass\n"
        "class Callable:\n"
        "    def __call__(self, spec): return good(spec)\n"
        "instance = Callable()\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_anybodys_function(module: str) -> None:
    assert allocate(SPEC, f"{module}:good") == allocate(SPEC, "trtllm-v2")
    assert allocate(SPEC, f"{module}:instance") == allocate(SPEC, "trtllm-v2")
    assert allocate(SPEC, resolve(f"{module}:good")) == allocate(SPEC, "trtllm-v2")


def test_an_assertion_explains_nothing(module: str) -> None:
    with pytest.raises(Rejected) as caught:
        allocate(SPEC, f"{module}:asserts")
    assert caught.value.rule == "unexplained-rejection"
    assert "AssertionError" in caught.value.message


def test_a_function_of_another_signature(module: str) -> None:
    with pytest.raises(SpecError, match="cannot be called with one argument"):
        allocate(SPEC, f"{module}:no_arguments")


def test_an_explained_refusal(module: str) -> None:
    with pytest.raises(Rejected) as caught:
        allocate(SPEC, f"{module}:refuses")
    assert (caught.value.message, caught.value.remedy, caught.value.rule) == ("too many", "use fewer", "rejected")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nothing", "returned None, needs a kvsan.Layout"),
        ("text", "returned 'layout layout"),
        ("missing", "has no function 'missing'"),
        ("number", "has no function 'number'"),
        ("", "has no function ''"),
    ],
)
def test_what_is_no_allocator(module: str, function: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        allocate(SPEC, f"{module}:{function}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("raise ValueError('first line\\nsecond line\\n' * 100)", "ValueError: first line second line"),
    ],
)
def test_a_module_that_fails_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    name = f"failing_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError) as caught:
        resolve(f"{name}:allocate")
    assert f"allocator: cannot import {name!r}: " in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no_such_module_at_all:f", ":f", "..x:f", "a b:f", ":", "json:"])
def test_a_module_that_is_not_there(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve(name)
    assert str(caught.value).startswith("allocator: ")
    assert "\n" not in str(caught.value)


def test_names_resolve_lazily() -> None:
    """Looking at the table imports no allocator."""
    script = (
        "import sys, kvsan.sim.registry; print(sorted(m for m in sys.modules if 'trtllm' in m or 'hypothesis' in m))"
    )
    assert run(script) == "[]\n"


def test_the_default() -> None:
    sparse = AttentionLayer(kv_heads=2, head_dim=256, side_planes=(POSITION,))
    gdn = RecurrentLayer(algorithm="gdn", heads=8, groups=4, state_dim=16)
    assert default_allocator(SPEC) == "trtllm-v2"
    assert default_allocator(CacheSpec(layers=(DENSE, sparse))) == "trtllm-v2-qsa-packed"
    assert default_allocator(CacheSpec(layers=(DENSE,), sparse_algorithm="qsa")) == "trtllm-v2-qsa-packed"
    assert default_allocator(CacheSpec(layers=(DENSE,), sparse_algorithm="dsa")) == "trtllm-v2"
    assert allocate(SPEC).allocator == "trtllm-v2"
    halves = CacheSpec(layers=(HybridLayer(attention=sparse, recurrent=gdn),))
    assert default_allocator(halves) == "trtllm-v2-qsa-packed"


BATCH = """
import hashlib, msgspec
from kvsan.model.formats import ElementFormat as F
from kvsan.model.layers import AttentionLayer, RecurrentLayer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec
from kvsan.sim.checking import check
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected

index = SidePlane(role="index_key", dim=128, format=F.BF16)
position = SidePlane(role="qsa_index_position", dim=3, format=F.INT32, scope="rank")
sparse = AttentionLayer(kv_heads=2, head_dim=256, side_planes=(index, position))
gdn = RecurrentLayer(algorithm="gdn", heads=32, head_dim=128, groups=16, state_dim=128)
layers = tuple(sparse if at % 4 == 3 else gdn for at in range(48))
answers = {}
for allocator in ("trtllm-v2-qsa-legacy", "trtllm-v2-qsa-packed", "trtllm-v1"):
    for layout in ("tp1", "tp2", "tep4", "adp2", "adp4"):
        for kv_format in (F.BF16, F.FP8, F.NVFP4):
            spec = CacheSpec(layers=layers, kv_format=kv_format, parallel=ParallelLayout.parse(layout))
            try:
                found = allocate(spec, allocator)
                answer = found, check(found)
            except Rejected as error:
                answer = error.rule, error.supported, error.message, error.remedy, error.where
            text = msgspec.json.encode(answer)
            answers[f"{allocator} {layout} {kv_format.value}"] = hashlib.sha256(text).hexdigest()
print(msgspec.json.encode([__debug__, answers]).decode())
"""


def run(script: str, *options: str) -> str:
    """Return what a fresh interpreter with ``options`` prints for ``script``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, *options, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def test_without_assertions_the_answer_is_the_same() -> None:
    debug, answers = json.loads(run(BATCH))
    stripped, same = json.loads(run(BATCH, "-O"))
    assert (debug, stripped) == (True, False)
    assert len(answers) == 45
    assert same == answers


@pytest.mark.parametrize("name", ENGINES)
def test_the_same_spec_gives_the_same_layout(name: str) -> None:
    gdn = RecurrentLayer(algorithm="gdn", heads=8, head_dim=16, groups=4, state_dim=16)
    size = {"slots": 4} if name.startswith("sglang") else {"slots": None, "quota_bytes": 1 << 30}
    one, other = (CacheSpec(layers=(DENSE, gdn) * 20, **size) for _ in range(2))
    first, second = allocate(one, name), allocate(other, name)
    assert first == second
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
    assert msgspec.json.decode(msgspec.json.encode(first), type=Layout) == first


def test_a_layout_is_judged_against_the_spec_that_was_asked_for() -> None:
    """A forgotten spec must not switch rules off, and half of a model's layers must not pass as the whole."""
    whole = CacheSpec(layers=(AttentionLayer(kv_heads=2, head_dim=64),) * 4)
    half = msgspec.structs.replace(whole, layers=whole.layers[:2])
    other = allocate(half, "trtllm-v2")
    with pytest.raises(SpecError, match="a layout of another spec"):
        allocate(whole, lambda spec: other)
    bare = allocate(whole, lambda spec: msgspec.structs.replace(other, spec=None, stages=()))
    assert bare.spec == whole
    assert {finding.rule for finding in check(bare)} >= {"layer-map"}


class Panic(BaseException):
    """What native code and test tools raise: no Exception."""


class Unspeakable(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("error", [Panic("boom"), GeneratorExit(), SystemExit(3), Unspeakable()])
def test_whatever_an_allocator_raises_is_a_refusal(error: BaseException) -> None:
    def allocator(spec: CacheSpec) -> Layout:
        raise error

    with pytest.raises(Rejected) as caught:
        allocate(CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=8),)), allocator)
    assert (caught.value.rule, type(error).__name__ in caught.value.message) == ("unexplained-rejection", True)


def test_a_refusal_is_always_text_and_of_a_rule_that_exists() -> None:
    refusal = Rejected(None, 3, rule="nope")  # type: ignore[arg-type]
    assert (refusal.message, refusal.remedy) == ("the allocator gave no reason", "let the allocator say what to do")
    assert refusal.rule == "rejected"


@pytest.mark.parametrize("text", ["a lone \ud800", "x" * 10**6, "\x00\x1b[31m", "\u202e", "two\nlines", "\ud83d\ude00"])
@pytest.mark.parametrize("explained", [True, False])
def test_whatever_text_a_refusal_has_can_be_saved(tmp_path: Path, text: str, explained: bool) -> None:
    def allocator(spec: CacheSpec) -> Layout:
        raise Rejected(text, text) if explained else ValueError(text)

    spec = CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=8),))
    refusal = judge(spec, allocator).rejection
    assert refusal is not None
    assert 0 < len(refusal.message) <= MAX_TEXT_CHARACTERS + 100
    found = FoundRule(rule=refusal.rule, message=refusal.message)
    path = save_case(Case(allocator="own:allocate", input=spec, found=(found,)), tmp_path)
    assert load_case(path).found == (found,)
    msgspec.json.encode([refusal.message, refusal.remedy])


def test_places_of_a_refusal_are_places_or_left_out() -> None:
    place = Where(layer=3, role="key")
    assert Rejected("no", "go", where=(place,)).where == (place,)
    lost = Where(layer=3, role="\ud800"), Where(layer="x")  # type: ignore[arg-type]
    for where in (3, None, ["key"], object(), (place, 3), lost[:1], lost[1:]):
        assert Rejected("no", "go", where=where).where == ()  # type: ignore[arg-type]
