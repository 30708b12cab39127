"""``find_fault``: draw traces until a fault of the table shows, and reduce what shows it.

    python -m kvsan.ci.traces.find 20 fault:free-at-output

prints one line for each seed from 0 to 19 (and each fault, all of them where none is named): what it took to find the
fault, and whether it was reduced to its known minimum.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from typing import Final

import msgspec

from ...sim.cache.names import layout_allocator
from ...sim.cache.run import run_trace
from ...sim.cache.trace import Trace
from ..determinism import chunk_seed, without_folder, without_local_constants
from ..faults import FAULTS, Fault, shows_trace
from .campaign import CHUNK_TRACES, STARTS
from .reducer import reduce_trace
from .simplicity import trace_key

MAX_TRACES: Final = 2_000


class FoundFault(msgspec.Struct, frozen=True):
    """The reduced trace, and how many traces and operations it took until the fault first showed."""

    trace: Trace
    traces: int
    operations: int
    seconds: float


def find_fault(fault: Fault, seed: int, *, max_traces: int = MAX_TRACES, reduce: bool = True) -> FoundFault | None:
    """Return what shows ``fault`` among the traces of ``seed``, None where none of ``max_traces`` does."""
    starts: list[Trace] = []
    traces = operations = first_trace = first_operation = 0
    begun, seconds = time.perf_counter(), 0.0  # float: a time
    for chunk in range(-(-max_traces // CHUNK_TRACES)):  # floor: rounded up by the two signs
        for trace in _drawn(layout_allocator(fault.name), seed, chunk):
            traces += 1
            verdict = run_trace(trace, fault.name)
            operations += verdict.done
            if any(rule in verdict.rules for rule in fault.rules):
                cut = msgspec.structs.replace(trace, operations=trace.operations[: verdict.done])
                if not starts:
                    first_trace, first_operation, seconds = traces, operations, time.perf_counter() - begun
                starts.append(cut)
                if len(starts) == (2 * STARTS if reduce else 1):
                    break
        if len(starts) == (2 * STARTS if reduce else 1):
            break
    if not starts:
        return None
    starts.sort(key=trace_key)
    if not reduce:
        return FoundFault(starts[0], first_trace, first_operation, seconds)
    reduced = reduce_trace(starts[0], lambda candidate: shows_trace(fault, candidate), *starts[1:]).trace
    return FoundFault(reduced, first_trace, first_operation, seconds)


@functools.lru_cache(maxsize=64)
def _drawn(allocator: str, number: int, chunk: int) -> tuple[Trace, ...]:
    """Return the traces of one chunk, as a campaign of that seed draws them for any fault of that allocator."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from ...strategies.traces import traces

    found: list[Trace] = []

    @seed(chunk_seed(number, chunk))
    @settings(
        max_examples=CHUNK_TRACES,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(traces(allocator))
    def keep(trace: Trace) -> None:
        found.append(trace)

    with without_local_constants(), without_folder(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keep()
    return tuple(found)


def main(arguments: list[str]) -> None:
    """Print what became of each seed and fault, seed by seed: all faults of one seed are given the same traces."""
    seeds, names = int(arguments[0]), arguments[1:]
    faults = [fault for fault in FAULTS if fault.kind == "trace" and (not names or fault.name in names)]
    for seed in range(seeds):
        for fault in faults:
            found = find_fault(fault, seed)
            if found is None:
                print(seed, fault.name, "not found", flush=True)
                continue
            size = len(found.trace.operations)
            end = "minimum" if found.trace == fault.trace else f"above the minimum of {fault.size}"
            print(
                seed,
                fault.name,
                f"{found.traces} traces, {found.operations} operations, size {size}: {end}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
