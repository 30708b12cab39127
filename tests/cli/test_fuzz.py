"""``kvsan fuzz``: the document and the report, exit statuses, and bad options in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvsan.ci.cases import Case, load_case, save_case
from kvsan.ci.faults import fault_named
from kvsan.cli import fuzz_run
from kvsan.strategies.families import FAMILIES
from kvsan.strategies.rare import CLASSES

QUICK = ("--max-examples", "40")

KEYS = ["allocator", "seed", "examples", "seconds", "refused", "known", "faults", "coverage", "interrupted"]
FAULT_KEYS = ["rule", "message", "case", "examples_to_find", "size"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def require_one_line(ran, message: str) -> None:
    """Assert that a run failed as bad input must, with nothing left in the current folder."""
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"kvsan: {message}")
    assert ran.err.count("\n") == 1
    assert ran.err.rstrip("\n").isprintable()
    assert len(ran.err) < 700


def test_the_document_of_a_faulty_allocator(run) -> None:
    ran = run("fuzz", "--allocator", "fault:canary", *QUICK, "--seed", "4", "--cases", "found", "--json")
    assert (ran.status, ran.err) == (1, "")
    document = ran.document
    assert list(document) == KEYS
    assert (document["allocator"], document["seed"], document["examples"]) == ("fault:canary", 4, 40)
    assert document["seconds"] > 0
    assert document["interrupted"] is False
    assert [list(fault) for fault in document["faults"]] == [FAULT_KEYS] * 3
    assert {fault["rule"] for fault in document["faults"]} == {"alias", "adjacency", "op-address"}
    for fault in document["faults"]:
        assert load_case(Path(fault["case"])).input == fault_named("fault:canary").minimum
        assert fault["size"] == 3
    assert os.listdir("found") == [Path(document["faults"][0]["case"]).name]


def test_the_document_of_a_sound_allocator(run) -> None:
    ran = run("fuzz", "--allocator", "trtllm-v2", *QUICK, "--json")
    assert (ran.status, ran.err) == (0, "")
    assert list(ran.document) == KEYS
    assert ran.document["faults"] == []
    assert os.listdir() == [], "no folder without a case in it"


def test_the_coverage_in_the_document(run) -> None:
    coverage = run("fuzz", "--allocator", "trtllm-v2", *QUICK, "--json").document["coverage"]
    assert {"values", "never", "pairs_seen", "pairs_total", "pairs_never", "classes", "classes_never"} <= set(coverage)
    assert {"cases_run", "cases_failing", "cases_not_run"} <= set(coverage)
    assert sum(coverage["values"]["kv_format"].values()) == 40
    assert list(coverage["classes"]) == list(CLASSES)


def test_the_report_names_the_rule_the_case_and_the_way_on(run) -> None:
    ran = run("fuzz", "--allocator", "fault:canary", *QUICK)
    assert ran.status == 1
    for words in (
        "fault:canary: 40 examples in",
        "✗ alias (example ",
        "size 3)",
        "layer 0: attention, 1 KV head x 128",
        "saved as kvsan-cases/",
        "Coverage: ",
        "kvsan check CASE",
        "pytest --kvsan-cases kvsan-cases",
    ):
        assert words in ran.out
    ran = run("fuzz", "--allocator", "trtllm-v1", *QUICK)
    assert ran.status == 0
    assert "✓ no rule is broken outside known limits" in ran.out


def test_the_coverage_gate(run) -> None:
    """Five examples leave rare classes out, and only the gate minds."""
    few = ("fuzz", "--allocator", "trtllm-v1", "--max-examples", "5")
    assert run(*few).status == 0
    ran = run(*few, "--require-coverage")
    assert ran.status == 1
    assert "classes never drawn: " in ran.out


def test_a_saved_case_that_still_fails_fails_the_run(run) -> None:
    collision = Case(allocator="trtllm-v2-qsa-legacy", input=fault_named("fault:bare-assert").minimum)
    path = save_case(collision, Path("kvsan-cases"))
    ran = run("fuzz", "--allocator", "trtllm-v2-qsa-legacy", "--max-examples", "1")
    assert ran.status == 1
    assert path.name in ran.out
    other = save_case(Case(allocator="trtllm-v1", input=collision.input), Path("kvsan-cases"))
    path.unlink()
    ran = run("fuzz", "--allocator", "trtllm-v2-qsa-legacy", "--max-examples", "1")
    assert ran.status == 0
    assert "not run: 1" in ran.out
    assert other.exists()


def test_an_own_allocator_is_found_in_the_current_folder(run, own) -> None:
    ran = run("fuzz", "--allocator", f"{own}:bare", "--max-examples", "5", "--json")
    assert ran.status == 1
    assert [fault["rule"] for fault in ran.document["faults"]] == ["unexplained-rejection"]
    ran = run("fuzz", "--allocator", f"{own}:packed", "--max-examples", "5", "--json")
    assert ran.document["examples"] == 5, "what it prints is on the standard error of a process of its own"


@pytest.mark.parametrize("name", ["number", "junk"])
def test_an_answer_that_is_no_layout_is_one_line(run, own, name) -> None:
    ran = run("fuzz", "--allocator", f"{own}:{name}", *QUICK)
    line = ran.err.splitlines()[-1]
    assert (ran.status, ran.out) == (2, "")
    assert line.startswith(f"kvsan: --allocator: '{own}:{name}' ")
    assert "kvsan-cases/" in line
    assert "Traceback" not in ran.err


def test_nothing_that_an_allocator_says_reaches_the_terminal_raw(run, tmp_path, monkeypatch) -> None:
    """Neither escape sequences in a message, nor line breaks in a path."""
    raises = "def allocate(spec):\n    raise KeyError('\\x1b[31mred')\n"
    (tmp_path / "colourful.py").write_text(raises)
    monkeypatch.syspath_prepend(tmp_path)
    fuzzed = run("fuzz", "--allocator", "colourful:allocate", "--max-examples", "2", "--cases", "two\nlines")
    (case,) = Path("two\nlines").iterdir()
    shrunk = run("shrink", case, "--allocator", "colourful:allocate")
    again = run("fuzz", "--allocator", "colourful:allocate", "--max-examples", "1", "--cases", "two\nlines")
    for ran in (fuzzed, shrunk, again):
        assert ran.status == 1
        assert all(line.isprintable() for line in ran.out.split("\n"))
        assert "x1b[31mred" in ran.out
        assert "saved as two\\nlines" in ran.out


def test_the_family_of_specs_to_draw(run) -> None:
    """Sparse attention in one, latent layers in others; the name is in the report, and in the help with its like."""
    planes, latent = {}, {}
    for family in FAMILIES:
        document = run("fuzz", "--allocator", "trtllm-v1", *QUICK, "--family", family, "--json").document
        values = document["coverage"]["values"]
        planes[family], latent[family] = values["side_planes"]["per layer and rank"], values["layers"]["latent"]
    assert planes["qsa"] > planes["dense"] == planes["dense-v1"] == 0
    assert latent["dense"] > latent["qsa"] == 0
    assert ", seed 0, family qsa, " in run("fuzz", "--allocator", "trtllm-v1", *QUICK, "--family", "qsa").out
    assert "family" not in run("fuzz", "--allocator", "trtllm-v1", *QUICK).out
    assert ", ".join(list(FAMILIES)[:-1]) in " ".join(run("fuzz", "--help").out.replace("│", "").split())


@pytest.mark.parametrize("allocator", ["trtllm-v1", "fault:canary", "own:allocate", "slab"])
def test_code_of_others_runs_in_processes_of_its_own(allocator, tmp_path, monkeypatch) -> None:
    """A module's function, and a plugin; what kvsan ships is as quick as it was."""
    metadata = tmp_path / "slab-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: slab\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[kvsan.allocators]\nslab = mended:allocate\n")
    monkeypatch.syspath_prepend(tmp_path)
    given = dict.fromkeys(("--max-examples", "--time", "--profile", "--workers", "--family"), None) | {"--seed": "0"}
    assert fuzz_run.read_options(allocator, given, "cases").isolate == (allocator in ("own:allocate", "slab"))


def test_interrupted_by_the_allocator_itself(run, own) -> None:
    ran = run("fuzz", "--allocator", f"{own}:interrupted", *QUICK, "--json")
    assert ran.status == 130
    assert ran.document["interrupted"] is True
    assert ran.err == "kvsan: interrupted\n"


@pytest.mark.parametrize(
    ("given", "examples", "seconds", "workers"),
    [
        ({}, 2000, None, 1),
        ({"--profile": "ci"}, None, 60, 2),
        ({"--profile": "nightly"}, 100_000, None, 2),
        ({"--profile": "ci", "--max-examples": "7"}, 7, None, 2),
        ({"--profile": "nightly", "--time": "9"}, None, 9, 2),
        ({"--time": "9", "--max-examples": "7"}, 7, 9, 1),
        ({"--profile": "nightly", "--workers": "1"}, 100_000, None, 1),
        ({"--workers": " 3 "}, 2000, None, 3),
    ],
)
def test_what_is_given_outright_goes_before_the_profile(given, examples, seconds, workers) -> None:
    every = dict.fromkeys(("--max-examples", "--time", "--profile", "--workers", "--family"), None) | {"--seed": "0"}
    options = fuzz_run.read_options("trtllm-v1", every | given, "cases")
    assert (options.examples, options.seconds, options.workers) == (examples, seconds, workers)
    assert (options.seed, options.cases) == (0, Path("cases"))


BAD = [
    ([], "Missing option '--allocator'"),
    (["--allocator", "trtllm-v3"], "--allocator: unknown allocator 'trtllm-v3', needs one of trtllm-v1"),
    (["--allocator", ""], "--allocator: unknown allocator ''"),
    (["--allocator", "fault:nothing"], "--allocator: unknown allocator 'fault:nothing', needs one of fault:canary"),
    (["--allocator", "os:system"], "--allocator: "),
    (["--allocator", "json:loads"], "--allocator: 'json:loads' is part of Python's own library"),
    (["--allocator", "no_such_module:f"], "--allocator: cannot import 'no_such_module'"),
    (["--profile", "weekly"], "--profile: found 'weekly', needs one of dev, ci, nightly"),
    (["--profile", ""], "--profile: found ''"),
    (["--max-examples", "0"], "--max-examples: found '0', needs a whole number from 1 to 10000000"),
    (["--max-examples", "-5"], "--max-examples: found '-5'"),
    (["--max-examples", "1e6"], "--max-examples: found '1e6'"),
    (["--max-examples", "9" * 5000], "--max-examples: found '999"),
    (["--max-examples", "٣"], "--max-examples: found '٣'"),
    (["--max-examples", ""], "--max-examples: found ''"),
    (["--time", "0"], "--time: found '0', needs a whole number from 1"),
    (["--time", "0.5"], "--time: found '0.5'"),
    (["--time", "nan"], "--time: found 'nan'"),
    (["--time", "-1"], "--time: found '-1'"),
    (["--family", "sparse"], "--family: found 'sparse', needs one of dense, dense-v1, qsa, any"),
    (["--family", ""], "--family: found '', needs one of dense"),
    (["--seed", "-1"], "--seed: found '-1', needs a whole number from 0"),
    (["--seed", "x"], "--seed: found 'x'"),
    (["--seed", str(2**63)], "--seed: found '9223372036854775808'"),
    (["--workers", "0"], "--workers: found '0', needs a whole number from 1 to 256"),
    (["--workers", "1000"], "--workers: found '1000'"),
    (["--cases", ""], "--cases: found an empty path, needs a folder"),
    (["--cases", "file"], "--cases: file is not a folder"),
    (["--cases", "file/below"], "--cases: "),
    (["--cases", "x" * 300], "--cases: "),
    (["--no-such"], "No such option: --no-such"),
    (["one-more"], "Got unexpected extra argument"),
    (["--seed"], "Option '--seed' requires an argument"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_option_is_one_line(run, options, message) -> None:
    Path("file").write_text("")
    named = [] if "--allocator" in options or not options else ["--allocator", "trtllm-v1"]
    require_one_line(run("fuzz", *named, *options), message)
    assert os.listdir() == ["file"]


def test_other_files_among_the_cases_do_not_matter(run) -> None:
    Path("kvsan-cases").mkdir()
    for name, text in (
        ("a.json", "{"),
        ("b.json", json.dumps({"kvsan": "case", "version": 99})),
        ("c.json", "[" * 10**5),
    ):
        Path("kvsan-cases", name).write_text(text)
    os.mkfifo("kvsan-cases/d.json")
    ran = run("fuzz", "--allocator", "trtllm-v1", "--max-examples", "1", "--json")
    assert ran.status == 0
    coverage = ran.document["coverage"]
    assert coverage["cases_unreadable"] == ["a.json", "b.json", "c.json", "d.json"]
    assert coverage["cases_not_run"] == []
    save_case(Case(allocator="trtllm-v2", input=fault_named("fault:canary").minimum), Path("kvsan-cases"))
    report = run("fuzz", "--allocator", "trtllm-v1", "--max-examples", "1").out
    assert "  saved cases of other allocators, not run: 1\n" in report
    assert "  files that are no saved case, not run: 4\n" in report
