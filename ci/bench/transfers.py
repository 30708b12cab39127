"""``kvsan bench transfer``: the speed of transfers between two sets of pools, next to a plain copy of the same bytes.

All ranks of both sides are on one device. A request holds all slots, in shuffled order, and its blocks move by the plan
as a replay moves them; the plain copy is one of contiguous memory in the same run. Medians, of the copies alone: what
is to be copied was worked out before, as an engine would for many requests.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Final

import msgspec

from ...kernels.device import Device, open_device
from ...kernels.fitting import layout_bytes
from ...kernels.pools import allocate_pool
from ...kernels.transfers.carrying import Flat, prepare
from ...kernels.transfers.one_device import plain_copy_seconds
from ...model.errors import SpecError
from ...model.parallel import ParallelLayout
from ...model.spec import CacheSpec
from ...sim.layout import Layout
from ...sim.transfer.pair import lay_out
from ...sim.transfer.planning import plan_transfer

PAIRS: Final = (("tp1", "tp1"), ("tp1", "tep4"), ("tep4", "tp1"), ("tep4", "adp2"))
REPEATS: Final = 5


class TransferRate(msgspec.Struct, frozen=True):
    """One pair: copies of the plan, blocks of the request, bytes moved, both medians, and their ratio."""

    source: str
    destination: str
    copies: int
    blocks: int
    bytes: int
    ms: float
    plain_ms: float
    of_plain_copy: float


class TransferBenchmark(msgspec.Struct, frozen=True):
    """All pairs on one device."""

    device: str
    pairs: list[TransferRate]


def bench_transfers(
    spec: CacheSpec,
    allocator: str,
    max_bytes: int,
    device_kind: str,
    progress: Callable[[str], None] = lambda text: None,
) -> TransferBenchmark:
    """Measure ``PAIRS`` of ``spec``'s model in at most ``max_bytes`` of memory.

    Raises ``SpecError`` for a device that is not there, and where not even two slots of each pool fit.
    """
    device = open_device(device_kind)
    rates = []
    for names in PAIRS:
        rates.append(_rate(device, spec, allocator, names, max_bytes))
        progress(f"{names[0]} to {names[1]}: {rates[-1].of_plain_copy:.2f} of a plain copy")
    return TransferBenchmark(device.name, rates)


def _rate(device: Device, spec: CacheSpec, allocator: str, names: tuple[str, str], max_bytes: int) -> TransferRate:
    sides = _sides(spec, allocator, names, 2)
    each = sum(layout_bytes(layout) for side in sides for layout in side)
    blocks = min(512, 2 * max_bytes // (3 * each))  # floor: slots that fit, beside the two buffers of the plain copy
    if blocks < 2:
        raise SpecError("--memory", f"found {max_bytes} B, needs at least {3 * each} B")
    sides = _sides(spec, allocator, names, blocks)
    plan = plan_transfer(*sides)
    if plan.refusals:
        raise SpecError("--config", f"{names[0]} to {names[1]} is refused: {plan.refusals[0].message}")
    order = random.Random(20904)
    slots, flats = [], []
    for side in sides:
        slots.append({(_rank(layout), cycle): _shuffled(order, blocks) for layout in side for cycle in _cycles(layout)})
        pools = {(_rank(layout), number): pool for layout in side for number, pool in enumerate(layout.pools)}
        memory = {key: allocate_pool(device, pool) for key, pool in pools.items()}
        flats.append(
            {
                key: Flat(device.words(held.memory, 1), held.base - held.memory.address, held.size_bytes)
                for key, held in memory.items()
            }
        )
    prepared = prepare(plan.copies, (slots[0], slots[1]), flats[0], flats[1])
    times, size = [], 0
    for _ in range(REPEATS + 1):
        device.synchronize()
        start = time.perf_counter()
        size = prepared.run()
        device.synchronize()
        times.append(time.perf_counter() - start)
    seconds, plain = statistics.median(times[1:]), plain_copy_seconds(device, size, REPEATS)
    return TransferRate(*names, len(plan.copies), blocks, size, 1000 * seconds, 1000 * plain, plain / seconds)


def _sides(spec: CacheSpec, allocator: str, names: tuple[str, str], slots: int) -> list[tuple[Layout, ...]]:
    sides = []
    for name in names:
        parallel = ParallelLayout.parse(name)
        given = msgspec.structs.replace(
            spec, parallel=parallel, slots=slots, quota_bytes=None, state_slots=None, rank=0
        )
        sides.append(lay_out(given, 0, allocator))
    return sides


def _rank(layout: Layout) -> int:
    return 0 if layout.spec is None else layout.spec.rank


def _cycles(layout: Layout) -> range:
    return range(len(layout.life_cycles))


def _shuffled(order: random.Random, count: int) -> list[int]:
    slots = list(range(count))
    order.shuffle(slots)
    return slots
