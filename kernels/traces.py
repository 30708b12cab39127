"""Traces on real memory: every write, copy and read of a running cache happens, in order, through the probe kernels.

The simulator runs the trace and records what it does to memory (``kvsan.sim.cache.records``); here the records are
carried out on one allocation per pool and one per host tier. A read whose bytes are not those of the owner that it
states, or a pool that at a marked point or at the end differs from the simulator's image, is a finding.

Neighbouring records go into one launch as long as their order cannot matter: they are of one kind and no byte is
touched by two of them, or they all read.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..sim.cache.cache import RunningCache
from ..sim.cache.managers import running_cache
from ..sim.cache.records import Record, digit_of
from ..sim.cache.refusal import Refused
from ..sim.cache.shadow import Shadow, image_of
from ..sim.cache.trace import Trace, words
from ..sim.finding import Finding, Where
from ..sim.registry import Allocator
from .device import Device
from .plan import GUARD_BYTES
from .pools import DevicePool
from .probe import launch
from .probe.launch import Anchor
from .probe.rows import COLUMNS, FIRST_NUMBER, ITEM, OFFSET, Integers, Row, RowTable, placed

FINDINGS_PER_RULE: Final = 20
MARK_EVERY: Final = 16
"""Operations after which the whole memory is compared with the simulator's image, besides at the end."""


class TraceReplayed(msgspec.Struct, frozen=True):
    """What memory says of one trace.

    ``digest`` is the BLAKE2b-128 of all bytes at the end of every pass; ``refused`` counts operations that the cache
    refused, ``size_bytes`` is the memory of pools and tiers,
    ``records`` what was carried out in each pass, ``marks`` the whole-memory comparisons.
    """

    digest: str
    findings: tuple[Finding, ...]
    refused: int
    size_bytes: int
    records: int
    launches: int
    marks: int


class _Mark(msgspec.Struct, frozen=True):
    """A point between records: how many come before, after which operation, and whose every byte is there."""

    records: int
    operation: int
    tags: NDArray[np.int64]


def replay_trace(
    device: Device, trace: Trace, allocator: str | Allocator, *, mark_every: int = MARK_EVERY
) -> TraceReplayed:
    """Carry ``trace`` out on ``device`` and return what memory says.

    Raises ``Rejected`` where the allocator refuses the spec, ``SpecError`` where traces cannot run on its layout.
    """
    cache = running_cache(trace.spec, allocator, record=True)
    refused, marks = _simulate(cache, trace, mark_every)
    recorded = cache.shadow.records or []
    owners = _owners(recorded)
    records = [
        msgspec.structs.replace(record, owner=int(np.searchsorted(owners, record.owner)) + 1)
        if record.kind in ("write", "read")
        else record
        for record in recorded
    ]
    digits = max(1, len(owners).bit_length() + 7 >> 3)
    memory = _TraceMemory(device, cache)
    groups = list(_groups(records, {mark.records for mark in marks}))
    findings: list[Finding] = []
    state = hashlib.blake2b(digest_size=16)
    for digit in range(digits):
        memory.clear()
        waiting = list(marks)
        for start, group in groups:
            findings.extend(memory.carry_out(group, digit, trace))
            while waiting and waiting[0].records <= start + len(group):
                findings.extend(memory.compare(waiting.pop(0), owners, digit, trace))
        for mark in waiting:
            findings.extend(memory.compare(mark, owners, digit, trace))
        memory.update(state, digit)
    launches, size = len(groups) * digits, int(memory.sizes.sum())
    return TraceReplayed(state.hexdigest(), _first(findings), refused, size, len(records), launches, len(marks))


def _simulate(cache: RunningCache, trace: Trace, mark_every: int) -> tuple[int, list[_Mark]]:
    """Run ``trace`` to its end; return the refusals, and the marks."""
    refused = 0
    marks = []
    for number, operation in enumerate(trace.operations):
        refused += isinstance(cache.apply(number, operation), Refused)
        if (number + 1) % mark_every == 0 or number + 1 == len(trace.operations):
            marks.append(_Mark(len(cache.shadow.records or []), number, cache.shadow.tags.copy()))
    return refused, marks


def _owners(records: list[Record]) -> NDArray[np.int64]:
    """Return the owner numbers of ``records`` in order; numbered anew from 1 on, fewer passes tell them apart."""
    return np.unique(np.array([record.owner for record in records if record.kind in ("write", "read")], dtype=np.int64))


def _groups(records: list[Record], cuts: set[int]) -> Iterator[tuple[int, list[Record]]]:
    """Yield (number of the first record, records) whose order cannot matter; none goes past a number in ``cuts``."""
    group: list[Record] = []
    touched = _Touched()
    for number, record in enumerate(records):
        kind = "store" if record.kind in ("write", "fill") else record.kind
        same = bool(group) and kind == ("store" if group[0].kind in ("write", "fill") else group[0].kind)
        if group and (not same or number in cuts or (kind != "read" and touched.meets(record))):
            yield number - len(group), group
            group, touched = [], _Touched()
        group.append(record)
        touched.add(record)
    if group:
        yield len(records) - len(group), group


class _Touched:
    """Runs of bytes that a group touches, in order of their place."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def meets(self, record: Record) -> bool:
        """Whether ``record`` touches a byte that the group has touched."""
        return any(self._holds(*run) for run in _touched_by(record))

    def add(self, record: Record) -> None:
        for space, pool, start, end in _touched_by(record):
            bisect.insort(self.runs.setdefault((space, pool), []), (start, end))

    def _holds(self, space: str, pool: int, start: int, end: int) -> bool:
        runs = self.runs.get((space, pool), [])
        place = bisect.bisect_left(runs, (start, start))
        after = place < len(runs) and runs[place][0] < end
        return after or (place > 0 and runs[place - 1][1] > start)


def _touched_by(record: Record) -> Iterator[tuple[str, int, int, int]]:
    yield record.space, record.pool, record.offset_bytes, record.offset_bytes + record.bytes
    if record.kind == "copy":
        start = record.source_offset_bytes
        yield record.source_space, record.source_pool, start, start + record.bytes


class _TraceMemory:
    """One allocation for every pool and every host tier, all addressed from one anchor."""

    def __init__(self, device: Device, cache: RunningCache) -> None:
        self.device = device
        self.anchor = Anchor(device)
        self.geometry = cache.geometry
        empty = Shadow(cache.geometry).image()
        self.keys = list(empty)
        self.start = [empty[key] for key in self.keys]
        self.pools = [self._pool(space, held.size) for (space, _), held in zip(self.keys, self.start, strict=True)]
        self.bases: Integers = np.array([pool.base - self.anchor.address for pool in self.pools], dtype=np.int64)
        self.sizes: Integers = np.array([pool.size_bytes for pool in self.pools], dtype=np.int64)
        self.numbers = {key: number for number, key in enumerate(self.keys)}

    def _pool(self, space: str, size_bytes: int) -> DevicePool:
        """Return a pool, or a host tier in memory of the host, so that offloading really leaves the device."""
        allocate = self.device.allocate if space == "device" else self.device.allocate_host
        memory = allocate(size_bytes + 2 * GUARD_BYTES)
        return DevicePool(memory, memory.address + GUARD_BYTES, size_bytes)

    def clear(self) -> None:
        """Bring memory to what it holds before the first operation."""
        for pool, held in zip(self.pools, self.start, strict=True):
            self.device.write(pool.base, held)

    def carry_out(self, group: list[Record], digit: int, trace: Trace) -> Iterator[Finding]:
        """Do what ``group`` says in one launch; yield reads that find other bytes."""
        if group[0].kind == "copy":
            launch.copy_runs(self.anchor, self._copies(group))
            return
        table = placed([self._row(record) for record in group], self.bases, self.sizes)
        rows = launch.upload(self.device, RowTable.build(table))
        if group[0].kind != "read":
            launch.stamp(self.anchor, rows, digit)
            return
        tally = launch.new_tally(self.device, len(group))
        launch.verify(self.anchor, rows, digit, tally)
        counts, lowest = tally.read()
        for index in np.flatnonzero(counts):
            record = group[int(index)]
            byte = int(lowest[index] - self.bases[self.numbers[record.space, record.pool]])
            yield self._misread(record, byte, digit, trace)

    def _row(self, record: Record) -> Row:
        # a fill has the same byte in every pass
        number = record.owner * 0x0101010101010101 >> 8 if record.kind == "fill" else record.owner
        return (record.offset_bytes, 1, 0, record.bytes, number, 0, self.numbers[record.space, record.pool], 0)

    def _copies(self, group: list[Record]) -> Integers:
        table: Integers = np.zeros((len(group), COLUMNS), dtype=np.int64)
        for row, record in zip(table, group, strict=True):
            source = self.bases[self.numbers[record.source_space, record.source_pool]] + record.source_offset_bytes
            row[OFFSET] = self.bases[self.numbers[record.space, record.pool]] + record.offset_bytes
            row[ITEM], row[FIRST_NUMBER] = record.bytes, source
        return table

    def _misread(self, record: Record, byte: int, digit: int, trace: Trace) -> Finding:
        held = int(self.device.download(self.pools[self.numbers[record.space, record.pool]].base + byte, 1)[0])
        return Finding(
            rule="freshness",
            message=f"operation {record.operation} ({words(trace.operations[record.operation])}) reads {held} in byte "
            f"{byte} of {record.space} pool {record.pool}, where its owner had written "
            f"{digit_of(record.owner, digit)}",
            remedy="let every read go to a page that its owner has written, and keep that page until the read is done",
            where=(Where(pool=record.pool, first_byte=byte, last_byte=byte),),
        )

    def compare(self, mark: _Mark, owners: NDArray[np.int64], digit: int, trace: Trace) -> Iterator[Finding]:
        """Yield the first byte of every pool and tier that differs from the simulator's image."""
        numbers = np.where(mark.tags < 0, mark.tags, np.searchsorted(owners, mark.tags) + 1)
        for (key, expected), held in zip(image_of(self.geometry, numbers, digit).items(), self._held(), strict=True):
            unlike = np.flatnonzero(held != expected)
            if unlike.size:
                byte = int(unlike[0])
                yield Finding(
                    rule="replay-mismatch",
                    message=f"after operation {mark.operation} ({words(trace.operations[mark.operation])}) byte {byte} "
                    f"of {key[0]} pool {key[1]} holds {int(held[byte])}, and the simulator says {int(expected[byte])}",
                    remedy="report this case: the simulator and the memory it was replayed on disagree",
                    where=(Where(pool=key[1], first_byte=byte, last_byte=byte),),
                )

    def _held(self) -> list[NDArray[np.uint8]]:
        return self.device.download_many([(pool.base, pool.size_bytes) for pool in self.pools])

    def update(self, state: hashlib.blake2b, digit: int) -> None:
        """Add all bytes to a digest."""
        for (space, pool), held in zip(self.keys, self._held(), strict=True):
            state.update(f"{space} {pool} {held.size} {digit}\n".encode())
            state.update(held.tobytes())


def _first(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return at most ``FINDINGS_PER_RULE`` findings of each rule, each message once."""
    kept: dict[str, list[Finding]] = {}
    for finding in dict.fromkeys(findings):
        rule = kept.setdefault(finding.rule, [])
        if len(rule) < FINDINGS_PER_RULE:
            rule.append(finding)
    return tuple([finding for rule in kept.values() for finding in rule])
