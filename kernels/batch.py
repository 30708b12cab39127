"""One batch: the plans of many layouts carried out together on one device, with few launches.

In the quick way all owners of all layouts write in one launch per digit, in no particular order, which is enough to
know that nothing is wrong. Where something is, ``ordered`` carries the plan out again: one owner after the other,
cells that share bytes one by one, so that the later writer wins on every device alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from ..sim.arena import ByteView
from .device import Device
from .plan import GUARD_BYTES, GUARD_NUMBER, Plan, Target
from .pools import DevicePool, allocate_pool
from .probe import launch
from .probe.launch import Anchor, Uploaded
from .probe.rows import Integers, Row, RowTable, placed, rows_of
from .round_work import RoundWork
from .seen import Seen


class Case(msgspec.Struct):
    """A plan, its pools, and the number of its first pool in the batch."""

    plan: Plan
    first_pool: int
    pools: list[DevicePool]
    seen: Seen


class Batch:
    """Plans with their memory on a device; released with the object."""

    def __init__(self, device: Device, anchor: Anchor, plans: list[Plan], *, ordered: bool = False) -> None:
        self.device = device
        self.anchor = anchor
        self.ordered = ordered
        self.cases: list[Case] = []
        first = 0
        for plan in plans:
            pools = [allocate_pool(device, pool) for pool in plan.layout.pools]
            seen = Seen([{} for _ in plan.rounds], [], [], [], {}, [])
            self.cases.append(Case(plan, first, pools, seen))
            first += len(pools)
        flat = [pool for case in self.cases for pool in case.pools]
        self.bases: Integers = np.array([pool.base - anchor.address for pool in flat], dtype=np.int64)
        self.sizes: Integers = np.array([pool.size_bytes for pool in flat], dtype=np.int64)
        self.cleared = self.rows([row for number in range(len(flat)) for row in self._clear_rows(number)])

    def run(self) -> list[Seen]:
        """Carry everything out and return what was seen, in the order of the plans."""
        for number in range(max([len(case.plan.rounds) for case in self.cases], default=0)):
            self._round(number)
        if not self.ordered:
            for number in range(max([len(case.plan.lanes) for case in self.cases], default=0)):
                self._lane(number)
        self.device.synchronize()
        return [case.seen for case in self.cases]

    def rows(self, rows: list[Row], places: list[int] | None = None) -> list[Uploaded]:
        """Return ``rows`` at their addresses on the device."""
        at = None if places is None else np.array(places, dtype=np.int64)
        return launch.upload(self.device, RowTable.build(placed(rows, self.bases, self.sizes), at))

    def clear(self) -> None:
        """Fill all pools with zeros and their guard zones with the canary."""
        launch.stamp(self.anchor, self.cleared, 0)

    def _clear_rows(self, pool: int) -> Iterator[Row]:
        size = int(self.sizes[pool])
        for view, number in (
            (ByteView(0, -GUARD_BYTES, 0, 1, (), GUARD_BYTES), GUARD_NUMBER),
            (ByteView(0, 0, 0, 1, (), size), 0),
            (ByteView(0, size, 0, 1, (), GUARD_BYTES), GUARD_NUMBER),
        ):
            yield from rows_of(view, range(1), pool, number, 0)

    def _round(self, number: int) -> None:
        members = [case for case in self.cases if number < len(case.plan.rounds)]
        work = RoundWork(self, members, number)
        for digit in range(max([case.plan.digits for case in members])):
            self.clear()
            for group in work.writers:
                launch.stamp(self.anchor, group, digit)
            work.read(digit)
        work.report()

    def _lane(self, number: int) -> None:
        """Write through the storage and read through the accesses, then the reverse."""
        members = [case for case in self.cases if number < len(case.plan.lanes)]
        stored, reached, where = [], [], []
        for case in members:
            lane = case.plan.lanes[number]
            for access, own, reach in zip(lane.accesses, lane.stored, lane.reached, strict=True):
                stored.append((case, own))
                reached.append((case, reach))
                where.append((case, access))
        sides = [self.targets(side) for side in (stored, reached)]
        tally = launch.new_tally(self.device, len(where))
        for digit in range(max([case.plan.lane_digits for case in members])):
            for writer, reader in (sides, sides[::-1]):
                self.clear()
                launch.stamp(self.anchor, writer, digit)
                launch.verify(self.anchor, reader, digit, tally)
        counts, _ = tally.read()
        for place in np.flatnonzero(counts):
            case, access = where[int(place)]
            case.seen.lanes.append(access)

    def targets(self, targets: list[tuple[Case, Target]]) -> list[Uploaded]:
        """Return the rows of ``targets``, results in the order of the list."""
        rows: list[Row] = []
        places: list[int] = []
        for place, (case, target) in enumerate(targets):
            found = target_rows(case.first_pool, target)
            rows += found
            places += [place] * len(found)
        return self.rows(rows, places)


def target_rows(first_pool: int, target: Target) -> list[Row]:
    """Return the rows of one target; ``first_pool`` is the number of its layout's first pool."""
    return rows_of(target.view, target.cells, first_pool + target.pool, target.first_number, target.step)
