"""Campaigns over traces: sound caches are clean, faults are found, saved and reduced, and seeds repeat themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsan.ci.campaign import Options
from kvsan.ci.cases import encode_case, load_case
from kvsan.ci.faults import fault_named
from kvsan.ci.traces.campaign import run_trace_campaign
from kvsan.ci.traces.coverage import SITUATIONS
from kvsan.model.errors import SpecError
from kvsan.sim.cache.run import run_trace
from kvsan.sim.cache.trace import COMMON_KINDS, KINDS, Trace
from kvsan.strategies.traces import LENGTHS, REQUESTS, traces
from kvsan.strategies.worlds import worlds_for

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("allocator", ["trtllm-v1", "trtllm-v2", "trtllm-v2-qsa-packed"])
def test_the_sound_caches_are_clean(allocator) -> None:
    result = run_trace_campaign(Options(allocator=allocator, seed=7, examples=15))
    assert result.faults == []
    assert (result.examples, result.refused, result.known) == (15, 0, 0)
    assert result.operations > 300
    coverage = result.coverage
    assert set(coverage.done) == set(KINDS if allocator != "trtllm-v1" else COMMON_KINDS)
    assert sum(coverage.done.values()) + sum(coverage.refused.values()) == result.operations
    assert set(coverage.classes) == set(SITUATIONS)


def test_a_fault_is_found_saved_and_reduced(tmp_path) -> None:
    fault = fault_named("fault:published-before-written")
    result = run_trace_campaign(Options(allocator=fault.name, seed=1, examples=45, cases=tmp_path))
    found = next(entry for entry in result.faults if entry.rule == "freshness")
    assert found.trace == fault.trace
    assert found.size == 3
    assert 1 <= found.examples_to_find <= 45
    assert found.operations_to_find >= 3
    files = sorted(tmp_path.iterdir())
    assert str(tmp_path / Path(found.case or "").name) in map(str, files)
    for path in files:
        case = load_case(path)
        assert isinstance(case.input, Trace)
        assert encode_case(case) == path.read_bytes()
        assert {entry.rule for entry in case.found} <= set(run_trace(case.input, case.allocator).rules)
    again = run_trace_campaign(Options(allocator=fault.name, seed=1, examples=1, cases=tmp_path))
    assert again.coverage.cases_failing == [path.name for path in files]


def test_the_same_seed_gives_the_same_result_for_any_number_of_workers() -> None:
    options = [
        Options(allocator="fault:partial-allocation-kept", seed=3, examples=51, workers=workers, reduce=False)
        for workers in (1, 2)
    ]
    one, two = (run_trace_campaign(entry) for entry in options)
    assert one.faults == two.faults
    assert one.coverage == two.coverage
    assert (one.examples, one.operations) == (two.examples, two.operations)


def test_an_allocator_that_is_none() -> None:
    with pytest.raises(SpecError, match="unknown allocator 'fault:nothing'"):
        run_trace_campaign(Options(allocator="fault:nothing", examples=1))


def test_traces_can_be_long() -> None:
    assert max(LENGTHS) >= 1_000
    assert LENGTHS[0] == 1
    assert sorted(LENGTHS) == list(LENGTHS)
    assert REQUESTS >= 2
    assert traces("trtllm-v2", max_operations=5) is not None


def test_worlds_are_those_that_the_allocator_supports() -> None:
    v1, v2 = worlds_for("trtllm-v1"), worlds_for("trtllm-v2")
    assert {world.spec for world in v1} != {world.spec for world in v2}
    assert max(world.crowd for world in v2) == 2  # equal slots: full and window life cycles draw from one group
    with pytest.raises(SpecError, match="unknown allocator"):
        worlds_for("nothing")


NAMED = {
    "beam-width-4.json": {"beams of divergent parents", "fork in the middle of a block"},
    "prefix-hit-mid-block.json": {"hit in the middle of a block"},
    "rewind-across-blocks.json": {"rewind across a block boundary", "rewind under a step"},
    "suspend-resume-other-slots.json": {"resume in other slots"},
    "offload-swap.json": {"cached page to the host"},
}


def test_every_named_trace_is_listed() -> None:
    assert {path.name for path in (ROOT / "examples" / "cases" / "traces").iterdir()} == set(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_a_named_trace_is_clean_and_does_what_its_name_says(name) -> None:
    from kvsan.sim.cache.managers import running_cache

    path = ROOT / "examples" / "cases" / "traces" / name
    case = load_case(path)
    assert encode_case(case) == path.read_bytes()
    assert isinstance(case.input, Trace)
    cache = running_cache(case.input.spec, case.allocator)
    verdict = run_trace(case.input, case.allocator, cache=cache)
    assert (verdict.findings, verdict.done) == ((), len(case.input.operations))
    assert NAMED[name] <= cache.seen
