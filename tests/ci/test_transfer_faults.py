"""Each faulty transfer is caught by its rule on its minimum, nothing simpler shows it, and drawn pairs find it."""

from __future__ import annotations

import itertools

import pytest

from kvsan.ci.faults import ALL_FAULTS
from kvsan.ci.transfer_faults import TRANSFER_FAULTS, TransferFault
from kvsan.ci.transfer_minima import find_minimum, grid_pairs, pair_key, triggers
from kvsan.model.errors import SpecError
from kvsan.sim.rules import RULES
from kvsan.sim.transfer.faulty import FAULTY_TRANSFERS, method_named
from kvsan.sim.transfer.pair import judge_pair
from kvsan.sim.transfer.planning import SOUND

by_name = pytest.mark.parametrize("fault", TRANSFER_FAULTS, ids=lambda fault: fault.name)


def test_the_table_holds_every_faulty_transfer_once() -> None:
    assert {fault.name for fault in TRANSFER_FAULTS} == {method.name for method in FAULTY_TRANSFERS}
    assert len(TRANSFER_FAULTS) == len(FAULTY_TRANSFERS) >= 6
    assert ALL_FAULTS[-len(TRANSFER_FAULTS) :] == TRANSFER_FAULTS
    assert method_named("transfer") is SOUND
    with pytest.raises(SpecError, match="unknown transfer 'fault:nothing', needs one of transfer, fault:"):
        method_named("fault:nothing")


@by_name
def test_a_fault_shows_on_its_minimum_by_its_rule(fault: TransferFault) -> None:
    verdict = judge_pair(fault.minimum, method=method_named(fault.name))
    assert verdict.status == "findings"
    fired = {finding.rule for finding in verdict.findings}
    assert set(fault.rules) <= fired <= {*fault.rules, *fault.follow}
    assert fired <= {rule.name for rule in RULES}
    assert fault.cause
    assert fault.source.startswith(("https://github.com/", "planted: "))
    assert judge_pair(fault.minimum).status == ("refused" if "plane" in fault.name else "clean")


@by_name
def test_nothing_simpler_shows_it(fault: TransferFault) -> None:
    """Over the part of the grid that is quick: pairs of one layer, and two of plain attention."""
    limit = pair_key(fault.minimum)
    pairs = grid_pairs(1)
    simpler = itertools.islice(itertools.takewhile(lambda pair: pair_key(pair) < limit, pairs), 500)
    assert find_minimum(fault.name, fault.rules, list(simpler)) is None


@pytest.mark.slow
def test_minima_are_found_by_enumeration() -> None:
    pairs = grid_pairs()
    for fault in TRANSFER_FAULTS:
        assert find_minimum(fault.name, fault.rules, pairs) == fault.minimum


def test_a_fault_does_not_show_where_the_sound_transfer_is_wrong_or_nothing_triggers_it() -> None:
    plain = TRANSFER_FAULTS[1].minimum
    assert triggers("fault:layers-by-position", ("layer-map",), plain)
    assert not triggers("fault:conv-state-as-one", ("record-layout",), plain)
