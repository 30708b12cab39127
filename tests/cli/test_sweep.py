"""``kvsan sweep``: the document, the report, grids from files, and bad ones in one line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kvsan.ci.sweep import GRIDS
from kvsan.cli import sweep_run

SMALL = {
    "kv_formats": ["bf16"],
    "heads": 2,
    "head_dims": [64],
    "tokens_per_block": [1],
    "tp": [1],
    "sparse_layers": [1, 2],
    "index_dims": [64],
}


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.json").write_text(json.dumps(SMALL))
    return "grid.json"


def test_the_document(run, grid) -> None:
    ran = run("sweep", "--allocator", "trtllm-v2-qsa-legacy", "--grid", grid, "--json")
    assert (ran.status, ran.err) == (1, "")
    document = ran.document
    assert list(document) == ["allocator", "points", "signatures", "judged", "refused", "seconds", "classes"]
    assert (document["allocator"], document["points"]) == ("trtllm-v2-qsa-legacy", 4)
    (row,) = document["classes"]
    message = row.pop("message")
    assert row == {
        "rule": "rejected",
        "heads": 1,
        "head_dim": 64,
        "kv_dtype": "bf16",
        "index_dim": 64,
        "several_layers": True,
        "count": 1,
    }
    assert "1 head x 64 bf16" in message


def test_a_sound_allocator(run, grid) -> None:
    ran = run("sweep", "--allocator", "trtllm-v2-qsa-packed", "--grid", grid, "--json")
    assert (ran.status, ran.document["classes"]) == (0, [])
    ran = run("sweep", "--allocator", "trtllm-v2-qsa-packed", "--grid", grid)
    assert "✓ no point breaks a rule outside known limits" in ran.out


def test_the_report_lists_classes(run, grid) -> None:
    ran = run("sweep", "--allocator", "trtllm-v2-qsa-legacy", "--grid", grid)
    assert ran.status == 1
    assert "trtllm-v2-qsa-legacy: 4 points in " in ran.out
    assert "rejected" in ran.out
    assert "2 or more" in ran.out


def test_the_report_of_the_dev_grid_leaves_the_rest_to_json(run) -> None:
    ran = run("sweep", "--allocator", "trtllm-v2-qsa-legacy", "--grid", "dev")
    assert "more geometries (--json has them, rule by rule)" in ran.out
    assert "alias," in ran.out  # a geometry is one row, with all of its rules


def test_the_grid_depends_on_what_has_to_be_run(run, own, monkeypatch) -> None:
    """A million points for who looks at sizes alone; every other allocator is run point by point."""
    used = []

    def fake(allocator, grid, progress):
        used.append((allocator, grid))
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_run, "run_sweep", fake)
    for allocator in ("trtllm-v2-qsa-packed", f"{own}:packed", "fault:heads-floor"):
        assert run("sweep", "--allocator", allocator).status == 130
    assert [next(name for name in GRIDS if GRIDS[name] is grid) for _, grid in used] == ["ci", "dev", "dev"]


def test_an_own_allocator_is_found_in_the_current_folder(run, own, tmp_path) -> None:
    (tmp_path / "grid.json").write_text(json.dumps(SMALL))
    ran = run("sweep", "--allocator", f"{own}:bare", "--grid", "grid.json", "--json")
    assert ran.status == 1
    assert ran.document["judged"] == 4
    assert {row["rule"] for row in ran.document["classes"]} == {"unexplained-rejection"}
    ran = run("sweep", "--allocator", f"{own}:number", "--grid", "grid.json")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"kvsan: --allocator: '{own}:number': returned 3")


BAD = [
    (["--grid", "weekly"], "--grid: found 'weekly', needs one of dev, ci, nightly, or a JSON file"),
    (["--grid", ""], "--grid: found ''"),
    (["--grid", "."], "--grid: found '.'"),
    (["--grid", "x" * 5000], ""),
    (["--allocator", "trtllm-v3"], "--allocator: unknown allocator 'trtllm-v3'"),
    (["--allocator", "os:system"], "--allocator: "),
    (["--no-such"], "No such option"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_option_is_one_line(run, grid, options, message) -> None:
    named = [] if "--allocator" in options else ["--allocator", "trtllm-v2"]
    ran = run("sweep", *named, *options)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"kvsan: {message}")
    assert ran.err.count("\n") == 1


BAD_GRIDS = {
    "not JSON": "hello",
    "empty": "",
    "a list": "[]",
    "unknown key": json.dumps(SMALL | {"head_dim": [1]}),
    "empty axis": json.dumps(SMALL | {"head_dims": []}),
    "negative": json.dumps(SMALL | {"heads": -1}),
    "zero": json.dumps(SMALL | {"tp": [0]}),
    "a billion points": json.dumps(SMALL | {"heads": 10**6, "tokens_per_block": list(range(1, 1001))}),
    "a huge number": json.dumps(SMALL | {"heads": 10**40}),
    "a format for nothing": json.dumps(SMALL | {"kv_formats": ["int64"]}),
    "no legal point": json.dumps(SMALL | {"kv_formats": ["nvfp4"], "head_dims": [24]}),
    "deep": "[" * 100_000,
    "NaN": '{"heads": NaN}',
    "too large": json.dumps(SMALL | {"comment": "x" * (1 << 20)}),
}


@pytest.mark.parametrize("name", BAD_GRIDS)
def test_a_bad_grid_is_one_line_and_takes_no_time(run, grid, name) -> None:
    Path(grid).write_text(BAD_GRIDS[name])
    started = time.process_time()
    ran = run("sweep", "--allocator", "trtllm-v2", "--grid", grid)
    assert time.process_time() - started < 2
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert "grid" in ran.err
    assert len(ran.err) < 700


def test_a_grid_that_is_no_utf8_is_one_line(run, grid) -> None:
    Path(grid).write_bytes(b'{"heads": 1, "\xff\xfe": 2}')
    ran = run("sweep", "--allocator", "trtllm-v2", "--grid", grid)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
