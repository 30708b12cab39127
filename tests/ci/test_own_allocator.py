"""The example of a foreign allocator: faulty is found, mended is clean, and the guide says what really happens."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

import kvsan
from kvsan.ci.campaign import Options, Result, run_campaign
from kvsan.ci.cases import load_case
from kvsan.model.spec import AttentionLayer, CacheSpec
from kvsan.sim.registry import resolve
from kvsan.sim.verdict import judge

EXAMPLE = "examples/own-allocator"
GUIDE = "docs/own-allocators.md"
FILES = "faulty.py", "mended.py"


@pytest.fixture(scope="module", autouse=True)
def _importable(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / EXAMPLE)
        resolve("faulty:allocate")
        resolve("mended:allocate")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Return what at most 2,000 examples find in the faulty allocator."""
    cases = tmp_path_factory.mktemp("cases")
    return run_campaign(Options(allocator="faulty:allocate", examples=2_000, cases=cases, stop_rule="alias"))


def test_the_fault_is_found_with_the_right_rules_and_no_others(found: Result) -> None:
    assert {fault.rule for fault in found.faults} == {"alias", "bounds"}
    assert found.refused < found.examples


def test_the_fault_shrinks_to_one_layer_with_the_smallest_arithmetic(found: Result) -> None:
    """K of 8 B: half of the pair is 8 B, rounded down to 0. Simpler head dims fill 16 B exactly."""
    smallest = CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=4),), tokens_per_block=1, slots=1)
    assert {fault.spec for fault in found.faults} == {smallest}
    (case,) = {fault.case for fault in found.faults}
    assert case is not None
    assert load_case(Path(case)).input == smallest


def test_the_mended_allocator_is_clean() -> None:
    result = run_campaign(Options(allocator="mended:allocate", examples=1_000))
    assert result.faults == []
    assert result.examples - result.refused >= 100, "too few specs were laid out to mean anything"


def test_pages_that_end_1_to_8_bytes_past_a_multiple_of_16_overlap() -> None:
    for dim in range(1, 65):
        spec = CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=dim),) * 2, tokens_per_block=1)
        rules = {fault.rule for fault in judge(spec, "faulty:allocate").faults}
        assert ("alias" in rules) == (1 <= 2 * dim % 16 <= 8)
        assert judge(spec, "mended:allocate").status == "clean"


def test_the_model_of_the_example_hides_the_fault(root: Path) -> None:
    spec = kvsan.load(root / EXAMPLE / "config.json")
    assert judge(spec, "faulty:allocate").status == "clean"


def test_the_two_versions_differ_in_the_lines_that_the_guide_shows(root: Path) -> None:
    faulty, mended = [(root / EXAMPLE / name).read_text(encoding="utf-8").splitlines() for name in FILES]
    changed = [line for line in difflib.ndiff(faulty[1:], mended[1:]) if line[0] in "+-"]
    (shown,) = re.findall(r"```diff\n(.*?)```", (root / GUIDE).read_text(encoding="utf-8"), re.DOTALL)
    assert sorted(line[0] + line[1:].strip() for line in changed) == sorted(shown.splitlines())
    assert len(faulty) < 65


def test_the_guide_quotes_the_real_findings(root: Path, found: Result) -> None:
    guide = " ".join((root / GUIDE).read_text(encoding="utf-8").split())
    for fault in found.faults:
        assert f"{fault.rule} (example " in guide
        assert fault.message in guide
        assert Path(fault.case or "").name in guide


def test_an_installed_package_gives_its_allocator_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "slab-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: slab\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[kvsan.allocators]\nslab = mended:allocate\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = CacheSpec(layers=(AttentionLayer(kv_heads=8, head_dim=128),))
    assert kvsan.allocate(spec, "slab") == kvsan.allocate(spec, "mended:allocate")
