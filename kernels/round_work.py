"""``RoundWork``: one round of a batch, its tables on the device, and what reading memory back shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from ..model.errors import SpecError
from ..sim.arena import ByteView
from ..sim.arena.memory import PoolMemory
from ..sim.arena.pieces import Piece, pieces
from ..sim.arena.views import holds
from .plan import GUARD_BYTES, GUARD_NUMBER, Round, Target
from .probe import elements, launch
from .probe.launch import Tally
from .probe.rows import Row, placed, rows_of
from .seen import Misread

if TYPE_CHECKING:
    from .batch import Batch, Case

HOST_BYTES: Final = 1 << 16
"""Pools of at most so many bytes are also compared byte for byte on the host."""
MAX_SINGLE_CELLS: Final = 1 << 16
"""Cells that share bytes, and so are written one by one, of one owner at most."""


class RoundWork:
    """The tables of one round of a batch, and what they show."""

    def __init__(self, batch: Batch, members: list[Case], number: int) -> None:
        self.batch, self.members, self.number = batch, members, number
        self.device, self.anchor = batch.device, batch.anchor
        rounds = [(case, case.plan.rounds[number]) for case in members]
        self.where = [(case, owner) for case, work in rounds for owner in work.owners]
        targets = [(case, target) for case, work in rounds for target in work.targets]
        self.readers = batch.targets(targets)
        self.writers = [self.readers]
        if batch.ordered:
            single = [(case, each) for case, target in targets for each in single_cells(target)]
            self.writers = [batch.targets([one]) for one in single]
        self.tally = launch.new_tally(self.device, len(self.where))
        self._second(rounds)
        self._pieces(rounds)
        self._folding()
        self.lost = [(case, table) for case in members for table, _ in case.plan.missing if number == 0]
        self.leads = batch.targets(
            [(case, target) for case in members for _, target in case.plan.missing if number == 0]
        )
        self.nobody = launch.new_tally(self.device, len(self.lost))
        self.small = [
            (case, pool, PoolMemory(case.plan.layout, case.plan.table, pool))
            for case in members
            for pool, held in enumerate(case.pools)
            if held.size_bytes <= HOST_BYTES and number < len(case.plan.table.rounds[pool])
        ]
        for case in members:
            case.seen.compared_on_host |= all(pool.size_bytes <= HOST_BYTES for pool in case.pools)

    def _second(self, rounds: list[tuple[Case, Round]]) -> None:
        rows: list[Row] = []
        for case, work in rounds:
            for each in work.elements:
                rows.append(
                    elements.element_rows(
                        each.offset_bytes,
                        each.pitch_bytes,
                        each.cells,
                        each.page,
                        each.first_number,
                        case.first_pool + each.pool,
                        len(rows),
                    )
                )
        self.elements = elements.ElementTable.upload(self.device, rows, self.batch.bases + self.anchor.address)
        self.second = launch.new_tally(self.device, len(rows))

    def _pieces(self, rounds: list[tuple[Case, Round]]) -> None:
        rows: list[Row] = []
        places: list[int] = []
        for case, work in rounds:
            for pool, piece in self._predicted(case, work):
                number = case.first_pool + pool
                rows.append((piece.offset, piece.count, piece.period, piece.size, piece.number, piece.step, number, 0))
                places.append(number)
            for pool, held in enumerate(case.pools):
                for start in (-GUARD_BYTES, held.size_bytes):
                    guard = ByteView(0, start, 0, 1, (), GUARD_BYTES)
                    rows.extend(rows_of(guard, range(1), case.first_pool + pool, GUARD_NUMBER, 0))
                    places.append(case.first_pool + pool)
        self.pieces = self.batch.rows(rows, places)
        self.whole = launch.new_tally(self.device, len(self.batch.bases))

    def _predicted(self, case: Case, work: Round) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces of all pools; when cells are written in order, shared bytes are predicted too."""
        if not self.batch.ordered:
            yield from work.pieces
            return
        for pool, held in enumerate(case.pools):
            for piece in pieces(case.plan.table, pool, held.size_bytes, self.number, contested=True):
                yield pool, piece

    def _folding(self) -> None:
        """Prepare one fold per pool that has this round."""
        self.folded = [
            (case, pool)
            for case in self.members
            for pool, rounds in enumerate(case.plan.table.rounds)
            if self.number < len(rounds)
        ]
        views = [
            (case.first_pool + pool, ByteView(0, 0, 0, 1, (), case.pools[pool].size_bytes))
            for case, pool in self.folded
        ]
        rows: list[Row] = []
        self.fold_places: list[int] = []
        for place, (pool, view) in enumerate(views):
            for row in rows_of(view, range(1), pool, 0, 0):
                rows.append(row)
                self.fold_places.append(place)
        self.folding = launch.Folding.upload(self.device, placed(rows, self.batch.bases, self.batch.sizes))
        self.folds: list[Any] = []

    def read(self, digit: int) -> None:
        """Read everything back after digit ``digit`` was written."""
        tally = launch.new_tally(self.device, len(self.where)) if self.batch.ordered else self.tally
        launch.verify(self.anchor, self.readers, digit, tally)
        elements.verify_elements(self.device, self.elements, digit, self.second.counts, self.second.lowest)
        launch.verify(self.anchor, self.pieces, digit, self.whole)
        launch.verify(self.anchor, self.leads, digit, self.nobody)
        folds = self.device.upload(np.zeros(max(1, len(self.folded)), dtype=np.int64))
        launch.fold(self.anchor, self.folding, folds)
        self.folds.append(folds)
        self._compare_on_host(digit)
        if self.batch.ordered:
            self._keep_misread(digit, tally)

    def _keep_misread(self, digit: int, tally: Tally) -> None:
        """Note the lowest byte that each owner misreads in this pass, and what it holds."""
        counts, lowest = tally.read()
        for place in np.flatnonzero(counts):
            case, owner = self.where[int(place)]
            targets = case.plan.rounds[self.number]
            target = targets.targets[targets.owners.index(owner)]
            pool = case.first_pool + target.pool
            byte = int(lowest[place] - self.batch.bases[pool])
            known = case.seen.owners[self.number].get(owner)
            if known is None or byte < known.byte:
                held = int(self.device.download(self.anchor.address + int(lowest[place]), 1)[0])
                slot = _cell_holding(target, byte, int(self.batch.sizes[pool]), held, digit)
                expected = (target.first_number + slot * target.step) >> (8 * digit) & 255
                case.seen.owners[self.number][owner] = Misread(byte, held, expected)

    def _compare_on_host(self, digit: int) -> None:
        """Compare small pools byte for byte with the arena; where bytes are shared, only when written in order."""
        waiting = [each for each in self.small if digit < each[0].plan.digits]
        bytes_held = self.device.download_many(
            [(case.pools[pool].base, case.pools[pool].size_bytes) for case, pool, _ in waiting]
        )
        for (case, pool, memory), held in zip(waiting, bytes_held, strict=True):
            start = 0
            for chunk in memory.predicted(self.number, digit):
                unlike = np.flatnonzero(held[start : start + chunk.size] != chunk)
                if unlike.size:
                    byte = start + int(unlike[0])
                    case.seen.mismatches.append((pool, byte, int(held[byte]), int(chunk[unlike[0]])))
                    break
                start += chunk.size

    def report(self) -> None:
        """Enter into each case what the tallies and folds of the round show."""
        self._report_owners()
        counts, lowest = self.whole.read()
        for case in self.members:
            for pool in range(len(case.pools)):
                place = case.first_pool + pool
                if counts[place]:
                    byte = int(lowest[place] - self.batch.bases[place])
                    case.seen.mismatches.append((pool, byte, -1, -1))
        for index in np.flatnonzero(self.nobody.read()[0]):
            case, table = self.lost[int(index)]
            case.seen.missing.append(table)
        for digit, folds in enumerate(self.folds):
            values = folds.cpu().numpy()
            by_place = {place: int(values[row]) % (1 << 64) for row, place in enumerate(self.fold_places)}
            for place, (case, pool) in enumerate(self.folded):
                if digit < case.plan.digits:
                    case.seen.folds[pool, self.number, digit] = by_place.get(place, 0)

    def _report_owners(self) -> None:
        """Enter who misread, and where the second pair of eyes disagrees about that."""
        second_counts, second_lowest = self.second.read()
        if self.batch.ordered:
            differ = [
                bool(second_counts[place]) != (owner in case.seen.owners[self.number])
                for place, (case, owner) in enumerate(self.where)
            ]
        else:
            counts, lowest = self.tally.read()
            for index in np.flatnonzero(counts):
                case, owner = self.where[int(index)]
                case.seen.owners[self.number][owner] = Misread(-1, -1, -1)
            both = (counts != 0) & (second_counts != 0)
            elsewhere = both & (lowest != second_lowest - self.anchor.address)
            differ = (((counts != 0) != (second_counts != 0)) | elsewhere).tolist()
        for (case, owner), unlike in zip(self.where, differ, strict=True):
            if unlike:
                case.seen.second.append((self.number, owner))


def single_cells(target: Target) -> Iterator[Target]:
    """Yield ``target`` cell by cell where its cells share bytes, whole where they do not.

    Raises ``SpecError`` where it has more than ``MAX_SINGLE_CELLS`` of them.
    """
    if target.view.cells_apart:
        yield target
        return
    if len(target.cells) > MAX_SINGLE_CELLS:
        raise SpecError(
            "layout",
            f"found a view of {len(target.cells)} slots that share bytes, needs at most {MAX_SINGLE_CELLS} to replay",
        )
    for cell in target.cells:
        yield msgspec.structs.replace(target, cells=range(cell, cell + 1))


def _cell_holding(target: Target, byte: int, size_bytes: int, held: int, digit: int) -> int:
    """Return a cell of ``target`` that contains ``byte`` and should not have held what it held."""
    cells = holds(target.view, size_bytes, byte)
    wrong = [cell for cell in cells if (target.first_number + cell * target.step) >> (8 * digit) & 255 != held]
    return min(wrong or cells)
