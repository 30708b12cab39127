"""``kvsan bench fuzz``: how soon the fuzzer finds each shipped fault, next to plain random sampling of such specs.

For every fault and seed a campaign runs until the fault's rule breaks, 20,000 examples at most, once with the
strategies as they are and once with every part of a spec drawn independently (no layer classes, no recipes). Examples
to find the fault are compared by the Vargha-Delaney A12: the chance that a guided run needs fewer examples than a plain
one, ties counting half. The failing spec is then reduced and compared with the known minimum.

Faults of transfers are searched for among drawn pairs, which have no plainer way of being drawn.

The price of judging is the last figure: examples per second of a campaign over those of drawing alone, same seeds, same
run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ...model.errors import SpecError
from ...model.spec import encode_spec
from ..campaign import Options, run_campaign
from ..determinism import CHUNK_EXAMPLES, chunk_seed, without_local_constants
from ..faults import FAULTS, Fault, fault_named
from ..transfer_campaign import run_pair_campaign
from ..transfer_faults import TRANSFER_FAULTS, TransferFault
from ..transfer_minima import pair_key

MAX_EXAMPLES: Final = 20_000
MAX_PAIRS: Final = 2_000
RATE_ALLOCATORS: Final = ("trtllm-v1", "trtllm-v2", "trtllm-v2-qsa-packed")
RATE_CHUNKS: Final = 4


class FaultBench(msgspec.Struct, frozen=True):
    """One fault over all seeds: medians of those that found it, the A12, and the reduced cases.

    ``found`` and ``found_plain`` count seeds; ``at_minimum`` those whose reduced case is the known minimum.
    """

    fault: str
    seeds: int
    found: int
    found_plain: int
    examples: float
    examples_plain: float
    seconds: float
    seconds_plain: float
    a12: float
    at_minimum: int
    size: int
    minimum_size: int


class TransferBench(msgspec.Struct, frozen=True):
    """One faulty transfer over all seeds, as ``FaultBench``: medians, and the reduced pairs."""

    fault: str
    seeds: int
    found: int
    examples: float
    seconds: float
    at_minimum: int
    size: int
    minimum_size: int


class RateBench(msgspec.Struct, frozen=True):
    """Examples per second of a campaign under ``allocator`` and of drawing its specs alone."""

    allocator: str
    campaign_per_second: float
    drawing_per_second: float
    ratio: float


class FuzzBench(msgspec.Struct, frozen=True):
    """All faults and rates; a ratio of at least 0.5 is what the project promises."""

    faults: list[FaultBench]
    rates: list[RateBench]
    transfers: list[TransferBench] = []
    ratio_limit: float = 0.5


def bench_fuzz(seeds: int, only: str | None, progress: Callable[[str], None] = lambda text: None) -> FuzzBench:
    """Measure every fault (or ``only`` one) over ``seeds`` seeds; raise ``SpecError`` for an unknown fault."""
    moved = [fault for fault in TRANSFER_FAULTS if only in (None, fault.name)]
    transfers = []
    for transfer in moved:
        transfers.append(_bench_transfer(transfer, seeds))
        progress(f"{transfer.name}: {transfers[-1].found} of {seeds} seeds, {transfers[-1].at_minimum} at the minimum")
    if only is not None and moved:
        return FuzzBench([], [], transfers)
    chosen = [fault for fault in FAULTS if fault.kind == "layout"] if only is None else [fault_named(only)]
    if any(fault.kind != "layout" for fault in chosen):
        raise SpecError("fault", f"{only} is no fault of a layout: its minimum is found by kvsan.ci.traces.find")
    faults = []
    for fault in chosen:
        faults.append(_bench_fault(fault, seeds))
        progress(f"{fault.name}: {faults[-1].found} of {seeds} seeds, {faults[-1].at_minimum} at the minimum")
    rates = []
    for allocator in RATE_ALLOCATORS if only is None else ():
        rates.append(_rate(allocator))
        progress(f"{allocator}: {rates[-1].ratio:.2f} of the drawing rate")
    return FuzzBench(faults, rates, transfers)


def a12(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the chance that a member of ``first`` is smaller than one of ``second``, ties counting half."""
    if not first or not second:
        raise SpecError("a12", "found an empty sample, needs at least one value on each side")
    wins = sum((one < other) + 0.5 * (one == other) for one in first for other in second)
    return wins / (len(first) * len(second))


class _Run(msgspec.Struct, frozen=True):
    examples: int
    seconds: float
    spec: bytes | None
    size: int


def _search(fault: Fault, seed: int, *, plain: bool) -> _Run:
    """Return how long one campaign took to break the fault's first rule; ``spec`` is the reduced case (guided only)."""
    rule = fault.rules[0]
    options = Options(allocator=fault.name, seed=seed, examples=MAX_EXAMPLES, stop_rule=rule, reduce=False, plain=plain)
    result = run_campaign(options)
    hit = next((entry for entry in result.faults if entry.rule == rule), None)
    if hit is None:
        return _Run(MAX_EXAMPLES + 1, result.seconds, None, 0)
    if plain:
        return _Run(hit.examples_to_find, result.seconds, encode_spec(hit.spec), hit.size)
    reduced = run_campaign(msgspec.structs.replace(options, reduce=True))
    case = next(entry for entry in reduced.faults if entry.rule == rule)
    return _Run(hit.examples_to_find, result.seconds, encode_spec(case.spec), case.size)


def _bench_fault(fault: Fault, seeds: int) -> FaultBench:
    guided = [_search(fault, seed, plain=False) for seed in range(seeds)]
    plain = [_search(fault, seed, plain=True) for seed in range(seeds)]
    minimum = encode_spec(fault.minimum)
    return FaultBench(
        fault=fault.name,
        seeds=seeds,
        found=sum(run.spec is not None for run in guided),
        found_plain=sum(run.spec is not None for run in plain),
        examples=statistics.median(run.examples for run in guided),
        examples_plain=statistics.median(run.examples for run in plain),
        seconds=statistics.median(run.seconds for run in guided),
        seconds_plain=statistics.median(run.seconds for run in plain),
        a12=a12([run.examples for run in guided], [run.examples for run in plain]),
        at_minimum=sum(run.spec == minimum for run in guided),
        size=max(run.size for run in guided),
        minimum_size=fault.size,
    )


def _bench_transfer(fault: TransferFault, seeds: int) -> TransferBench:
    """Return how soon campaigns over pairs break the fault's first rule, and how small its cases get."""
    rule = fault.rules[0]
    examples, seconds, pairs = [], [], []
    for seed in range(seeds):
        options = Options(allocator=fault.name, seed=seed, examples=MAX_PAIRS, stop_rule=rule, reduce=False)
        result = run_pair_campaign(options)
        hit = next((entry for entry in result.faults if entry.rule == rule), None)
        examples.append(MAX_PAIRS + 1 if hit is None else hit.examples_to_find)
        seconds.append(result.seconds)
        if hit is not None:
            reduced = run_pair_campaign(msgspec.structs.replace(options, reduce=True)).faults
            pairs.append(next(entry for entry in reduced if entry.rule == rule))
    return TransferBench(
        fault=fault.name,
        seeds=seeds,
        found=len(pairs),
        examples=statistics.median(examples),
        seconds=statistics.median(seconds),
        at_minimum=sum(pair_key(found.pair) <= pair_key(fault.minimum) for found in pairs),
        size=max((found.size for found in pairs), default=0),
        minimum_size=fault.size,
    )


def _rate(allocator: str) -> RateBench:
    """Return the rates of a campaign and of drawing alone, measured in turns on the same chunks."""
    campaign, drawing = [], []
    for seed in range(RATE_CHUNKS):
        start = time.perf_counter()
        result = run_campaign(Options(allocator=allocator, seed=seed, examples=CHUNK_EXAMPLES, reduce=False))
        campaign.append(result.examples / (time.perf_counter() - start))
        drawing.append(_drawing_rate(allocator, seed))
    campaign_rate, drawing_rate = statistics.median(campaign), statistics.median(drawing)
    return RateBench(allocator, campaign_rate, drawing_rate, campaign_rate / drawing_rate)


def _drawing_rate(allocator: str, number: int) -> float:
    """Return the examples per second of drawing one chunk's specs with an empty test."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from ...strategies.specs import specs_for

    count = 0

    @seed(chunk_seed(number, 0))
    @settings(
        max_examples=CHUNK_EXAMPLES,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(specs_for(allocator))
    def draw_one(_: object) -> None:
        nonlocal count
        count += 1

    start = time.perf_counter()
    with without_local_constants():
        draw_one()
    return count / (time.perf_counter() - start)
