"""Owner numbers, and the passes that make every shared byte visible.

An *owner* is a buffer, or a part of a packed buffer, with a number for each of its slots: ``first_number + slot``. All
numbers of a layout differ, over all pools; they start at 1, and 0 stands for padding.

Pass ``i`` writes digit ``i`` (base 256) of the number to every byte of each cell, and a byte without an owner keeps 0.
Two cells that share a byte differ in some digit, and in that pass the byte is wrong for one of them, whoever wrote
last.

Cells that share bytes by right must not differ, and those are cells of different life cycles of one group at one slot
id. A pool where that occurs is stamped in several *rounds*: one for each life cycle of a group (numbered in the order
of the layout), in which all its cells have their own numbers, and a last one with all cells of all life cycles, in
which a cell's number is that of (group, slot id). Two cells that may be live together are both of one life cycle, and
meet in its round, or differ in (group, slot id), and meet in the last. In any other pool one round holds everything.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..layout import Layout
from .views import ByteView, buffer_bytes, holds

GroupKey = tuple[str, int]
"""Manager and group: what slot ids are drawn from."""


class Owner(msgspec.Struct, frozen=True, gc=False):
    """A buffer (``part`` -1) or a part of one, and the number of its slot 0."""

    buffer: int
    part: int
    life_cycle: int
    first_number: int
    view: ByteView


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """What one owner writes in a round: number ``first_number + slot`` into each cell."""

    owner: int
    first_number: int


class OwnerTable(msgspec.Struct, frozen=True):
    """All owners of a layout, and the rounds of each pool in the order in which they are stamped.

    ``digits`` is the number of passes of a round, ``groups`` the (manager, group) of each life cycle.
    """

    owners: tuple[Owner, ...]
    rounds: tuple[tuple[tuple[Stamp, ...], ...], ...]
    digits: int
    groups: tuple[GroupKey, ...]

    @property
    def number_bytes(self) -> int:
        """Bytes of the smallest unsigned NumPy type that holds every number."""
        return 1 << (self.digits - 1).bit_length()

    @property
    def round_count(self) -> int:
        """Rounds of the pool that has the most; the others leave later rounds out."""
        return max([1, *map(len, self.rounds)])

    def may_both_live(self, first: int, first_slot: int, second: int, second_slot: int) -> bool:
        """Whether two different cells, given by life cycle and slot id, may be live at the same time."""
        return first == second or self.groups[first] != self.groups[second] or first_slot != second_slot


class PoolOwners(msgspec.Struct, frozen=True):
    """The owners of one pool of ``size_bytes``."""

    table: OwnerTable
    pool: int
    size_bytes: int

    def holders(self, byte: int) -> Iterator[tuple[int, list[int]]]:
        """Yield every owner with the slots in which it holds ``byte``."""
        for number, owner in enumerate(self.table.owners):
            if owner.view.pool == self.pool:
                slots = holds(owner.view, self.size_bytes, byte)
                if slots:
                    yield number, slots


def owner_table(layout: Layout) -> OwnerTable:
    """Return the owners of ``layout``: buffers in order, and instead of a packed buffer its parts in order."""
    owners: list[Owner] = []
    by_place: list[list[int]] = [[] for _ in layout.pools]
    number = 1
    for index, buffer in enumerate(layout.buffers):
        for part in range(len(buffer.parts)) if buffer.parts else (-1,):
            by_place[buffer.pool].append(len(owners))
            owners.append(Owner(index, part, buffer.life_cycle, number, buffer_bytes(buffer, part)))
            number += buffer.slot_count
    groups = tuple([(cycle.manager, cycle.group) for cycle in layout.life_cycles])
    slot_numbers: dict[GroupKey, int] = {}
    slot_number = 1
    for group in dict.fromkeys(groups):
        slot_numbers[group] = slot_number
        slot_number += max([owner.view.count for owner in owners if groups[owner.life_cycle] == group], default=0)
    rounds = tuple([_rounds(owners, members, groups, slot_numbers) for members in by_place])
    largest = max(number, slot_number) - 1
    return OwnerTable(tuple(owners), rounds, max(1, largest.bit_length() + 7 >> 3), groups)


def _rounds(
    owners: list[Owner], members: list[int], groups: tuple[GroupKey, ...], slot_numbers: dict[GroupKey, int]
) -> tuple[tuple[Stamp, ...], ...]:
    """Return the rounds of the pool that holds the owners ``members``."""
    ordinals: dict[GroupKey, dict[int, int]] = {}
    for cycle in sorted({owners[index].life_cycle for index in members}):
        own = ordinals.setdefault(groups[cycle], {})
        own[cycle] = len(own)
    count = max([len(own) for own in ordinals.values()], default=0)
    rounds: list[list[Stamp]] = [[] for _ in range(count)]
    for index in members:
        owner = owners[index]
        rounds[ordinals[groups[owner.life_cycle]][owner.life_cycle]].append(Stamp(index, owner.first_number))
    if count > 1:
        rounds.append([Stamp(index, slot_numbers[groups[owners[index].life_cycle]]) for index in members])
    return tuple([tuple(stamps) for stamps in rounds])
