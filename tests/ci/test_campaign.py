"""Campaigns: the same result whoever runs them, every fault saved and small, and nothing that an allocator does in the
way.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvsan.ci import campaign, determinism, reduction
from kvsan.ci.campaign import ChunkResult, Options, Progress, Result, run_campaign, run_chunk
from kvsan.ci.cases import Case, FoundRule, encode_case, load_case, save_case
from kvsan.ci.faults import CANARY, fault_named
from kvsan.ci.reduction import Hit
from kvsan.ci.simplicity import simplicity_key, size
from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.spec import AttentionLayer, CacheSpec
from kvsan.sim.allocators.trtllm.limits import LIMITS
from kvsan.sim.verdict import judge
from kvsan.strategies.rare import CLASSES, FITTING

FAULTY = "fault:scale-is-pairs"

ALLOCATORS = '''
"""Allocators of somebody's own that do what they should not."""
import sys

import kvsan
from kvsan.sim.allocators.faulty.storage import allocate_canary
from kvsan.sim.allocators.trtllm.allocators import allocate_dense

calls = 0
faulty = False


def _calls():
    global calls
    calls += 1
    return calls


def raising(spec):
    raise KeyError("window")


def leaving(spec):
    sys.exit(3)


def garbage(spec):
    return 3 if _calls() == 5 else allocate_dense(spec)


def nothing(spec):
    return None


def broken(spec):
    import msgspec
    return msgspec.structs.replace(allocate_dense(spec), pools=3)


def interrupted(spec):
    if _calls() == 60:
        raise KeyboardInterrupt
    return allocate_canary(spec)


def brittle(spec):
    global faulty
    if spec.tokens_per_block == 1:
        return 3 if faulty else allocate_dense(spec)
    layout = allocate_canary(spec)
    faulty = faulty or any(buffer.role == "value" for buffer in layout.buffers)
    return layout


def forgetful(spec):
    global faulty
    if faulty:
        return allocate_dense(spec)
    layout = allocate_canary(spec)
    faulty = True
    return layout


def refusing(spec):
    raise kvsan.Rejected("of no use", "none", supported=False)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Put the module of allocators into a folder of its own, and go there; return its name."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "odd_allocators.py").write_text(ALLOCATORS, encoding="utf-8")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(tmp_path / "project")
    yield "odd_allocators"
    sys.modules.pop("odd_allocators", None)


def comparable(result: Result) -> dict[str, Any]:
    """Return all of a result but the time it took and the folder of its cases."""
    found: dict[str, Any] = msgspec.to_builtins(result)
    for fault in found["faults"]:
        fault["case"] = fault["case"] and Path(fault["case"]).name
    return {key: value for key, value in found.items() if key != "seconds"}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# The same seed, the same result.


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """Return a campaign of two full (but smaller) chunks and a piece of another, and the folder of its cases."""
    folder = tmp_path_factory.mktemp("once")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(determinism, "CHUNK_EXAMPLES", 90)
        return run_campaign(Options(allocator=FAULTY, seed=3, examples=200, cases=folder)), folder


def test_examples_are_counted_to_the_last(once: tuple[Result, Path]) -> None:
    result, _ = once
    assert result.examples == 200
    assert all(sum(counts.values()) == 200 for counts in result.coverage.values.values())
    assert not result.interrupted


def test_workers_change_nothing(once: tuple[Result, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, folder = once
    monkeypatch.setattr(determinism, "CHUNK_EXAMPLES", 90)
    others = run_campaign(Options(allocator=FAULTY, seed=3, examples=200, cases=tmp_path, workers=2))
    assert comparable(others) == comparable(result)
    assert contents(tmp_path) == contents(folder)


def test_an_installed_copy_changes_nothing(root: Path, tmp_path: Path) -> None:
    """What is local to Hypothesis differs between a checkout and site-packages; what a campaign draws must not."""
    folder = tmp_path / "here"
    result = run_campaign(Options(allocator=FAULTY, seed=5, examples=150, cases=folder))
    site = tmp_path / "lib" / "site-packages"
    package = site / "kvsan"
    for name in ("ci", "cli", "model", "sim", "strategies"):
        shutil.copytree(root / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(root / name, package / name)
    (tmp_path / "elsewhere").mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    options = ["--allocator", FAULTY, "--seed", "5", "--max-examples", "150", "--cases", "cases", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "kvsan", "fuzz", *options],
        cwd=tmp_path / "elsewhere",
        env=kept | {"PYTHONPATH": str(site), "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    document = json.loads(done.stdout)
    assert document["coverage"] == msgspec.to_builtins(result.coverage)
    wanted = [
        (fault.rule, fault.message, Path(fault.case or "").name, fault.examples_to_find, fault.size)
        for fault in result.faults
    ]
    assert [
        (fault["rule"], fault["message"], Path(fault["case"]).name, fault["examples_to_find"], fault["size"])
        for fault in document["faults"]
    ] == wanted
    assert contents(tmp_path / "elsewhere" / "cases") == contents(folder)
    assert os.listdir(tmp_path / "elsewhere") == ["cases"], "no .hypothesis in a user's folder"


def test_a_chunk_is_the_same_alone_and_other_seeds_are_others(once: tuple[Result, Path]) -> None:
    options = Options(allocator="trtllm-v1", seed=3)
    first = run_chunk(options, 1, 60)
    run_chunk(options, 0, 20)
    again = run_chunk(options, 1, 60)
    assert (again.rows, again.classes, again.refused) == (first.rows, first.classes, first.refused)
    others = [run_chunk(options, 2, 60), run_chunk(msgspec.structs.replace(options, seed=4), 1, 60)]
    assert len({frozenset(result.rows.items()) for result in [first, *others]}) == 3


# What is found.


def test_every_fault_has_its_case_and_nothing_else_is_left(once: tuple[Result, Path]) -> None:
    result, folder = once
    assert {fault.rule for fault in result.faults} >= set(fault_named(FAULTY).rules)
    by_name: dict[str, set[str]] = {}
    for fault in result.faults:
        path = Path(fault.case or "")
        case = load_case(path)
        assert (case.allocator, case.input) == (FAULTY, fault.spec)
        assert path == folder / case.file_name
        assert FoundRule(rule=fault.rule, message=fault.message) in case.found
        assert fault.rule in {finding.rule for finding in judge(case.input, FAULTY).faults}
        assert fault.size == size(fault.spec)
        assert 1 <= fault.examples_to_find <= 200
        by_name.setdefault(path.name, set()).add(fault.rule)
    assert {name: {entry.rule for entry in load_case(folder / name).found} for name in contents(folder)} == by_name
    assert len({fault.rule for fault in result.faults}) == len(result.faults)
    order = [(fault.examples_to_find, fault.rule) for fault in result.faults]
    assert order == sorted(order)


def test_the_fault_is_at_its_minimum(once: tuple[Result, Path]) -> None:
    specs = {fault.rule: fault.spec for fault in once[0].faults}
    assert specs[fault_named(FAULTY).rules[0]] == fault_named(FAULTY).minimum


def test_the_first_example_of_a_rule_is_the_one_named(once: tuple[Result, Path]) -> None:
    """With the rule as the one to stop at, the campaign ends with just that example."""
    result, _ = once
    fault = result.faults[0]
    assert fault.examples_to_find <= 90, "in the first chunk, which no worker splits"
    stopped = run_campaign(Options(allocator=FAULTY, seed=3, examples=90, stop_rule=fault.rule, reduce=False))
    assert stopped.examples == fault.examples_to_find
    assert stopped.faults[0].examples_to_find == fault.examples_to_find
    assert simplicity_key(stopped.faults[0].spec) >= simplicity_key(fault.spec)


def test_chunks_add_up_to_the_first_example_and_the_smallest_spec() -> None:
    """Examples are counted through all chunks; of equally small specs the first stays."""

    def chunk(number: int, **hits: tuple[int, int, str | None]) -> ChunkResult:
        found = {
            rule: Hit(rule, example, f"{number}", f"{number}".encode(), size, 0.0, saved)
            for rule, (example, size, saved) in hits.items()
        }
        return ChunkResult(number, 100, 0, 0, found, Counter(), Counter())

    results = [
        chunk(0, alias=(50, 9, "a.json")),
        chunk(1, bounds=(3, 4, "b.json"), alias=(1, 7, None)),
        chunk(2, alias=(2, 7, "c.json"), stride=(3, 1, None)),
    ]
    merged = campaign.merge_hits(results)
    assert [(entry.rule, entry.example) for entry in merged] == [("alias", 50), ("bounds", 103), ("stride", 203)]
    assert [entry.smallest.spec for entry in merged] == [b"1", b"1", b"2"]
    assert [entry.saved for entry in merged] == [["a.json", "c.json"], ["b.json"], []]


def test_the_canary_is_caught_in_the_first_chunk() -> None:
    """A campaign that does not find it is broken itself."""
    for seed in range(3):
        result = run_campaign(Options(allocator=CANARY, seed=seed, examples=500, stop_rule="alias"))
        (fault,) = [fault for fault in result.faults if fault.rule == "alias"]
        assert fault.spec == fault_named(CANARY).minimum


def test_a_faulty_allocator_is_given_specs_that_it_supports() -> None:
    assert run_chunk(Options(allocator=CANARY), 0, 100).refused <= 20


def test_legacy_refuses_the_reference_case_at_its_minimum() -> None:
    """The published collision: an index plane as large as one K page joins the K/V pool."""
    result = run_campaign(Options(allocator="trtllm-v2-qsa-legacy", examples=500, stop_rule="rejected"))
    (fault,) = [fault for fault in result.faults if fault.rule == "rejected"]
    (sparse, plain) = fault.spec.layers
    assert isinstance(sparse, AttentionLayer)
    (plane,) = sparse.side_planes
    assert plain == msgspec.structs.replace(sparse, side_planes=())
    assert plane.token_bytes == sparse.kv_heads * sparse.head_dim * ElementFormat.BF16.bits >> 3
    assert fault.spec == fault_named("fault:bare-assert").minimum
    assert "is as large as a K page" in fault.message
    assert result.refused >= 1


def test_known_limits_are_counted_and_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(allocator="trtllm-v2", seed=1, examples=200, reduce=False)
    inside = run_campaign(options)
    monkeypatch.setattr(campaign, "limits_of", lambda _: ())
    outside = run_campaign(options)
    assert inside.faults == []
    assert inside.known > 0
    assert outside.known == 0
    assert {fault.rule for fault in outside.faults} <= {rule for limit in LIMITS for rule in limit.rules}
    assert outside.faults


def test_refusals_are_faults_only_where_the_allocator_has_no_right_to_them(own: str) -> None:
    result = run_campaign(Options(allocator=f"{own}:refusing", examples=30))
    assert (result.refused, result.faults) == (30, [])
    result = run_campaign(Options(allocator=f"{own}:raising", examples=30))
    assert result.refused == 30
    assert [fault.rule for fault in result.faults] == ["unexplained-rejection"]
    assert "KeyError" in result.faults[0].message
    assert result.faults[0].size <= 3
    assert run_campaign(Options(allocator=f"{own}:leaving", examples=5)).faults[0].rule == "unexplained-rejection"


def test_progress_is_told_after_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Progress] = []
    monkeypatch.setattr(determinism, "CHUNK_EXAMPLES", 50)
    run_campaign(Options(allocator=CANARY, examples=60, reduce=False), seen.append)
    assert [state.examples for state in seen] == [0, 50, 60]
    assert seen[-1].classes == len(CLASSES)
    assert 0 < seen[1].classes_covered <= seen[2].classes_covered <= len(CLASSES)
    assert "alias" in seen[1].rules
    assert seen[-1].per_second > 0


def test_the_classes_to_be_drawn_are_those_that_fit() -> None:
    """V1 knows no index planes beside K/V: a class that it cannot have is no gap in coverage."""
    result = run_campaign(Options(allocator="trtllm-v1", examples=5))
    never = set(result.coverage.classes_never)
    assert never
    assert all("dense-v1" in FITTING[name] for name in never)
    assert set(result.coverage.classes) == set(CLASSES)


def test_time_stops_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "CHUNK_EXAMPLES", 40)
    clock = itertools.count()
    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    result = run_campaign(Options(allocator="trtllm-v1", seconds=20))
    assert result.examples % 40 == 0
    assert 40 <= result.examples <= 400
    assert run_campaign(Options(allocator="trtllm-v1", seconds=10_000, examples=30)).examples == 30


# The folder of cases.


def test_what_was_there_stays_as_it_was(tmp_path: Path) -> None:
    spec = CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=128),))
    hand_written = tmp_path / "my-case.json"
    hand_written.write_bytes(json.dumps(json.loads(encode_case(Case(allocator=CANARY, input=spec))), indent=1).encode())
    other = save_case(Case(allocator="trtllm-v2", input=spec), tmp_path)
    (tmp_path / "newer.json").write_text('{"kvsan": "case", "version": 99}')
    (tmp_path / "package.json").write_text('{"name": "x"}')
    minimum = Case(allocator=CANARY, input=fault_named(CANARY).minimum)
    kept = tmp_path / minimum.file_name
    found = tuple(FoundRule(rule=rule, message="my own words") for rule in ("adjacency", "alias", "op-address"))
    kept.write_bytes(json.dumps(json.loads(encode_case(msgspec.structs.replace(minimum, found=found)))).encode())
    before = contents(tmp_path)
    result = run_campaign(Options(allocator=CANARY, examples=60, cases=tmp_path))
    assert {fault.case for fault in result.faults} == {str(kept)}
    assert contents(tmp_path) == before
    assert result.coverage.cases_run == sorted([hand_written.name, kept.name])
    assert result.coverage.cases_failing == sorted([hand_written.name, kept.name])
    assert result.coverage.cases_not_run == [other.name]
    assert result.coverage.cases_unreadable == ["newer.json", "package.json"]


@pytest.mark.parametrize("workers", [1, 2])
def test_saved_cases_are_judged_again(tmp_path: Path, workers: int) -> None:
    minimum = fault_named(CANARY).minimum
    collision = fault_named("fault:coalesce-by-size").minimum
    fails = save_case(Case(allocator="trtllm-v2-qsa-legacy", input=collision), tmp_path)
    mended = Case(
        allocator="trtllm-v2-qsa-legacy", input=minimum, found=(FoundRule(rule="alias", message="as it was"),)
    )
    passes = save_case(mended, tmp_path)
    coverage = run_campaign(
        Options(allocator="trtllm-v2-qsa-legacy", examples=3, cases=tmp_path, workers=workers)
    ).coverage
    assert coverage.cases_run == sorted([fails.name, passes.name])
    assert coverage.cases_failing == [fails.name]


def test_a_folder_that_cannot_hold_cases_is_refused_before_the_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(SpecError, match="is not a folder"):
            run_campaign(Options(allocator=CANARY, examples=10**9, cases=folder))


def test_a_disk_that_fills_up_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> Path:
        raise SpecError("cases", "cannot save a case: No space left on device")

    monkeypatch.setattr(campaign, "save_case", full_disk)
    with pytest.raises(SpecError, match="cases: cannot save a case: No space left on device"):
        run_campaign(Options(allocator=CANARY, examples=20, cases=tmp_path))


# Allocators that misbehave.


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("name", "words"), [("nothing", "returned None, needs a kvsan.Layout"), ("broken", "cannot be checked")]
)
def test_an_answer_that_is_no_layout_is_one_line_with_its_spec(own: str, name: str, words: str, workers: int) -> None:
    cases = Path("cases")
    with pytest.raises(SpecError) as caught:
        run_campaign(Options(allocator=f"{own}:{name}", examples=20, cases=cases, workers=workers))
    assert caught.value.field == "allocator"
    text = str(caught.value)
    assert words in text
    assert f"'{own}:{name}'" in text
    assert "in chunk 0" in text
    (path,) = cases.iterdir()
    assert str(path) in text
    assert load_case(path).found == ()


def test_the_spec_of_a_rare_bad_answer_is_found_again(own: str) -> None:
    with pytest.raises(SpecError, match="returned 3") as caught:
        run_campaign(Options(allocator=f"{own}:garbage", examples=20))
    assert "in chunk 0" in str(caught.value)
    assert os.listdir() == ["odd_allocators.py"], "nothing is saved where no folder is given"


def test_a_bad_answer_in_the_reduction_is_not_the_fault_looked_for(own: str) -> None:
    result = run_campaign(Options(allocator=f"{own}:brittle", seed=1, examples=200, stop_rule="alias"))
    fault = next(fault for fault in result.faults if fault.rule == "alias")
    assert fault.spec.tokens_per_block > 1
    assert fault.size == 3


def test_an_allocator_that_changes_its_mind_keeps_its_case(own: str) -> None:
    result = run_campaign(Options(allocator=f"{own}:forgetful", examples=20, cases=Path("cases"), stop_rule="alias"))
    fault = next(fault for fault in result.faults if fault.rule == "alias")
    assert load_case(Path(fault.case or "")).input == fault.spec


# Interruptions.


def test_ctrl_c_keeps_what_was_found(own: str) -> None:
    result = run_campaign(Options(allocator=f"{own}:interrupted", seed=2, examples=500, cases=Path("cases")))
    assert result.interrupted
    assert result.examples == 59
    assert "alias" in {fault.rule for fault in result.faults}
    names = {Path(fault.case or "").name for fault in result.faults}
    assert names == set(os.listdir("cases"))


def test_ctrl_c_in_the_reduction_keeps_the_smallest_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=64),), tokens_per_block=2, slots=3)

    def reduce_in_part(spec: CacheSpec, fails: Callable[[CacheSpec], bool]) -> None:
        assert fails(spec)
        assert fails(smaller)
        raise KeyboardInterrupt

    monkeypatch.setattr(reduction, "reduce_spec", reduce_in_part)
    result = run_campaign(Options(allocator=CANARY, examples=60, cases=tmp_path))
    assert result.interrupted
    assert result.faults[0].spec == smaller
    assert load_case(Path(result.faults[0].case or "")).input == smaller
    assert {Path(fault.case or "").name for fault in result.faults} == set(contents(tmp_path))
    assert len(result.faults) == 3, "the other rules are saved as they were found"
