"""The pytest plugin, in pytest processes of their own: what is collected, what fails and how, and that it stays out of
the way where its options are not given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvsan.ci import plugin_items
from kvsan.ci.cases import MAX_CASE_BYTES, Case, FoundRule, encode_case
from kvsan.ci.determinism import CHUNK_EXAMPLES
from kvsan.ci.profiles import PROFILES, Profile
from kvsan.model.spec import AttentionLayer, CacheSpec, decode_spec
from kvsan.sim.allocators.trtllm.limits import LIMITS

PYPROJECT = "pyproject.toml"
ENTRY_POINTS = "[pytest11]\n{}\n"


class Outcome(msgspec.Struct):
    """What became of one run of pytest: its exit status, its output, and (outcome, text) of each item by its id."""

    status: int
    output: str
    items: dict[str, tuple[str, str]]


@pytest.fixture(scope="module")
def library(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PYTHONPATH from which ``kvsan`` is importable, whatever the checkout's folder is called."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "kvsan").symlink_to(root)
    return folder


@pytest.fixture(scope="module")
def installed(root: Path, library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PYTHONPATH in which kvsan is installed with the entry points of pyproject.toml."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "kvsan").symlink_to(root)
    names = tomllib.loads((root / PYPROJECT).read_text(encoding="utf-8"))["project"]["entry-points"]["pytest11"]
    metadata = folder / "kvsan-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvsan\nVersion: 0\n")
    lines = "\n".join(f"{name} = {target}" for name, target in names.items())
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS.format(lines))
    return folder


def run_pytest(folder: Path, path: list[Path], *arguments: str) -> Outcome:
    """Run pytest in ``folder`` with ``path`` as PYTHONPATH."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "PYTHON", "COV_"))}
    env = kept | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml", str(report), *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    items = {}
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        found = [child for child in case if child.tag in ("failure", "error", "skipped")]
        items[f"{case.get('classname')}::{case.get('name')}"] = (
            (found[0].tag, found[0].text or "") if found else ("passed", "")
        )
    return Outcome(done.returncode, done.stdout + done.stderr, items)


# Saved cases: one run, many items.

OWN = """
from kvsan.sim.allocators.trtllm.allocators import allocate_dense

def sound(spec):
    return allocate_dense(spec)

def refusing(spec):
    raise KeyError("window")
"""

TRAP = "raise SystemExit('the folder of a stranger must not be run')\n"

PLAIN = CacheSpec(layers=(AttentionLayer(kv_heads=2, head_dim=64),))


def case_of(allocator: str, *rules: str) -> Case:
    found = tuple(FoundRule(rule=rule, message="as it was") for rule in rules)
    return Case(allocator=allocator, input=PLAIN, found=found)


CASES = {
    "fails.json": case_of("own:refusing", "unexplained-rejection"),
    "passes.json": case_of("own:sound", "alias"),
    "other-rule.json": case_of("own:refusing", "alias"),
    "no-rule.json": case_of("own:refusing"),
    "not-given.json": case_of("other:allocate", "alias"),
    "escapes.json": case_of("other:\n\x1b[31mred\ud7ff::" + "x" * 5000),
    "library.json": case_of("os:system", "alias"),
    "unknown.json": case_of("no-such-allocator", "alias"),
}

HOSTILE = {
    "newer.json": (
        b'{"kvsan": "case", "version": 99}',
        "version: found 99, and this kvsan reads up to 1: use a newer one",
    ),
    "spec.json": (b'{"kvsan": "spec"}', "not a saved case"),
    "text.json": (b"not JSON", "JSON is malformed"),
    "nested.json": (b"[" * 200_000, "nested too deeply"),
    "truncated.json": (encode_case(case_of("trtllm-v2"))[:100], "truncated"),
    "binary.json": (bytes(range(256)), "JSON"),
    "empty.json": (b"", "truncated"),
    "number.json": (
        encode_case(case_of("trtllm-v2")).replace(b'"kv_heads":2', b'"kv_heads":' + b"9" * 5000),
        "out of range",
    ),
}


@pytest.fixture(scope="module")
def judged(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return a run over a folder of good, bad and hostile cases, the plugin loaded by its entry point."""
    folder = tmp_path_factory.mktemp("project")
    cases = folder / "cases"
    cases.mkdir()
    for name, case in CASES.items():
        (cases / name).write_bytes(encode_case(case))
    for name, (text, _) in HOSTILE.items():
        (cases / name).write_bytes(text)
    with (cases / "huge.json").open("wb") as file:
        file.truncate(MAX_CASE_BYTES + 1)
    (cases / "folder.json").mkdir()
    (cases / "conftest.py").write_text(TRAP)
    (cases / "__init__.py").write_text(TRAP)
    (cases / "test_trap.py").write_text(TRAP)
    (folder / "own.py").write_text(OWN)
    (folder / "test_own.py").write_text("def test_of_the_project():\n    pass\n")
    given = ["--kvsan-allocator", "own:refusing", "--kvsan-allocator", "own:sound"]
    return run_pytest(folder, [installed], "-W", "error", "test_own.py", "--kvsan-cases", "cases", *given)


def item_of(outcome: Outcome, file: str) -> tuple[str, str, str]:
    """Return (id, outcome, text) of the one item of a case file."""
    ((name, (result, text)),) = [
        (name, found) for name, found in outcome.items.items() if name.startswith(f"cases.{file}::")
    ]
    return name, result, text


def test_each_case_is_an_item_beside_the_tests_of_the_project(judged: Outcome) -> None:
    assert judged.status == 1, judged.output
    assert judged.items["test_own::test_of_the_project"] == ("passed", "")
    assert len(judged.items) == 1 + len(CASES) + len(HOSTILE) + 2
    assert item_of(judged, "passes.json")[0] == "cases.passes.json::own:sound"
    assert "FAILED cases/fails.json::own:refusing - Failed: unexplained-rejection: the" in judged.output


def test_a_case_that_still_breaks_its_rule_fails_with_message_and_remedy(judged: Outcome) -> None:
    _, result, text = item_of(judged, "fails.json")
    lines = text.splitlines()
    assert result == "failure"
    assert lines[0] == "unexplained-rejection: the allocator refused with KeyError: 'window'"
    assert "  remedy: let the allocator raise kvsan.Rejected with the cause and the way out" in lines
    assert "spec: KV bf16, 32 tokens per block, tp1, 4 slots; layer 0: attention, 2 KV heads x 64" in lines
    assert lines[-1] == "run again: kvsan check cases/fails.json --allocator own:refusing"
    assert "Traceback" not in judged.output


def test_a_case_that_breaks_nothing_any_more_passes(judged: Outcome) -> None:
    assert item_of(judged, "passes.json")[1] == "passed"


def test_code_that_only_the_case_names_is_not_loaded(judged: Outcome) -> None:
    for file, name in (("not-given.json", "other:allocate"), ("library.json", "os:system")):
        _, result, text = item_of(judged, file)
        assert result == "error"
        assert text.strip().endswith(f"give --kvsan-allocator {name} as well if you trust it")
        assert "code is never loaded because a file says so" in text


def test_an_unknown_allocator_is_an_error_that_lists_the_known(judged: Outcome) -> None:
    _, result, text = item_of(judged, "unknown.json")
    assert (result, len(text.splitlines())) == ("error", 1)
    assert "unknown allocator 'no-such-allocator', needs one of trtllm-v1" in text


def test_a_name_from_a_file_cannot_write_to_the_terminal(judged: Outcome) -> None:
    name, result, text = item_of(judged, "escapes.json")
    assert result == "error"
    assert "other:\\n\\x1b[31mred" in name
    assert len(name) < 200
    assert len(text) < 1000
    assert "\x1b" not in judged.output


@pytest.mark.parametrize("file", [*HOSTILE, "huge.json", "folder.json"])
def test_a_file_that_is_no_case_is_an_error_of_one_line(judged: Outcome, file: str) -> None:
    expected = {"huge.json": f"needs at most {MAX_CASE_BYTES} B", "folder.json": "not a file"}
    name, result, text = item_of(judged, file)
    assert name == f"cases.{file}::unreadable"
    assert (result, len(text.strip().splitlines())) == ("error", 1)
    assert file in text
    assert (HOSTILE[file][1] if file in HOSTILE else expected[file]) in text


@pytest.mark.parametrize("file", ["other-rule.json", "no-rule.json"])
def test_rules_that_the_case_was_not_saved_for_count_too(judged: Outcome, file: str) -> None:
    _, result, text = item_of(judged, file)
    assert (result, text.splitlines()[0].partition(":")[0]) == ("failure", "unexplained-rejection")


def test_a_known_limit_is_excused_unless_the_case_was_saved_for_it() -> None:
    limit = LIMITS[0]
    allocator, spec = limit.allocators[0], decode_spec(limit.example)
    found = tuple(FoundRule(rule=rule, message="") for rule in limit.rules)
    assert plugin_items.faults_of_case(Case(allocator=allocator, input=spec), allocator) == []
    faults = plugin_items.faults_of_case(Case(allocator=allocator, input=spec, found=found), allocator)
    assert {fault.rule for fault in faults} <= set(limit.rules)
    assert faults != []


# Campaigns.


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: str(profile.name))
@pytest.mark.parametrize("workers", [1, 2, 8, 64])
def test_parts_share_the_chunks_of_a_campaign_and_its_time(
    profile: Profile, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = plugin_items.part_count(profile)
    ran: list[list[tuple[int, int]]] = []
    seconds = []
    for part in range(parts):
        clock = _clock()
        monkeypatch.setattr(plugin_items.time, "monotonic", lambda clock=clock: next(clock))
        ran.append(list(plugin_items.chunks_of_part(profile, part, workers)))
        seconds.append(next(clock) - 1)
    drawn = [pair for pairs in ran for pair in pairs]
    chunks = sorted(chunk for chunk, _ in drawn)
    assert len(set(chunks)) == len(chunks)
    assert all(ran)
    if profile.examples is not None:
        assert sum(examples for _, examples in drawn) == profile.examples
        assert chunks == list(range(len(chunks)))
        assert max(map(len, ran)) - min(map(len, ran)) <= 1
    else:
        for took in seconds:  # a chunk takes a second here
            assert took >= 1
            assert abs(took - profile.seconds * min(workers, parts) / parts) <= 0.5
        assert {examples for _, examples in drawn} == {CHUNK_EXAMPLES}


def _clock() -> Iterator[int]:
    """Yield the seconds of a clock on which each look takes one."""
    second = 0
    while True:
        yield second
        second += 1


@pytest.fixture(scope="module")
def fuzzed(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """Return a run of two parts of a campaign on two workers, the plugin loaded by ``-p``, and its folder."""
    folder = tmp_path_factory.mktemp("campaign")
    (folder / "own.py").write_text(OWN)
    options = ["--kvsan-profile", "dev", "--kvsan-allocator", "own:refusing", "--kvsan-save", "found"]
    chosen = ["-n", "2", "--dist", "loadfile", "-k", "1-of-4 or 3-of-4", "-m", "kvsan"]
    return run_pytest(folder, [library], "-p", "kvsan.ci.plugin", *chosen, *options), folder


def test_a_campaign_is_spread_over_workers(fuzzed: tuple[Outcome, Path]) -> None:
    outcome, _ = fuzzed
    assert outcome.status == 1, outcome.output
    assert sorted(outcome.items) == [
        "kvsan-dev-1-of-4::own:refusing",
        "kvsan-dev-3-of-4::own:refusing",
    ]
    assert "[gw0]" in outcome.output
    assert "[gw1]" in outcome.output


def test_a_part_fails_with_its_faults_reduced_and_saved(fuzzed: tuple[Outcome, Path]) -> None:
    outcome, folder = fuzzed
    saved = {path.name for path in (folder / "found").iterdir()}
    for result, text in outcome.items.values():
        assert result == "failure"
        assert text.startswith("unexplained-rejection: the allocator refused with KeyError: 'window'")
        assert "own:refusing: 500 examples of profile dev, seed 0, part " in text
        assert any(f"  saved: found/{name}" in text for name in saved)
        assert "Traceback" not in text
    assert [path.name for path in folder.iterdir() if path.name.startswith(".hypothesis")] == []


# Usage, and staying out of the way.


def config(folder: Path, **options: Any) -> Any:
    """Return what the plugin reads of a pytest configuration."""
    values = {"cases": [], "profile": None, "allocator": [], "save": None, "seed": 0} | options
    return SimpleNamespace(
        getoption=lambda name: values[name.removeprefix("kvsan_")],
        invocation_params=SimpleNamespace(dir=folder),
        rootpath=folder,
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"profile": "fast"}, "--kvsan-profile: found 'fast', needs one of dev, ci, nightly"),
        ({"profile": "ci"}, "--kvsan-profile ci needs an allocator to fuzz: --kvsan-allocator NAME"),
        ({"profile": "ci", "allocator": ["nope"]}, "--kvsan-allocator: unknown allocator 'nope', needs one of"),
        ({"profile": "ci", "allocator": ["fault:x"]}, "--kvsan-allocator: unknown allocator 'fault:x', needs one of"),
        ({"profile": "ci", "allocator": ["os:system"]}, "'os:system' is part of Python's own library"),
        ({"cases": ["no-such-folder"]}, "no-such-folder: no such file or folder"),
    ],
)
def test_a_wrong_option_is_a_usage_error_of_one_line(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(pytest.UsageError) as raised:
        plugin_items.collection_of(config(tmp_path, **options))
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_profile_ends_with_exit_status_4(library: Path, tmp_path: Path) -> None:
    outcome = run_pytest(tmp_path, [library], "-p", "kvsan.ci.plugin", "--kvsan-profile", "fast")
    assert outcome.status == pytest.ExitCode.USAGE_ERROR
    assert outcome.output.strip() == "ERROR: --kvsan-profile: found 'fast', needs one of dev, ci, nightly"


WATCH = """
import sys

def test_only_the_plugin_is_loaded():
    ours = sorted(name for name in sys.modules if name.partition(".")[0] == "kvsan")
    assert ours == ["kvsan", "kvsan.ci", "kvsan.ci.plugin"]
    assert not {"msgspec", "numpy", "torch", "islpy"} & set(sys.modules)
"""


def test_the_plugin_is_invisible_without_its_options_and_loaded_once(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_watch.py").write_text(WATCH)
    outcome = run_pytest(tmp_path, [installed], "-W", "error", "-p", "kvsan.ci.plugin")
    assert outcome.status == 0, outcome.output
    assert list(outcome.items) == ["test_watch::test_only_the_plugin_is_loaded"]


def test_loading_the_plugin_takes_no_time_and_imports_pytest_alone(library: Path, tmp_path: Path) -> None:
    code = (
        "import json, pytest, sys, time; before = set(sys.modules); start = time.perf_counter()\n"
        "import kvsan.ci.plugin\n"
        "print(json.dumps([time.perf_counter() - start, sorted(set(sys.modules) - before)]))"
    )
    env = {**os.environ, "PYTHONPATH": str(library)}
    took = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, check=True)
        seconds, modules = json.loads(done.stdout)
        took.append(seconds)
        assert modules == ["kvsan", "kvsan.ci", "kvsan.ci.plugin"]
    assert min(took) < 0.02
