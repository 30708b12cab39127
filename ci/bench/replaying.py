"""``kvsan bench replay``: how fast layouts are replayed, against what the memory itself can do.

Measured in one run on one device:

- *bandwidth*: bytes that a pass must write or read over its time, for a pool of the reference case of many GiB, next
  to the bandwidth of a device-to-device copy of that run (bytes read plus bytes written);
- *throughput*: small fuzzed layouts per second, from decoded specs to findings, next to a view-by-view replay in torch.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings

from ...kernels.batch import Batch
from ...kernels.device import Device, open_device
from ...kernels.fitting import fitted, layout_bytes
from ...kernels.plan import plan_replay
from ...kernels.probe import elements, launch
from ...kernels.replay import Replayer
from ...kernels.round_work import RoundWork
from ...model.arithmetic import div_up
from ...model.spec import CacheSpec, decode_spec, encode_spec
from ...sim.checking import check
from ...sim.layout import Layout
from ...sim.registry import allocate
from ...sim.rejection import Rejected
from ...strategies import cache_specs
from .torch_replay import torch_replay

REPEATS: Final = 7
COPY_BYTES: Final = 8 << 30
"""Bytes of the copy that gives the ceiling, each read and written."""
SMALL_BYTES: Final = 1 << 20
"""Memory of a small layout at most."""


class Pass(msgspec.Struct, frozen=True):
    """One pass over the large pool: bytes that it must move, median milliseconds, GB/s, and GB/s over the ceiling's."""

    name: str
    bytes: int
    ms: float
    gb_per_s: float
    of_ceiling: float


class BandwidthBench(msgspec.Struct, frozen=True):
    """The passes over a pool of ``pool_bytes``, and the copy that they are measured against."""

    device: str
    pool_bytes: int
    slots: int
    views: int
    ceiling_gb_per_s: float
    passes: tuple[Pass, ...]


class ThroughputBench(msgspec.Struct, frozen=True):
    """Layouts per second of the replay and of the baseline, over the same specs."""

    device: str
    layouts: int
    mean_bytes: float
    findings: int
    per_second: float
    baseline_layouts: int
    baseline_findings: int
    baseline_per_second: float
    speedup: float


def timed(device: Device, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median seconds of ``work`` on ``device``, after one run that is not counted."""
    work()
    device.synchronize()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def copy_bandwidth(device: Device, size_bytes: int) -> float:
    """Return bytes read plus bytes written per second by a copy of ``size_bytes`` of random words."""

    source, target = (device.words(device.allocate(size_bytes), 4) for _ in range(2))
    source.random_()
    return 2 * size_bytes / timed(device, lambda: target.copy_(source))


def bench_bandwidth(
    spec: CacheSpec, allocator: str, pool_bytes: int, progress: Callable[[str], None], device_kind: str = "cuda"
) -> BandwidthBench:
    """Measure the passes on ``spec`` with as many slots as its largest pool needs to have ``pool_bytes``."""
    device = open_device(device_kind)
    progress("copy")
    ceiling = copy_bandwidth(device, min(COPY_BYTES, pool_bytes))
    release(device)
    layout = _layout_of(spec, allocator, pool_bytes)
    plan = plan_replay(layout)
    replayer = Replayer(device, max_bytes=1 << 50)
    batch = Batch(device, replayer.anchor, [plan])
    work = RoundWork(batch, batch.cases, 0)
    owned = sum(len(target.cells) * target.view.cell_bytes for target in plan.rounds[0].targets)
    whole = sum(pool.size_bytes for pool in layout.pools)
    passes = []
    folds = device.upload(_zeros(len(layout.pools)))
    for name, moved, run in (
        ("stamp", owned, lambda: launch.stamp(batch.anchor, work.readers, 0)),
        ("verify", owned, lambda: launch.verify(batch.anchor, work.readers, 0, work.tally)),
        ("whole pool", whole, lambda: launch.verify(batch.anchor, work.pieces, 0, work.whole)),
        ("clear", whole, batch.clear),
        ("fold", whole, lambda: launch.fold(batch.anchor, work.folding, folds)),
    ):
        progress(name)
        if name in ("verify", "whole pool", "fold"):
            batch.clear()
            launch.stamp(batch.anchor, work.readers, 0)
        seconds = timed(device, run)
        passes.append(_pass(name, moved, seconds, ceiling))
    progress("second reading")
    batch.clear()
    launch.stamp(batch.anchor, work.readers, 0)
    seconds = timed(
        device,
        lambda: elements.verify_elements(device, work.elements, 0, work.second.counts, work.second.lowest),
        1,
    )
    passes.append(_pass("second reading", owned, seconds, ceiling))
    wrong = [int(tally.read()[0].sum()) for tally in (work.tally, work.whole, work.second)]
    if any(wrong):
        raise RuntimeError(f"found {wrong} wrong bytes in the passes, needs none")
    largest = max(pool.size_bytes for pool in layout.pools)
    slots = max(pool.slot_count for pool in layout.pools)
    return BandwidthBench(device.name, largest, slots, len(plan.rounds[0].targets), ceiling / 1e9, tuple(passes))


def _pass(name: str, moved: int, seconds: float, ceiling: float) -> Pass:
    return Pass(name, moved, seconds * 1e3, moved / seconds / 1e9, moved / seconds / ceiling)


def _zeros(count: int) -> Any:
    import numpy as np

    return np.zeros(count, dtype=np.int64)


def _layout_of(spec: CacheSpec, allocator: str, pool_bytes: int) -> Layout:
    """Return the layout whose largest paged pool has at least ``pool_bytes``; states keep few slots."""
    one = allocate(msgspec.structs.replace(spec, slots=1, state_slots=1, quota_bytes=None), allocator)
    recurrent = {(cycle.manager, cycle.group) for cycle in one.life_cycles if cycle.recurrent}
    paged = [pool.slot_bytes for pool in one.pools if (pool.manager, pool.group) not in recurrent]
    slots = div_up(pool_bytes, max(paged))
    return allocate(msgspec.structs.replace(spec, slots=slots, state_slots=64, quota_bytes=None), allocator)


def release(device: Device) -> None:
    """Give memory that nothing holds back to the driver."""
    if device.kind == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()


def bench_throughput(
    specs: list[CacheSpec], allocator: str, progress: Callable[[str], None], device_kind: str = "cuda"
) -> ThroughputBench:
    """Measure layouts per second over ``specs``; refused specs count for neither side."""
    device = open_device(device_kind)
    texts = [encode_spec(spec) for spec in specs]
    gc.collect()
    gc.freeze()  # what the process has imported and drawn is no garbage, and need not be searched again and again
    replayer = Replayer(device, max_bytes=SMALL_BYTES, allocated=True)
    progress("warm-up")
    list(replayer.replay(_layouts(texts[:512], allocator)))
    progress("replay")
    start = time.perf_counter()
    results = [result for result in replayer.replay(_layouts(texts, allocator)) if result.refusal is None]
    seconds = time.perf_counter() - start
    progress("torch, view by view")
    few = texts[:: max(1, len(texts) // 256)]  # floor: about 256 of them, evenly spread
    torch_replay(device, _fitting(few[:16], allocator))
    start = time.perf_counter()
    compared, wrong = torch_replay(device, _fitting(few, allocator))
    baseline = time.perf_counter() - start
    return ThroughputBench(
        device=device.name,
        layouts=len(results),
        mean_bytes=statistics.mean(sum(pool.size_bytes for pool in result.layout.pools) for result in results),
        findings=sum(bool(result.findings) for result in results),
        per_second=len(results) / seconds,
        baseline_layouts=compared,
        baseline_findings=wrong,
        baseline_per_second=compared / baseline,
        speedup=len(results) / seconds / (compared / baseline),
    )


def sound_specs(count: int, allocator: str) -> list[CacheSpec]:
    """Return up to ``count`` drawn specs, the same ones every time, whose layouts are small and break no rule."""
    specs: list[CacheSpec] = []

    @seed(1)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cache_specs())
    def collect(spec: CacheSpec) -> None:
        try:
            layout = allocate(spec, allocator)
        except Rejected:
            return
        if layout_bytes(layout) <= SMALL_BYTES and not check(layout, allocated=True):
            specs.append(spec)

    collect()
    return specs


def _layouts(texts: list[bytes], allocator: str) -> Any:
    for text in texts:
        try:
            yield allocate(decode_spec(text), allocator)
        except Rejected:
            continue


def _fitting(texts: list[bytes], allocator: str) -> Any:
    from ...model.errors import SpecError

    for layout in _layouts(texts, allocator):
        try:
            yield fitted(layout, SMALL_BYTES).layout
        except SpecError:
            continue
