"""``kvsan bench traces``: what the simulator costs per operation, next to what Hypothesis needs to draw one.

Each round draws a chunk of traces with a test that only keeps them, then runs them; the median of the rounds' ratios
counts.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Final

import msgspec

from ...sim.cache.run import run_trace
from ...sim.cache.trace import Trace
from ..determinism import chunk_seed, without_folder, without_local_constants

TRACE_ALLOCATORS: Final = ("trtllm-v1", "trtllm-v2", "trtllm-v2-qsa-packed")
TRACES: Final = 40
ROUNDS: Final = 5


class TraceRate(msgspec.Struct, frozen=True):
    """Microseconds per operation of drawing and of running, over ``operations`` operations, and their ratio."""

    allocator: str
    operations: int
    draw_us: float
    run_us: float
    ratio: float


class TraceBench(msgspec.Struct, frozen=True):
    """One rate per allocator; a ratio of at most ``ratio_limit`` is what the project promises."""

    rates: list[TraceRate]
    ratio_limit: float = 0.5  # float: a ratio


def bench_traces(rounds: int = ROUNDS, progress: Callable[[str], None] = lambda text: None) -> TraceBench:
    """Measure every allocator of ``TRACE_ALLOCATORS`` over ``rounds`` rounds."""
    rates = []
    for allocator in TRACE_ALLOCATORS:
        rates.append(_rate(allocator, rounds))
        progress(f"{allocator}: {rates[-1].ratio:.2f} of the time to draw an operation")
    return TraceBench(rates)


def _rate(allocator: str, rounds: int) -> TraceRate:
    total = 0
    draws, runs = [], []
    for number in range(rounds):
        traces: list[Trace] = []
        start = time.perf_counter()
        _draw(allocator, number, traces)
        drawn = time.perf_counter()
        for trace in traces:
            run_trace(trace, allocator)
        ran = time.perf_counter()
        operations = sum(len(trace.operations) for trace in traces)
        total += operations
        draws.append((drawn - start) * 1e6 / operations)  # path: microseconds, no size
        runs.append((ran - drawn) * 1e6 / operations)  # path: microseconds, no size
    ratio = statistics.median([run / draw for run, draw in zip(runs, draws, strict=True)])  # path: a ratio of times
    return TraceRate(allocator, total, statistics.median(draws), statistics.median(runs), ratio)


def _draw(allocator: str, number: int, traces: list[Trace]) -> None:
    """Draw one chunk of traces into ``traces``."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from ...strategies.traces import traces as strategy

    @seed(chunk_seed(number, 0))
    @settings(
        max_examples=TRACES,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy(allocator))
    def keep(trace: Trace) -> None:
        traces.append(trace)

    with without_local_constants(), without_folder(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keep()
