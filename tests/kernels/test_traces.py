"""Traces on the host through the interpreter: writes, copies and reads that really happen."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvsan.ci.cases import Case, load_case
from kvsan.kernels import traces as traces_module
from kvsan.kernels.device import Device
from kvsan.kernels.probe import launch
from kvsan.kernels.probe.rows import COLUMNS, FIRST_NUMBER, ITEM, OFFSET
from kvsan.kernels.traces import replay_trace
from kvsan.sim.cache.managers import running_cache
from kvsan.sim.cache.records import Record, execute
from kvsan.sim.cache.shadow import Shadow
from kvsan.sim.cache.trace import Trace

CORPUS = Path(__file__).resolve().parents[2] / "examples" / "cases" / "traces"
NAMED = ("offload-swap", "rewind-across-blocks", "suspend-resume-other-slots")
"""The quickest of the named traces; all five are replayed by hand and on a GPU."""
TRACES = [load_case(CORPUS / f"{name}.json") for name in NAMED]
LAST = TRACES[-1].input
assert isinstance(LAST, Trace)


@pytest.mark.parametrize("case", TRACES, ids=NAMED)
def test_sound_caches_read_back_what_they_wrote(host: Device, case: Case) -> None:
    """And at every mark and the end all memory is what the simulator says, host tier included."""
    trace, allocator = case.input, case.allocator
    assert isinstance(trace, Trace)
    replayed = replay_trace(host, trace, allocator, mark_every=4)
    assert replayed.findings == ()
    assert replayed.marks == -(-len(trace.operations) // 4)
    assert replayed.launches > 0
    cache = running_cache(trace.spec, allocator, record=True)
    for number, operation in enumerate(trace.operations):
        cache.apply(number, operation)
    assert replayed.records == len(cache.shadow.records or [])


def test_records_in_one_launch_touch_no_byte_twice_unless_they_read() -> None:
    """Grouping keeps the order that matters: NumPy's one-by-one execution of the groups gives the same memory."""
    cache = running_cache(LAST.spec, "trtllm-v2", record=True)
    for number, operation in enumerate(LAST.operations):
        cache.apply(number, operation)
    records = cache.shadow.records or []
    rng = np.random.default_rng(1)
    shuffled: list[Record] = []
    covered = 0
    for start, group in traces_module._groups(records, {3}):
        assert start == covered
        assert start >= 3 or start + len(group) <= 3
        covered += len(group)
        shuffled += [group[index] for index in rng.permutation(len(group))]
    assert covered == len(records)
    memory, other = (Shadow(cache.geometry).image() for _ in range(2))
    assert execute(records, memory) == []
    assert execute(shuffled, other) == []
    assert all((memory[key] == other[key]).all() for key in memory)
    assert all((memory[key] == held).all() for key, held in cache.shadow.image().items())


def test_a_write_that_is_lost_is_read_back_wrong(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No write of the trace does what it should: the reads after it and the comparison both tell."""
    groups = traces_module._groups
    lost: list[Record] = []

    def without_writes(records: list[Record], cuts: set[int]):  # type: ignore[no-untyped-def]
        for start, group in groups(records, cuts):
            kept = []
            for record in group:
                if record.kind == "write":
                    lost.append(record)
                    kept.append(msgspec.structs.replace(record, kind="fill", owner=0x5A))
                else:
                    kept.append(record)
            yield start, kept

    monkeypatch.setattr(traces_module, "_groups", without_writes)
    replayed = replay_trace(host, LAST, "trtllm-v2", mark_every=1)
    assert lost
    assert {finding.rule for finding in replayed.findings} >= {"replay-mismatch"}
    assert {finding.rule for finding in replayed.findings} == {"freshness", "replay-mismatch"}
    assert any("the simulator says" in finding.message for finding in replayed.findings)


def test_copies_move_bytes_of_any_length_and_place(host: Device) -> None:
    anchor, memory = launch.Anchor(host), host.allocate(1 << 16)
    array = host.borrow(memory.address, 1 << 16)
    rng = np.random.default_rng(2)
    array[:] = rng.integers(0, 256, 1 << 16, dtype=np.uint8)
    expected = array.copy()
    table = np.zeros((5, COLUMNS), dtype=np.int64)
    for row, (source, target, size) in zip(
        table,
        [(1, 30_000, 1), (2, 31_001, 777), (5000, 40_000, 20_000), (900, 35_003, 0), (17, 63_000, 16)],
        strict=True,
    ):
        row[OFFSET], row[ITEM] = memory.address - anchor.address + target, size
        row[FIRST_NUMBER] = memory.address - anchor.address + source
        expected[target : target + size] = expected[source : source + size]
    launch.copy_runs(anchor, table)
    assert (array == expected).all()
