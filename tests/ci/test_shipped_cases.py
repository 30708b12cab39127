"""The cases in examples/cases, which docs/findings.md explains: each still fails, by the rules it was saved for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsan.ci.cases import encode_case, load_case
from kvsan.sim.verdict import judge

ROOT = Path(__file__).parents[2]
CASES = (
    "c37e19f177071fc7f6c6803f81a3774d.json",
    "72309a23ec117f7bfad332cf53fca576.json",
    "33720103f328496b3311173b4709724f.json",
)


def test_every_shipped_case_is_listed() -> None:
    assert {path.name for path in (ROOT / "examples" / "cases").glob("*.json")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_shipped_case_still_fails(name: str) -> None:
    path = ROOT / "examples" / "cases" / name
    case = load_case(path)
    assert (case.file_name, encode_case(case)) == (name, path.read_bytes())
    assert {fault.rule for fault in judge(case.input, case.allocator).faults} == {entry.rule for entry in case.found}


def test_the_position_plane_is_no_trouble_once_packed() -> None:
    case = load_case(ROOT / "examples" / "cases" / "33720103f328496b3311173b4709724f.json")
    assert judge(case.input, "trtllm-v2-qsa-packed").status == "clean"


def test_packing_a_single_plane_changes_nothing() -> None:
    """A known limit of the packed policy: one plane alone is as large packed as it was before."""
    for name in ("c37e19f177071fc7f6c6803f81a3774d.json", "72309a23ec117f7bfad332cf53fca576.json"):
        case = load_case(ROOT / "examples" / "cases" / name)
        assert judge(case.input, "trtllm-v2-qsa-packed").faults
