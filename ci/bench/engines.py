"""``kvsan bench engines``: how much of an installed engine's own speed is left when its answers are checked.

Each round takes specs as a campaign draws them (drawn before, not counted) and measures twice, in turn: the planner
and the views alone, in the engine's process; and from specs to findings, as a campaign does it, where the engine works
on the next spec while the last one is judged. The median of the rounds' ratios counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ...model.errors import SpecError, shown
from ...model.spec import CacheSpec
from ...sim.registry import resolve
from ...sim.rejection import Rejected
from ...sim.verdict import judge
from ..engines.comparison import EngineAllocator, begun_ahead
from ..engines.differential import drawn_specs
from ..engines.vllm import VllmAllocator

SPECS: Final = 500
SLICE: Final = 100
"""Specs of one round: short rounds meet the same load of the machine in both measurements."""
ROUNDS: Final = 40


class EngineBench(msgspec.Struct, frozen=True):
    """Specs per second of ``engine``: planner and views alone, checked one after another, and as a campaign does it.

    ``ratio`` is the last over the first; the project promises at least ``ratio_limit``.
    """

    allocator: str
    engine: str
    specs: int
    bare_per_second: float
    in_turn_per_second: float
    checked_per_second: float
    in_turn_ratio: float
    ratio: float
    ratio_limit: float = 0.4  # float: a ratio


def bench_engines(
    name: str = "vllm", rounds: int = ROUNDS, progress: Callable[[str], None] = lambda text: None
) -> EngineBench:
    """Measure the installed engine behind the allocator ``name``; raise ``SpecError`` where there is none."""
    allocator = resolve(name)
    if not isinstance(allocator, VllmAllocator):
        raise SpecError("allocator", f"found {shown(name)}, needs an allocator of the installed vLLM")
    return measure(allocator, rounds, progress)


def measure(
    allocator: VllmAllocator, rounds: int = ROUNDS, progress: Callable[[str], None] = lambda text: None
) -> EngineBench:
    """Measure one engine over ``rounds`` rounds."""
    engine = allocator.engine()
    specs = asked_specs(allocator)
    checked_seconds(allocator, specs)  # warm
    bare, in_turn, checked = [], [], []
    for number in range(rounds):
        first = number * SLICE % max(1, len(specs) - SLICE)
        part = specs[first : first + SLICE]
        count = len(part)
        bare.append(count / bare_seconds(allocator, part))  # path: a rate
        in_turn.append(count / in_turn_seconds(allocator, part))  # path: a rate
        checked.append(count / checked_seconds(allocator, part))  # path: a rate
        if number % 10 == 9:
            progress(f"{number + 1} of {rounds} rounds, the last {checked[-1]:.0f} specs/s over {bare[-1]:.0f}")
    return EngineBench(
        allocator=allocator.name,
        engine=engine,
        specs=len(specs),
        bare_per_second=statistics.median(bare),
        in_turn_per_second=statistics.median(in_turn),
        checked_per_second=statistics.median(checked),
        in_turn_ratio=statistics.median([one / base for one, base in zip(in_turn, bare, strict=True)]),  # path: a ratio
        ratio=statistics.median([one / base for one, base in zip(checked, bare, strict=True)]),  # path: a ratio
    )


def asked_specs(allocator: EngineAllocator) -> list[CacheSpec]:
    """Return the specs of one chunk of a campaign that the engine is asked for at all."""
    specs = []
    for spec in drawn_specs(allocator.drawn_as, 0, 0, SPECS):
        try:
            allocator.model(spec)
        except Rejected:
            continue
        specs.append(spec)
    return specs


def bare_seconds(allocator: VllmAllocator, specs: Sequence[CacheSpec]) -> float:
    """Return the seconds that the engine's planner and views alone take for ``specs``, by its own clock."""
    return float(allocator.process.ask({"bare": [allocator.request(spec) for spec in specs]})["bare"])


def in_turn_seconds(allocator: EngineAllocator, specs: Sequence[CacheSpec]) -> float:
    """Return the seconds from specs to findings where each spec waits for the last one."""
    started = time.perf_counter()
    for spec in specs:
        judge(spec, allocator)
    return time.perf_counter() - started


def checked_seconds(allocator: EngineAllocator, specs: Sequence[CacheSpec]) -> float:
    """Return the seconds from specs to findings as a campaign does it."""
    started = time.perf_counter()
    for spec in begun_ahead(allocator, specs):
        judge(spec, allocator)
    return time.perf_counter() - started
