"""Each fault in the table is caught by its rule on its minimum, and nothing simpler shows it."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from kvsan.ci.faults import CANARY, FAULTS, Fault, detects, fault_named, rules_fired, shows, triggers
from kvsan.ci.minima import MAX_SIZE, find_minimum, grid_specs
from kvsan.ci.simplicity import simplicity_key, size
from kvsan.model.errors import SpecError
from kvsan.model.spec import decode_spec, encode_spec
from kvsan.sim.allocators.faulty import FAULTY
from kvsan.sim.rules import RULES
from kvsan.sim.verdict import judge

LAYOUT_FAULTS = [fault for fault in FAULTS if fault.kind == "layout"]
by_name = pytest.mark.parametrize("fault", LAYOUT_FAULTS, ids=lambda fault: fault.name)


def test_the_table_holds_every_faulty_allocator_once() -> None:
    assert [fault.name for fault in LAYOUT_FAULTS] == [entry.name for entry in FAULTY]
    assert fault_named(CANARY) is FAULTS[0]
    with pytest.raises(SpecError, match="unknown fault 'fault:nothing', needs one of fault:canary"):
        fault_named("fault:nothing")


@by_name
def test_a_fault_shows_on_its_minimum_by_its_rule(fault: Fault) -> None:
    fired = rules_fired(fault.minimum, fault.name)
    assert set(fault.rules) <= fired <= {*fault.rules, *fault.follow}
    assert detects(fault, fired)
    assert shows(fault, fault.minimum)
    assert triggers(fault, fault.minimum)


@by_name
def test_the_table_says_all_that_there_is_to_say(fault: Fault) -> None:
    assert {*fault.rules, *fault.follow} <= {rule.name for rule in RULES}
    assert fault.cause
    assert fault.source.startswith("https://github.com/" if fault.code else "planted: ")
    assert decode_spec(encode_spec(fault.minimum)) == fault.minimum
    assert fault.size == size(fault.minimum) <= MAX_SIZE


@by_name
def test_the_sound_base_has_no_finding_on_the_minimum(fault: Fault) -> None:
    base = judge(fault.minimum, fault.base)
    assert base.status == ("rejected" if fault.base.endswith("legacy") else "clean")


@by_name
def test_nothing_simpler_in_a_small_grid_shows_a_fault(fault: Fault) -> None:
    """With the fault's rule alone, too: a campaign that knows nothing of the base cannot end below the minimum."""
    limit = simplicity_key(fault.minimum)
    simpler = itertools.takewhile(lambda spec: simplicity_key(spec) < limit, grid_specs(min(fault.size, 4), 1))
    assert [spec for spec in simpler if shows(fault, spec)] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in LAYOUT_FAULTS if fault.size <= 5], ids=lambda fault: fault.name)
def test_minima_are_found_by_enumeration(fault: Fault) -> None:
    """One option off its defaults; ``find_minimum`` over the whole grid, with two, takes some minutes.

    The two of size 7 lie behind most of its 31,192 specs; they are enumerated by ``find_minimum`` alone.
    """
    assert next(spec for spec in grid_specs(MAX_SIZE, 1) if shows(fault, spec)) == fault.minimum


def test_find_minimum_asks_what_it_is_given() -> None:
    canary = fault_named(CANARY)
    assert find_minimum(canary, 3, 1) == canary.minimum
    assert find_minimum(canary, 2) is None
    assert find_minimum(canary, 3, 0, lambda fault, spec: len(spec.layers) == 3) is not None


def test_the_grid_runs_from_simple_to_large_without_repeating_itself() -> None:
    keys = [simplicity_key(spec) for spec in grid_specs(4, 1)]
    assert all(one < other for one, other in itertools.pairwise(keys))


def test_the_table_of_faults_imports_no_hypothesis() -> None:
    code = "import sys, kvsan.ci.faults, kvsan.ci.minima, kvsan.ci.reducer; print('hypothesis' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
