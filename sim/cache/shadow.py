"""``Shadow``: who owns every byte of a running cache.

A tag per byte says what was written there last: ``event << 16 | target``, where an event is one token of one beam of
one request written by one step, and a target one role of one layer. Negative tags are poison: fresh pages, freed pages,
pages that the cache itself cleared, and guard bytes between pools.

Whoever reads states the event of every token that it believes to find, and a byte with any other tag is a finding of
rule ``freshness``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..finding import Finding, Where
from .geometry import CycleGeometry, Geometry, Indices
from .records import CLEARED_BYTE, FREED_BYTE, FRESH_BYTE, Memory, Record, Space

FRESH: Final = -1
FREED: Final = -2
CLEARED: Final = -3
GUARD: Final = -4
TARGET_BITS: Final = 16
_POISON: Final = {
    FRESH: "a fresh page that nobody has written",
    FREED: "a freed page",
    CLEARED: "a page that was cleared and not written since",
    GUARD: "no pool at all",
}
_POISON_BYTES: Final = {FRESH: FRESH_BYTE, FREED: FREED_BYTE, CLEARED: CLEARED_BYTE, GUARD: 0}


class Event(NamedTuple):
    """One token: who wrote it, and ``content``, the number of the tokens up to it."""

    request: int
    beam: int
    position: int
    step: int
    content: int


class Shadow:
    """The tags of all bytes of ``geometry``, the events behind them, and the findings so far.

    ``operation`` is the number of the operation under way. With ``record`` every access is kept in ``records``.
    """

    def __init__(self, geometry: Geometry, *, record: bool = False) -> None:
        self.geometry = geometry
        self.tags: NDArray[np.int64] = np.full(geometry.size_bytes, GUARD, dtype=np.int64)
        for group in geometry.groups:
            self.tags[group.device] = FRESH
            self.tags[group.host] = FRESH
        self.events: list[Event] = [Event(-1, 0, -1, -1, 0)]
        self.findings: list[Finding] = []
        self.broken: set[str] = set()
        self.operation = 0
        self.records: list[Record] | None = [] if record else None

    def report(self, rule: str, message: str, remedy: str, where: tuple[Where, ...] = ()) -> None:
        """Keep the first finding of every rule: what follows a broken one is mostly its consequence."""
        if rule not in self.broken:
            self.broken.add(rule)
            self.findings.append(Finding(rule=rule, message=message, remedy=remedy, where=where))

    def event(self, event: Event) -> int:
        """Return the number of a new event."""
        self.events.append(event)
        return len(self.events) - 1

    def fill(self, rows: Indices, poison: int) -> None:
        """Poison the bytes of a slot."""
        self.tags[rows] = poison
        if self.records is not None:
            self._record("fill", rows, np.full(rows.size, _POISON_BYTES[poison]))

    def clear(self, start: int, count: int) -> None:
        """Clear ``count`` bytes from flat index ``start``."""
        self.tags[start : start + count] = CLEARED
        if self.records is not None:
            rows = np.arange(start, start + count, dtype=np.intp)
            self._record("fill", rows, np.full(count, CLEARED_BYTE))

    def write(self, cycle: CycleGeometry, codes: Sequence[int], events: Sequence[int]) -> None:
        """Write tokens through the address of their consumers: token ``codes[i]`` becomes event ``events[i]``."""
        rows = cycle.write[codes]
        tags = (np.array(events, dtype=np.int64) << TARGET_BITS)[:, None] | cycle.write_cells
        if not cycle.inside:
            kept = rows > 0
            if not kept.all():
                self._report_outside(cycle, rows)
            rows, tags = rows[kept], tags[kept]
        self.tags[rows] = tags
        if self.records is not None:
            self._record("write", rows, tags, "writer")

    def read(self, cycle: CycleGeometry, codes: Sequence[int], events: Sequence[int], reader: str) -> None:
        """Read tokens through their views, and report the first byte that is not of the event stated."""
        rows = cycle.read[codes]
        found = self.tags[rows]
        wanted = (np.array(events, dtype=np.int64) << TARGET_BITS)[:, None] | cycle.read_cells
        if self.records is not None:
            self._record("read", rows, wanted, "reader")
        if not np.array_equal(found, wanted):
            self._report_stale(cycle, rows, found, wanted, reader)

    def copy(self, source: Indices, target: Indices) -> None:
        """Copy bytes with their tags; all are read before any is written."""
        self.tags[target] = self.tags[source]
        if self.records is not None:
            self._record_copy(source, target)

    def image(self, digit: int = 0) -> Memory:
        """Return what memory must hold now, by pool and host group: the digit of each byte's owner number, or poison.

        Guard bytes between pools are left out; a byte of a pool that no slot reaches is 0.
        """
        return image_of(self.geometry, self.tags, digit)

    def place(self, flat: int) -> tuple[Space, int, int]:
        """Return the space, pool and byte offset in it of a flat index."""
        if flat >= self.geometry.host_start:
            for index, group in enumerate(self.geometry.groups):
                if group.host[0, 0] <= flat <= group.host[-1, -1]:
                    return "host", index, int(flat - group.host[0, 0])
        starts = self.geometry.pool_starts
        pool = max(index for index, start in enumerate(starts) if start <= max(flat, starts[0]))
        return "device", pool, int(flat - starts[pool])

    def owner_name(self, tag: int) -> str:
        """Return how a message calls the owner of a byte."""
        if tag < 0:
            return _POISON.get(tag, "poison")
        event, target = self.events[tag >> TARGET_BITS], self.geometry.targets[tag & (1 << TARGET_BITS) - 1]
        role = f"layer {target.layer}'s {target.role}"
        if event.request < 0:
            return f"{role} of a padding row"
        return (
            f"{role} of request {event.request}, beam {event.beam}, position {event.position}, written by step "
            f"{event.step}"
        )

    def _report_outside(self, cycle: CycleGeometry, rows: Indices) -> None:
        column = int(np.argwhere(rows <= 0)[0][1])
        target = self.geometry.targets[int(cycle.write_cells[column])]
        self.report(
            "bounds",
            f"the consumer that writes layer {target.layer}'s {target.role} reaches bytes outside of its pool",
            "derive the consumer's address from the storage",
            (Where(layer=target.layer, role=target.role),),
        )

    def _report_stale(
        self,
        cycle: CycleGeometry,
        rows: Indices,
        found: NDArray[np.int64],
        wanted: NDArray[np.int64],
        reader: str,
    ) -> None:
        row, column = (int(index) for index in np.argwhere(found != wanted)[0])
        target = self.geometry.targets[int(cycle.read_cells[column])]
        _, pool, byte = self.place(int(rows[row, column]))
        self.report(
            "freshness",
            f"{reader} reads byte {byte} of pool {pool} for {self.owner_name(int(wanted[row, column]))}, and finds "
            f"{self.owner_name(int(found[row, column]))}",
            "let every read go to a page that its owner has written, and keep that page until the read is done",
            (Where(layer=target.layer, role=target.role, pool=pool, first_byte=byte, last_byte=byte),),
        )

    def _record(self, kind: str, rows: Indices, values: NDArray[np.int64], view: str = "storage") -> None:
        """Append a record for every run of neighbouring bytes with one value."""
        flat, owners = rows.ravel(), values.ravel()
        for first, end in _runs(flat, owners):
            space, pool, offset = self.place(int(flat[first]))
            self._append(kind, space, pool, offset, end - first, int(owners[first]), view)

    def _append(self, kind: str, space: Space, pool: int, offset: int, count: int, owner: int, view: str) -> None:
        if self.records is not None:
            self.records.append(
                Record(self.operation, kind, space, pool, offset, count, owner, view)  # type: ignore[arg-type]
            )

    def _record_copy(self, source: Indices, target: Indices) -> None:
        from_flat, to_flat = source.ravel(), target.ravel()
        for first, end in _runs(to_flat, from_flat - to_flat):
            space, pool, offset = self.place(int(to_flat[first]))
            taken = self.place(int(from_flat[first]))
            record = Record(self.operation, "copy", space, pool, offset, end - first, 0, "storage", *taken)
            if self.records is not None:
                self.records.append(record)


def image_of(geometry: Geometry, tags: NDArray[np.int64], digit: int) -> Memory:
    """Return what memory holds where its bytes have ``tags``: their digit, or poison where a tag is negative."""
    values = (tags >> np.int64(8 * digit)) & 0xFF
    for poison, byte in _POISON_BYTES.items():
        values[tags == poison] = byte
    flat = values.astype(np.uint8)
    memory: Memory = {}
    for index, pool in enumerate(geometry.layout.pools):
        start = geometry.pool_starts[index]
        memory["device", index] = flat[start : start + pool.size_bytes].copy()
    for index, group in enumerate(geometry.groups):
        memory["host", index] = flat[group.host].ravel().copy()
    return memory


def _runs(flat: Indices, values: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return (first, end) of every run of ascending neighbours in ``flat`` with one value."""
    if flat.size == 0:
        return []
    breaks = np.flatnonzero((np.diff(flat) != 1) | (np.diff(values) != 0)) + 1
    edges = [0, *breaks.tolist(), flat.size]
    return list(itertools.pairwise(edges))
