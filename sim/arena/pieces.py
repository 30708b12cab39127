"""Pieces: a pool cut into runs of bytes of one owner each, and what every byte of them must hold.

The prediction for memory that is too large to be predicted byte by byte: owners that step by the same pitch give one
template per period, and a template's runs repeat. Together with the padding between them (number 0) the pieces cover
the pool without gap or overlap. They are found by sorting runs, not by writing through strides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

from ...model.errors import SpecError
from .owners import OwnerTable
from .views import ByteView

MAX_RUNS: Final = 1 << 20
"""Runs that the templates of a pool may have; a pool with more is refused."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """``count`` runs of ``size`` bytes, ``period`` bytes apart; run k belongs to number ``number + k * step``."""

    offset: int
    size: int
    period: int
    count: int
    number: int
    step: int

    @property
    def view(self) -> ByteView:
        """The runs as cells (of pool 0) without axes."""
        return ByteView(0, self.offset, self.period, self.count, (), self.size)


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """Cells of one owner: ``pitch`` is not negative, ``order`` says who writes later."""

    start: int
    pitch: int
    count: int
    number: int
    step: int
    order: int
    view: ByteView

    @property
    def end(self) -> int:
        return self.start + (self.count - 1) * self.pitch + self.view.extent_bytes


_Run = tuple[int, int, int, int, int]
"""Start, end, number in the first period, step, order."""


def pieces(table: OwnerTable, pool: int, size_bytes: int, round_index: int, *, contested: bool) -> list[Piece]:
    """Return the pieces of ``pool`` (``size_bytes`` long) in a round, from its first byte to its last.

    Bytes that cells with different numbers share get the number of the later owner if ``contested``, else no piece.
    Raises ``SpecError`` where a pool has more than ``MAX_RUNS`` runs that do not repeat.
    """
    entries = []
    for order, stamp in enumerate(table.rounds[pool][round_index] if round_index < len(table.rounds[pool]) else ()):
        view = table.owners[stamp.owner].view
        cells = view.inside(size_bytes)
        if cells:
            entries.append(_entry(view, cells, stamp.first_number, order))
    found: list[Piece] = []
    end = 0
    for group in _components(entries):
        start = group[0].start
        if start > end:
            found.append(_padding(end, start))
        end = max(entry.end for entry in group)
        found.extend(_component(group, start, end, contested))
    if size_bytes > end:
        found.append(_padding(end, size_bytes))
    return found


def _padding(start: int, end: int) -> Piece:
    return Piece(start, end - start, end - start, 1, 0, 0)


def _entry(view: ByteView, cells: range, first_number: int, order: int) -> _Entry:
    number = first_number + cells.start
    if view.pitch_bytes < 0:
        last = len(cells) - 1
        return _Entry(view.start(cells[-1]), -view.pitch_bytes, len(cells), number + last, -1, order, view)
    return _Entry(view.start(cells[0]), view.pitch_bytes, len(cells), number, 1, order, view)


def _components(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """Yield groups of entries whose extents touch no other group's, from the lowest."""
    group: list[_Entry] = []
    end = 0
    for entry in sorted(entries, key=lambda each: each.start):
        if group and entry.start >= end:
            yield group
            group = []
        group.append(entry)
        end = max(end, entry.end)
    if group:
        yield group


def _component(group: list[_Entry], start: int, end: int, contested: bool) -> Iterator[Piece]:
    """Yield the pieces from ``start`` to ``end``, which are the first and last bytes of ``group``."""
    pitches = {entry.pitch for entry in group if entry.count > 1}
    period = pitches.pop() if len(pitches) == 1 else 0
    if period <= 0 or any((entry.start - start) % period + entry.view.extent_bytes > period for entry in group):
        # nothing repeats: every cell stands for itself
        period, group = end - start, _single_cells(group)
    bounds = {-(-(end - start) // period)}  # floor: up, the last period counts whole
    shifts = [(entry.start - start) // period for entry in group]  # floor: the period that the first cell lies in
    bounds.update(shifts)
    bounds.update([shift + entry.count for shift, entry in zip(shifts, group, strict=True)])
    bounds.add(max(bounds) - 1)  # the last period ends with its last byte
    for first, past in itertools.pairwise(sorted(bounds)):
        runs: list[_Run] = []
        for shift, entry in zip(shifts, group, strict=True):
            if shift <= first < shift + entry.count:
                inside = (entry.start - start) % period
                runs.extend(_runs(entry, inside, first - shift))
        origin = start + first * period
        limit = min(period, end - origin)
        for low, high, number, step in _disjoint(runs, limit, contested):
            yield Piece(origin + low, high - low, period, past - first, number, step)


def _single_cells(group: list[_Entry]) -> list[_Entry]:
    if sum(entry.count for entry in group) > MAX_RUNS:
        raise SpecError("layout", f"found pages that do not repeat, with more than {MAX_RUNS} cells in one pool")
    return [
        _Entry(entry.start + cell * entry.pitch, 0, 1, entry.number + cell * entry.step, 0, entry.order, entry.view)
        for entry in group
        for cell in range(entry.count)
    ]


def _runs(entry: _Entry, inside: int, cells_before: int) -> Iterator[_Run]:
    """Yield the runs of one cell that begins ``inside`` a period."""
    number = entry.number + cells_before * entry.step
    starts = [inside]
    for size, stride in entry.view.axes:
        if len(starts) * size > MAX_RUNS:
            raise SpecError("layout", f"found a page of more than {MAX_RUNS} runs of {entry.view.item_bytes} B")
        starts = [start + index * stride for start in starts for index in range(size)]
    for start in starts:
        yield start, start + entry.view.item_bytes, number, entry.step, entry.order


def _disjoint(runs: list[_Run], limit: int, contested: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, end, number, step) from 0 to ``limit`` in order, padding included."""
    ordered = sorted(runs)
    clash = any(after[0] < before[1] for before, after in itertools.pairwise(ordered))
    end = 0
    for low, high, number, step in _painted(runs, contested) if clash else [run[:4] for run in ordered]:
        if low > end:
            yield end, low, 0, 0
        if number >= 0:
            yield low, high, number, step
        end = high
    if limit > end:
        yield end, limit, 0, 0


def _painted(runs: list[_Run], contested: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield the runs that are left when later owners paint over earlier ones; number -1 marks what is left out."""
    bounds = np.unique(np.array([(run[0], run[1]) for run in runs], dtype=np.int64))
    winners = np.full(len(bounds), -1, dtype=np.int64)
    shared = np.zeros(len(bounds), dtype=np.bool_)
    identities = {value: index for index, value in enumerate(dict.fromkeys((run[2], run[3]) for run in runs))}
    by_identity = list(identities)
    # of one owner's cells the later one, which has the larger number, is painted later
    for low, high, number, step, _ in sorted(runs, key=lambda run: (run[4], run[2])):
        span = slice(int(np.searchsorted(bounds, low)), int(np.searchsorted(bounds, high)))
        mine = identities[number, step]
        shared[span] |= (winners[span] >= 0) & (winners[span] != mine)
        winners[span] = mine
    for index, (low, high) in enumerate(itertools.pairwise(bounds.tolist())):
        if winners[index] < 0:
            continue
        number, step = by_identity[int(winners[index])]
        yield (low, high, -1, 0) if shared[index] and not contested else (low, high, number, step)
