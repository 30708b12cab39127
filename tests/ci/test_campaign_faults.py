"""Every shipped fault of a layout is found by a campaign that is not told where to look, one seed each.

``kvsan bench fuzz`` does the same over twenty seeds, and counts how long it takes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsan.ci.campaign import Options, run_campaign
from kvsan.ci.cases import load_case
from kvsan.ci.faults import FAULTS, Fault

MAX_EXAMPLES = 20_000
SEED = 0


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.kind == "layout"], ids=lambda fault: fault.name)
def test_a_fault_is_found_named_and_reduced_to_its_known_minimum(fault: Fault, tmp_path: Path) -> None:
    rule = fault.rules[0]
    result = run_campaign(
        Options(allocator=fault.name, seed=SEED, examples=MAX_EXAMPLES, stop_rule=rule, cases=tmp_path)
    )
    found = {entry.rule: entry for entry in result.faults}
    assert rule in found, f"not found in {result.examples} examples"
    assert set(found) <= {*fault.rules, *fault.follow}
    assert found[rule].spec == fault.minimum
    case = load_case(Path(found[rule].case or ""))
    assert case.input == fault.minimum
    assert rule in {entry.rule for entry in case.found}
