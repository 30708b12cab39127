"""``Plan``: everything that a replay of one layout will write, read and expect, worked out before memory is taken.

All offsets are bytes from the base of a pool. A plan has no addresses, so it is the same on every device.

*Rounds* are those of the arena's table of owners: every cell is stamped with its number, digit by digit, and read back;
the whole pool with its guard zones is compared with the pieces of the table. *Lanes* exercise the consumers: in a lane
no two accesses stand for the same bytes, each (access, cell) has a number of its own, and what is written through the
storage is read through the accesses, then the reverse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from ..sim.arena import ByteView, OwnerTable, owner_table
from ..sim.arena.missing import missing_pages
from ..sim.arena.pieces import Piece, pieces
from ..sim.arena.reached import apart, elsewhere, stored_bytes
from ..sim.arena.views import access_bytes
from ..sim.layout import Access, Layout
from ..sim.page import Page

GUARD_BYTES: Final = 256
"""Bytes of canary before and after each pool."""
GUARD_NUMBER: Final = 0xA5A5A5A5A5A5A5
"""The number whose every digit is the canary."""


class Target(msgspec.Struct, frozen=True, gc=False):
    """Cells of a view in a pool, and the number of the view's cell 0; cell k has ``first_number + k * step``."""

    pool: int
    view: ByteView
    cells: range
    first_number: int
    step: int = 1


class ElementTarget(msgspec.Struct, frozen=True, gc=False):
    """The same cells as a ``Target``, told by shape and strides of the page as it was declared.

    ``offset_bytes`` is the first element of cell 0.
    """

    pool: int
    offset_bytes: int
    pitch_bytes: int
    cells: range
    page: Page
    first_number: int


class Round(msgspec.Struct, frozen=True):
    """One round: the owners (by place in the table), their targets told twice, and the pieces of each pool."""

    owners: tuple[int, ...]
    targets: tuple[Target, ...]
    elements: tuple[ElementTarget, ...]
    pieces: tuple[tuple[int, Piece], ...]


class Lane(msgspec.Struct, frozen=True):
    """Accesses (by place in the layout) that are tried together: what they reach, and the storage they stand for."""

    accesses: tuple[int, ...]
    reached: tuple[Target, ...]
    stored: tuple[Target, ...]


class Plan(msgspec.Struct, frozen=True):
    """A layout, its owners, and the work; see the module.

    ``suspects`` are the accesses that one look at their places gives away, or whose cells share bytes: they are tried
    alone, cell by cell where that is needed. ``narrow`` are accesses whose consumer has 32-bit byte offsets and reaches
    past them. ``missing`` are page tables (by place) whose entry for a missing page leads into a pool, with the bytes
    there, which nobody should own: their number is 0.
    """

    layout: Layout
    table: OwnerTable
    rounds: tuple[Round, ...]
    lanes: tuple[Lane, ...]
    suspects: tuple[int, ...]
    narrow: tuple[int, ...]
    missing: tuple[tuple[int, Target], ...]

    @property
    def digits(self) -> int:
        """Passes of a round."""
        return self.table.digits

    @property
    def lane_digits(self) -> int:
        """Passes of a lane: bytes of the largest number in it."""
        largest = max([target.first_number + len(target.cells) for lane in self.lanes for target in lane.stored] + [1])
        return largest.bit_length() + 7 >> 3

    @property
    def memory_bytes(self) -> int:
        """Device memory of all pools with their guard zones."""
        return sum(pool_memory_bytes(pool.size_bytes) for pool in self.layout.pools)


def pool_memory_bytes(size_bytes: int) -> int:
    """Return what one pool takes with its guard zones, and with room for whole words of 16 bytes."""
    return max(0, size_bytes) + 2 * GUARD_BYTES + 16


def plan_replay(layout: Layout) -> Plan:
    """Return the plan of ``layout``, whose references must hold. Raises ``SpecError`` on too many pieces."""
    table = owner_table(layout)
    rounds = tuple([_round(layout, table, number) for number in range(table.round_count)])
    suspects: list[int] = []
    formulas: set[Access] = set()
    lanes: dict[tuple[int, int], list[tuple[int, ByteView, ByteView, range]]] = {}
    ordinals = _ordinals(layout)
    taken: dict[tuple[int, int], int] = {}
    for index, access in enumerate(layout.accesses):
        reach = access_bytes(access)
        formula = msgspec.structs.replace(access, consumer="")
        if reach.count == 0 or reach.item_bytes == 0 or formula in formulas:
            continue
        formulas.add(formula)
        size_bytes = layout.pools[access.pool].size_bytes
        stored = stored_bytes(layout, access)
        odd = elsewhere(layout, access) is not None or apart(size_bytes, reach, stored) is not None
        if odd or not (reach.cells_apart and stored.cells_apart):
            suspects.append(index)
            continue
        cells = reach.inside(size_bytes)
        if cells:
            lane = (ordinals[layout.buffers[access.buffer].life_cycle], _free_lane(taken, access))
            lanes.setdefault(lane, []).append((index, reach, stored, cells))
    return Plan(
        layout=layout,
        table=table,
        rounds=rounds,
        lanes=tuple([_lane(layout, lanes[lane]) for lane in sorted(lanes)]),
        suspects=tuple(suspects),
        narrow=tuple(_narrow(layout)),
        missing=tuple([(index, Target(view.pool, view, range(1), 0, 0)) for index, view in missing_pages(layout)]),
    )


def _ordinals(layout: Layout) -> list[int]:
    """Return the place of each life cycle within its group: cycles of one group may overlay each other's bytes."""
    seen: Counter[tuple[str, int]] = Counter()
    ordinals = []
    for cycle in layout.life_cycles:
        ordinals.append(seen[cycle.manager, cycle.group])
        seen[cycle.manager, cycle.group] += 1
    return ordinals


def _free_lane(taken: dict[tuple[int, int], int], access: Access) -> int:
    """Return the first lane in which nothing stands for the bytes of ``access``, and take it.

    A packed buffer shares its bytes with its parts, so both count for either.
    """
    buffer, part = access.buffer, access.part
    lane = max(taken.get((buffer, part), 0), taken.get((buffer, -1), 0))
    if part < 0:
        lane = max([lane, *[count for (other, _), count in taken.items() if other == buffer]])
    taken[buffer, part] = lane + 1
    return lane


def _round(layout: Layout, table: OwnerTable, number: int) -> Round:
    owners, targets, elements, whole = [], [], [], []
    for pool, rounds in enumerate(table.rounds):
        size_bytes = max(0, layout.pools[pool].size_bytes)
        whole.extend([(pool, piece) for piece in pieces(table, pool, size_bytes, number, contested=False)])
        for stamp in rounds[number] if number < len(rounds) else ():
            owner = table.owners[stamp.owner]
            cells = owner.view.inside(size_bytes)
            if not cells:
                continue
            owners.append(stamp.owner)
            targets.append(Target(pool, owner.view, cells, stamp.first_number))
            buffer = layout.buffers[owner.buffer]
            offset, page = buffer.offset_bytes, buffer.page
            if owner.part >= 0:
                offset += buffer.parts[owner.part].offset_bytes
                page = buffer.parts[owner.part].page
            pitch = buffer.slot_stride_bytes
            elements.append(ElementTarget(pool, offset, pitch, cells, page, stamp.first_number))
    return Round(tuple(owners), tuple(targets), tuple(elements), tuple(whole))


def _lane(layout: Layout, members: list[tuple[int, ByteView, ByteView, range]]) -> Lane:
    """Return a lane whose numbers start at 1 and never repeat."""
    reached, stored = [], []
    number = 1
    for index, reach, own, cells in members:
        pool = layout.accesses[index].pool
        reached.append(Target(pool, reach, cells, number - cells.start))
        stored.append(Target(pool, own, cells, number - cells.start))
        number += len(cells)
    return Lane(tuple([index for index, *_ in members]), tuple(reached), tuple(stored))


def _narrow(layout: Layout) -> Iterator[int]:
    """Yield the accesses of a consumer with 32-bit byte offsets whose last byte needs more."""
    if layout.spec is None or layout.spec.consumer.offset_bits != 32:
        return
    for index, access in enumerate(layout.accesses):
        reach = access_bytes(access)
        if reach.count and reach.start(reach.count - 1) + reach.extent_bytes > 1 << 31:
            yield index
