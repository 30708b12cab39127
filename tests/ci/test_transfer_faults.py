"""Each faulty transfer is caught by its rule on its minimum, nothing simpler shows it, and drawn pairs find it."""

from __future__ import annotations

import msgspec
import pytest

from kvsan.ci.faults import ALL_FAULTS
from kvsan.ci.transfer_campaign import reduce_pair, run_pairs
from kvsan.ci.transfer_faults import TRANSFER_FAULTS, TransferFault
from kvsan.ci.transfer_minima import find_minimum, grid_pairs, pair_key, pair_size, triggers
from kvsan.model.errors import SpecError
from kvsan.model.layers import UncachedLayer
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec
from kvsan.sim.rules import RULES
from kvsan.sim.transfer.faulty import FAULTY_TRANSFERS, method_named
from kvsan.sim.transfer.pair import Pair, judge_pair
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


def test_minima_are_found_by_enumeration() -> None:
    """All of the grid for the small minima, every ninth pair below the others."""
    pairs = grid_pairs()
    for fault in TRANSFER_FAULTS:
        limit = pair_key(fault.minimum)
        simpler = [pair for pair in pairs if pair_key(pair) < limit]
        assert pairs[len(simpler)] == fault.minimum
        assert find_minimum(fault.name, fault.rules, simpler if len(simpler) < 500 else simpler[::9]) is None


@pytest.mark.parametrize("name", ["fault:token-major-as-head-major", "fault:plane-as-far-as-it-fits"])
def test_a_campaign_finds_a_fault_and_reduces_it(name: str) -> None:
    (fault,) = [fault for fault in TRANSFER_FAULTS if fault.name == name]
    result = run_pairs(500, seed=1, method=method_named(name), stop_at_first=True)
    assert result.hits
    small = reduce_pair(result.hits[0].pair, lambda pair: triggers(name, fault.rules, pair))
    assert triggers(name, fault.rules, small)
    assert pair_size(small) <= fault.size


def test_drawn_pairs_are_clean_or_refused_with_an_explanation() -> None:
    result = run_pairs(500, seed=2)
    assert result.hits == ()
    assert sum(result.statuses.values()) == result.examples == 500
    assert all(result.statuses[status] > 50 for status in ("clean", "refused", "rejected"))


def test_equal_seeds_draw_equal_pairs() -> None:
    first, second = (run_pairs(60, seed=3, alike=True).statuses for _ in range(2))
    assert first == second


def test_a_fault_does_not_show_where_the_sound_transfer_is_wrong_or_nothing_triggers_it() -> None:
    plain = TRANSFER_FAULTS[1].minimum
    assert triggers("fault:layers-by-position", ("layer-map",), plain)
    assert not triggers("fault:conv-state-as-one", ("record-layout",), plain)


HUNTS = [
    ("trtllm-v2-qsa-packed", "the packed side_planes differ", 16, ("pp2", "256 B", "512 B")),
    ("trtllm-v2-qsa-packed-rank-local", "but side_planes", 8, ("tp2", "index_key", "256 B a slot")),
]


@pytest.mark.parametrize(("allocator", "words", "size", "said"), HUNTS)
def test_a_campaign_finds_what_packing_cannot_move(
    allocator: str, words: str, size: int, said: tuple[str, ...]
) -> None:
    """The two limitations told in docs/findings.md, found among drawn pairs and reduced to the cases told there."""
    drawn = {"family": "qsa", "alike": True}
    result = run_pairs(500, seed=1, allocator=allocator, refusals=words, stop_at_first=True, **drawn)
    assert {hit.rule for hit in result.hits} == {"peer"}

    def fails(pair: Pair) -> bool:
        verdict = judge_pair(pair, allocator)
        return verdict.status == "refused" and any(words in finding.message for finding in verdict.findings)

    small = reduce_pair(result.hits[0].pair, fails)
    assert pair_size(small) == size
    text = f"{small.source.parallel.name} {small.destination.parallel.name} "
    text += " ".join(finding.message for finding in judge_pair(small, allocator).findings)
    assert all(word in text for word in said)


def test_a_pair_is_turned_around_and_split_elsewhere_where_that_is_simpler() -> None:
    """No move of one side does either: stages at the source, and a split of the destination's own over more layers."""
    (fault,) = [fault for fault in TRANSFER_FAULTS if fault.name == "fault:layers-by-position"]
    layer = fault.minimum.source.layers[0]
    one = CacheSpec(layers=(layer, layer, UncachedLayer()), tokens_per_block=1, slots=1)
    split = ParallelLayout(pp=2, pp_partition=(1, 2))
    other = msgspec.structs.replace(one, parallel=split)
    for pair in (Pair(source=one, destination=other), Pair(source=other, destination=one)):
        assert reduce_pair(pair, lambda found: triggers(fault.name, fault.rules, found)) == fault.minimum
