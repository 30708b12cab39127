"""Each fault of a running cache is caught by its rule on its minimum, and nothing shorter shows it."""

from __future__ import annotations

import msgspec
import pytest

from kvsan.ci.faults import FAULTS, Fault, detects, fault_named, shows_trace
from kvsan.ci.traces.chains import CHAINS
from kvsan.ci.traces.find import find_fault
from kvsan.ci.traces.grid import grid_operations, grid_specs, narrow_operations, narrow_specs
from kvsan.ci.traces.minima import find_minimum
from kvsan.ci.traces.reducer import reduce_trace
from kvsan.ci.traces.simplicity import trace_key
from kvsan.sim.cache.faulty import FAULTY_CACHES
from kvsan.sim.cache.run import run_trace
from kvsan.sim.cache.trace import Operation, Trace
from kvsan.sim.rules import RULES

TRACE_FAULTS = [fault for fault in FAULTS if fault.kind == "trace"]
RARE = ("fault:short-chunk-writes-source", "fault:snapshot-is-live-state", "fault:partial-copy-forgets-scales")
QUICK = (
    "fault:block-id-is-slot",
    "fault:key-without-lora",
    "fault:one-host-table",
    "fault:padding-writes-slot-zero",
    "fault:published-before-written",
    "fault:rewind-leaves-table",
)
WITHOUT_CHAIN = ("fault:free-at-output", "fault:window-map-not-cleared", "fault:store-before-compute")
by_name = pytest.mark.parametrize("fault", TRACE_FAULTS, ids=lambda fault: fault.name)


def test_the_table_holds_every_faulty_cache_once() -> None:
    assert [fault.name for fault in TRACE_FAULTS] == [entry.name for entry in FAULTY_CACHES]
    assert {fault.code for fault in TRACE_FAULTS} - {""} == {"D4", "D6", "D7", "D8", "D9", "D10", "D12"}
    assert sum(not fault.code and fault.source.startswith("https://github.com/") for fault in TRACE_FAULTS) >= 8


@by_name
def test_a_fault_shows_on_its_minimum_by_its_rule(fault: Fault) -> None:
    fired = frozenset(run_trace(fault.trace, fault.name).rules)
    assert detects(fault, fired)
    assert fired <= {*fault.rules, *fault.follow}
    assert {*fault.rules, *fault.follow} <= {rule.name for rule in RULES}
    assert fault.size == len(fault.trace.operations)


@by_name
def test_the_sound_base_has_no_finding_on_the_minimum(fault: Fault) -> None:
    verdict = run_trace(fault.trace, fault.base)
    assert (verdict.findings, verdict.rejection) == ((), None)


@by_name
def test_no_operation_of_a_minimum_can_go(fault: Fault) -> None:
    operations = fault.trace.operations
    for place in range(len(operations)):
        rest = Trace(spec=fault.trace.spec, operations=operations[:place] + operations[place + 1 :])
        assert not shows_trace(fault, rest)


@by_name
def test_where_a_fault_is_not_triggered_the_cache_is_its_base(fault: Fault) -> None:
    """A single request that is admitted, run and freed, with room to spare, triggers none but the clearing faults."""
    text = "admit 0 1;step 1;complete;free 0"
    operations = tuple(Operation(kind, *map(int, rest)) for kind, *rest in map(str.split, text.split(";")))
    spec = next(spec for spec in grid_specs() if spec.slots == 4 and spec.tokens_per_block == 2)
    verdict = run_trace(Trace(spec=spec, operations=operations), fault.name)
    assert verdict.findings == ()


@pytest.mark.parametrize("name", ["fault:partial-allocation-kept", "fault:clear-span-is-slab"])
def test_a_short_minimum_is_found_by_enumeration(name) -> None:
    fault = next(fault for fault in TRACE_FAULTS if fault.name == name)
    assert find_minimum(fault.name, fault.rules, 1) == fault.trace


@pytest.mark.parametrize("name", QUICK)
def test_minima_of_several_operations_are_found_by_enumeration(name) -> None:
    """The others take up to ten minutes each: ``python -m kvsan.ci.traces.minima``."""
    fault = fault_named(name)
    assert find_minimum(fault.name, fault.rules, fault.size) == fault.trace


@by_name
def test_a_minimum_contains_its_chain(fault: Fault) -> None:
    chain = CHAINS.get(fault.name)
    if chain is None:
        assert fault.size == 1 or fault.name in WITHOUT_CHAIN
        return
    matched = 0
    for operation in fault.trace.operations:
        matched = chain.matched(matched, operation.kind)
    assert matched == len(chain.kinds)
    assert len(chain.kinds) >= fault.size - 1


@pytest.mark.parametrize("name", QUICK)
def test_a_chain_leaves_nothing_out_where_everything_can_be_tried(name) -> None:
    """On the minimum's own spec, up to three operations: what shows the fault without its chain would refute it."""
    fault = fault_named(name)
    found = find_minimum(fault.name, fault.rules, min(3, fault.size - 1), specs=(fault.trace.spec,), chained=False)
    assert found is None


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[pytest.mark.slow] if fault.name in RARE else []) for fault in TRACE_FAULTS],
    ids=lambda fault: fault.name,
)
def test_a_seed_finds_every_fault(fault: Fault) -> None:
    found = find_fault(fault, 0, reduce=False, max_traces=400)
    assert found is not None
    assert shows_trace(fault, found.trace)


@pytest.mark.parametrize(
    ("name", "text", "tokens", "slots"),
    [
        (
            "fault:free-at-output",
            "admit 1 3 2;admit 2 1;step 6 2;complete;extend 1 2;step 2;offload;free 1;commit 2;admit 0 5;complete",
            2,
            4,
        ),
        ("fault:window-end-off-by-one", "admit 0 7 1;step 1;complete;extend 0 4;step 1 1;complete;step 1 2", 2, 8),
        ("fault:published-before-written", "admit 1 5;extend 1 3;step 2 3;complete;step 2;commit 1;complete", 2, 6),
        ("fault:partial-allocation-kept", "admit 0 3;step 1;complete;admit 1 9;free 0", 2, 4),
        # one slot freed and taken again, where the minimum has two requests at once: all admissions change together
        (
            "fault:stale-key-after-eviction",
            "admit 0 2;step 1;complete;commit 0;free 0;admit 0 3 1;free 0;admit 0 3",
            1,
            3,
        ),
    ],
)
def test_a_long_trace_is_reduced_to_the_minimum(name, text, tokens, slots) -> None:
    fault = next(fault for fault in TRACE_FAULTS if fault.name == name)
    operations = tuple(Operation(kind, *map(int, rest)) for kind, *rest in map(str.split, text.split(";")))
    layers = next(spec.layers for spec in grid_specs() if getattr(spec.layers[0], "window", None) == 2)
    if "window" not in name:
        layers = fault.trace.spec.layers
    spec = next(spec for spec in grid_specs() if spec.layers == layers)
    trace = Trace(spec=msgspec.structs.replace(spec, tokens_per_block=tokens, slots=slots), operations=operations)
    assert shows_trace(fault, trace)
    reduction = reduce_trace(trace, lambda candidate: shows_trace(fault, candidate))
    assert reduction.trace == fault.trace


def test_a_trace_that_does_not_fail_is_not_reduced() -> None:
    with pytest.raises(ValueError, match="the trace to reduce does not fail"):
        reduce_trace(TRACE_FAULTS[0].trace, lambda candidate: False)


def test_the_grid_runs_from_simple_to_large() -> None:
    assert len(grid_specs()) == 144
    assert len(narrow_specs()) == 57
    assert set(narrow_operations()) < set(grid_operations())
    keys = [trace_key(Trace(spec=spec)) for spec in grid_specs()]
    assert keys == sorted(keys)
    assert all(fault.trace.spec in grid_specs() for fault in TRACE_FAULTS)
