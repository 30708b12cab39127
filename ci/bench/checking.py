"""``kvsan bench check``: what a check costs next to drawing an example, and how its cost grows with layers.

Three ratios, each measured within one run on one machine:

- *check over draw*: from a validated spec of the reference case (48 layers) to findings, over one Hypothesis example
of 25 draws of
  ``integers(0, 15)`` in a composite strategy, generate phase only;
- *growth*: cost per layer at 4,800 layers over cost per layer at 48;
- *start*: ``kvsan check --json`` in a process of its own, over one that imports numpy, msgspec, typer and rich.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ...model.spec import CacheSpec
from ...sim.checking import check
from ...sim.registry import allocate, default_allocator

EXAMPLES: Final = 500
REPEATS: Final = 5
START_PAIRS: Final = 15
IMPORTS: Final = "import numpy, msgspec, typer, rich"


class CheckBench(msgspec.Struct, frozen=True):
    """Medians in milliseconds, the ratios that the project promises, and the most (``limit``) that each may be."""

    check_ms: float
    draw_ms: float
    check_over_draw: float
    check_over_draw_limit: float
    layer_us_at_48: float
    layer_us_at_4800: float
    growth: float
    growth_limit: float
    start_ms: float
    imports_ms: float
    start_over_imports: float
    start_over_imports_limit: float


def bench_check(config: Path, spec: CacheSpec, progress: Callable[[str], None] = lambda text: None) -> CheckBench:
    """Measure ``spec`` (loaded from ``config``) and return the medians and ratios; ``progress`` is told each step."""
    allocator = default_allocator(spec)
    large = msgspec.structs.replace(spec, layers=spec.layers * 100)
    progress("check and draw")
    draws, checks = [], []
    for _ in range(REPEATS):
        draws.append(_draw_seconds())
        checks.append(_check_seconds(spec, allocator, 100))
    progress("4,800 layers")
    larges = [_check_seconds(large, allocator, 2) for _ in range(REPEATS)]
    progress("process start")
    starts, imports = [], []
    for _ in range(START_PAIRS):
        imports.append(_process_seconds([sys.executable, "-c", IMPORTS]))
        starts.append(_process_seconds([sys.executable, "-m", "kvsan", "check", str(config), "--json"]))
    check_s, draw_s, large_s = (statistics.median(times) for times in (checks, draws, larges))
    start_s, import_s = statistics.median(starts), statistics.median(imports)
    per_layer, per_layer_large = check_s / len(spec.layers), large_s / len(large.layers)
    return CheckBench(
        check_ms=check_s * 1e3,
        draw_ms=draw_s * 1e3,
        check_over_draw=check_s / draw_s,
        check_over_draw_limit=1.0,
        layer_us_at_48=per_layer * 1e6,
        layer_us_at_4800=per_layer_large * 1e6,
        growth=per_layer_large / per_layer,
        growth_limit=2.0,
        start_ms=start_s * 1e3,
        imports_ms=import_s * 1e3,
        start_over_imports=start_s / import_s,
        start_over_imports_limit=3.0,
    )


def _check_seconds(spec: CacheSpec, allocator: str, times: int) -> float:
    """Return the seconds from a validated spec to its findings."""
    start = time.perf_counter()
    for _ in range(times):
        check(allocate(spec, allocator), allocated=True)
    return (time.perf_counter() - start) / times


def _draw_seconds() -> float:
    """Return the seconds that Hypothesis takes for one example of 25 draws, with an empty test."""
    from hypothesis import HealthCheck, Phase, given, settings, strategies

    @strategies.composite
    def draws(draw: strategies.DrawFn) -> list[int]:
        return [draw(strategies.integers(0, 15)) for _ in range(25)]

    count = 0

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(draws())
    def run(_: list[int]) -> None:
        nonlocal count
        count += 1

    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / count


def _process_seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start
