"""``replay_transfer``: a plan carried out between two sets of pools on one device, every byte compared.

Each pool has an allocation of its own with guard zones. For each digit of the addresses the pools are filled, the plan
is carried out, and all bytes of the destination, guard zones and what was to be left alone included, are compared with
what the simulator predicts; those of the source with what they were. Then the probe kernels stamp the source's rows and
verify the destination's in place, where rows are few enough and no byte is expected to be wrong.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import msgspec
import numpy as np

from ...model.errors import SpecError
from ...sim.finding import Finding, Where
from ...sim.transfer.pair import PairVerdict
from ...sim.transfer.proof import Staging, stage
from ..device import Device
from ..plan import GUARD_BYTES, pool_memory_bytes
from ..pools import DevicePool, allocate_pool
from ..probe import launch
from ..probe.launch import Anchor, Uploaded
from ..probe.rows import Row, RowTable, placed
from .carrying import Flat, prepare
from .contents import CANARY, Octets, SourcePool, TargetPool, digits_of, source_pools, target_pools
from .rows import rows_of_rank

DEFAULT_MAX_BYTES: Final = 256 << 20
"""Memory in bytes that the pools of both sides take together at most, unless told otherwise."""


INTERPRETED_BYTES: Final = 1 << 20
"""Bytes moved up to which the probe kernels verify on a host, where an interpreter runs them."""


class Moved(msgspec.Struct, frozen=True):
    """What came of a replay: what memory and simulator disagree about, and what it took.

    ``bytes`` are those of one execution, ``seconds`` its median, ``plain_seconds`` that of one plain copy of as many
    bytes in the same run. ``rows_probed`` is 0 where the probe kernels did not verify.
    """

    findings: tuple[Finding, ...]
    bytes: int
    copies: int
    seconds: float
    plain_seconds: float
    rows_probed: int
    memory_bytes: int

    @property
    def ratio(self) -> float:
        """The speed of the transfer over that of a plain copy; 0 where nothing moved."""
        if not self.bytes or not self.seconds:
            return 0.0
        return self.plain_seconds / self.seconds  # path: none, a ratio of times


class Difference(msgspec.Struct, frozen=True):
    """Bytes of one pool that are not as predicted: how many, and the first of them with both values."""

    side: str
    rank: int
    pool: int
    count: int
    first_byte: int
    found: int
    needed: int

    @property
    def finding(self) -> Finding:
        """The difference as a finding."""
        return Finding(
            rule="replay-mismatch",
            message=f"{self.count} bytes of pool {self.pool} on the {self.side}'s rank {self.rank} are not as "
            f"predicted, first byte {self.first_byte}: found {self.found:#04x}, needs {self.needed:#04x}",
            remedy="report this pair: memory and simulator must agree on every byte",
            where=(Where(pool=self.pool, first_byte=self.first_byte),),
        )


def memory_needed(verdict: PairVerdict) -> int:
    """Return the bytes that the pools of both sides take with their guard zones."""
    layouts = (*verdict.source, *verdict.destination)
    return sum(pool_memory_bytes(pool.size_bytes) for layout in layouts for pool in layout.pools)


def require_memory(verdict: PairVerdict, max_bytes: int) -> int:
    """Return the memory of both sides; raise ``SpecError`` where it is more than ``max_bytes``."""
    needed = memory_needed(verdict)
    if needed > max_bytes:
        problem = f"the pools of both sides take {needed} B, needs at most {max_bytes} B"
        raise SpecError("--max-memory", f"{problem}: give more, or fewer tokens per block")
    return needed


def differences(side: str, pool: SourcePool | TargetPool, found: Octets, needed: Octets) -> list[Difference]:
    """Return what is different in one pool, of which all bytes are given: nothing, or one entry."""
    wrong = np.flatnonzero(found != needed)
    if not wrong.size:
        return []
    first = int(wrong[0])
    return [Difference(side, pool.rank, pool.pool, int(wrong.size), first, int(found[first]), int(needed[first]))]


def replay_transfer(device: Device, verdict: PairVerdict, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Moved:
    """Carry out the plan of ``verdict`` on ``device`` and compare every byte.

    Raises ``SpecError`` where both sides together need more than ``max_bytes``, and ``MemoryError`` from the device.
    """
    needed = require_memory(verdict, max_bytes)
    staging = stage(verdict.source, verdict.destination)
    replay = _Replay(device, verdict, staging)
    found: dict[tuple[str, int, int], Difference] = {}
    times, size = [], 0
    for digit in range(digits_of(staging)):
        replay.fill(digit)
        size, seconds = replay.move()
        times.append(seconds)
        for difference in replay.compare(digit):
            found.setdefault((difference.side, difference.rank, difference.pool), difference)
    quick = device.kind != "cpu" or size <= INTERPRETED_BYTES
    probed, misread = replay.probe() if quick and not found and verdict.status == "clean" else (0, [])
    return Moved(
        (*[difference.finding for difference in found.values()], *misread),
        size,
        len(verdict.plan.copies),
        statistics.median(times) if times else 0.0,
        plain_copy_seconds(device, size),
        probed,
        needed,
    )


class _Replay:
    """The pools of both sides in memory."""

    def __init__(self, device: Device, verdict: PairVerdict, staging: Staging) -> None:
        self.device, self.staging = device, staging
        copies = verdict.plan.copies
        self.sources = [pool for rank in staging.senders for pool in source_pools(staging, rank)]
        self.targets = [pool for rank in staging.receivers for pool in target_pools(staging, rank, copies)]
        ranks = (*staging.senders, *staging.receivers)
        self.memory = [allocate_pool(device, pool) for rank in ranks for pool in rank.layout.pools]
        flats = [_flat(device, pool) for pool in self.memory]
        count = len(self.sources)
        self.source = {(pool.rank, pool.pool): flat for pool, flat in zip(self.sources, flats[:count], strict=True)}
        self.target = {(pool.rank, pool.pool): flat for pool, flat in zip(self.targets, flats[count:], strict=True)}
        self.prepared = prepare(copies, staging.slots, self.source, self.target)

    def fill(self, digit: int) -> None:
        """Fill all pools for one digit, and their guard zones."""
        contents = [pool.filled(digit) for pool in self.sources] + [pool.before(digit) for pool in self.targets]
        for memory, octets in zip(self.memory, contents, strict=True):
            whole = np.full(memory.memory.size_bytes, CANARY, dtype=np.uint8)
            whole[GUARD_BYTES : GUARD_BYTES + octets.size] = octets
            self.device.write(memory.memory.address, whole)

    def move(self) -> tuple[int, float]:
        """Carry out the plan; return the bytes and the seconds."""
        self.device.synchronize()
        start = time.perf_counter()
        size = self.prepared.run()
        self.device.synchronize()
        return size, time.perf_counter() - start

    def compare(self, digit: int) -> list[Difference]:
        """Return which pools are not as predicted, their guard zones included."""
        found: list[Difference] = []
        wanted: list[tuple[str, SourcePool | TargetPool, Octets]]
        wanted = [("source", pool, pool.filled(digit)) for pool in self.sources]
        wanted += [("destination", pool, pool.after(digit)) for pool in self.targets]
        for memory, (side, pool, octets) in zip(self.memory, wanted, strict=True):
            held = self.device.download(memory.memory.address, memory.memory.size_bytes)
            whole = np.full(held.size, CANARY, dtype=np.uint8)
            whole[GUARD_BYTES : GUARD_BYTES + octets.size] = octets
            for each in differences(side, pool, held, whole):
                found.append(msgspec.structs.replace(each, first_byte=each.first_byte - GUARD_BYTES))
        return found

    def probe(self) -> tuple[int, list[Finding]]:
        """Stamp the source's rows, move, and verify the destination's; return the rows verified and what is wrong."""
        anchor = Anchor(self.device)
        stamped, first = self._rows(anchor, list(self.staging.senders), 0)
        verified, _ = self._rows(anchor, list(self.staging.receivers), first)
        if stamped is None or verified is None:
            return 0, []
        count = sum(part.row_count for part in verified)
        tally = launch.new_tally(self.device, count)
        for digit in range(digits_of(self.staging)):
            self.fill(0)
            launch.stamp(anchor, stamped, digit)
            self.move()
            launch.verify(anchor, verified, digit, tally)
        self.device.synchronize()
        wrong = int(np.count_nonzero(tally.read()[0]))
        if not wrong:
            return count, []
        message = f"the probe kernels misread {wrong} of {count} rows of the destination after the transfer"
        remedy = "report this pair: the rows of a clean transfer hold their logical addresses"
        return count, [Finding(rule="replay-mismatch", message=message, remedy=remedy)]

    def _rows(self, anchor: Anchor, ranks: list[Any], first: int) -> tuple[list[Uploaded] | None, int]:
        rows: list[Row] = []
        for rank in ranks:
            found = rows_of_rank(self.staging, rank, first)
            if found is None:
                return None, first
            rows += found
            first += len(rank.layout.pools)
        bases = np.array([pool.base - anchor.address for pool in self.memory], dtype=np.int64)
        sizes = np.array([pool.size_bytes for pool in self.memory], dtype=np.int64)
        return launch.upload(self.device, RowTable.build(placed(rows, bases, sizes))), first


def _flat(device: Device, pool: DevicePool) -> Flat:
    return Flat(device.words(pool.memory, 1), pool.base - pool.memory.address, pool.size_bytes)


def plain_copy_seconds(device: Device, size_bytes: int, repeats: int = 5) -> float:
    """Return the median time of one plain copy of ``size_bytes`` on ``device``."""
    if not size_bytes:
        return 0.0
    one, other = (device.allocate(size_bytes) for _ in range(2))
    source, target = device.words(one, 1), device.words(other, 1)
    times = []
    for _ in range(repeats + 1):
        device.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        device.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
