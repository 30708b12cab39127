"""Faults of naming: the wrong slot in a table, a map or a key."""

from __future__ import annotations

from collections.abc import Hashable

from ..cache import RunningCache
from ..geometry import CycleGeometry
from ..pages import Page
from ..sequence import Sequence


class BlockIdIsSlot(RunningCache):
    """The page table is filled with block ids, which stay when memory is swapped with the host."""

    def table_row(self, sequence: Sequence, cycle: int, beam: int, blocks: list[Page | None]) -> list[int]:
        """Return the ids of the blocks in place of where their memory is."""
        return [-1 if page is None else page.block_id for page in blocks]


class WindowMapNotCleared(RunningCache):
    """A window's page is freed through a map from full-attention slots, which is not cleared when they are recycled."""

    def window_map(self) -> dict[int, int]:
        """Return the map from a full-attention slot to the window's slot beside it."""
        found: dict[int, int] = self.__dict__.setdefault("full_to_window", {})
        return found

    def new_block(self, cycle: CycleGeometry) -> Page:
        """Return a new page; the window's is entered in the map, where its full slot has no entry yet."""
        page = super().new_block(cycle)
        if cycle.window is None and not cycle.recurrent:
            self.__dict__["last_full"] = page.slot
        elif cycle.window is not None:
            pair = self.__dict__.setdefault("partners", {})
            pair[page] = self.__dict__.get("last_full", page.slot)
            self.window_map().setdefault(pair[page], page.slot)
        return page

    def extra_state(self) -> tuple[object, ...]:
        """Return the map, and which full slots stand beside the window's."""
        partners = sorted((page.slot, full) for page, full in self.__dict__.get("partners", {}).items())
        return tuple(sorted(self.window_map().items())), tuple(partners), self.__dict__.get("last_full")

    def freed_slot(self, page: Page) -> int:
        """Return the slot that the map has for the full slot that was beside this page."""
        full = self.__dict__.get("partners", {}).pop(page, None)
        return page.slot if full is None else self.window_map().get(full, page.slot)


class RewindLeavesTable(RunningCache):
    """What a rewind took away stays in the request's row of the page table, and new blocks do not replace it."""

    def stale_entries(self) -> dict[tuple[int, int, int, int], int]:
        """Return the slots that rewinds left in the table, by request, life cycle, beam and block."""
        found: dict[tuple[int, int, int, int], int] = self.__dict__.setdefault("stale", {})
        return found

    def rewind(self, sequence: Sequence, tokens: int) -> None:
        """Rewind, and remember where the dropped blocks were."""
        before = {
            (sequence.request, cycle, beam, block): page.slot
            for cycle, rows in enumerate(sequence.blocks)
            for beam, row in enumerate(rows)
            for block, page in enumerate(row)
            if page is not None
        }
        super().rewind(sequence, tokens)
        for (request, cycle, beam, block), slot in before.items():
            if block >= len(sequence.blocks[cycle][beam]):
                self.stale_entries()[request, cycle, beam, block] = slot

    def table_row(self, sequence: Sequence, cycle: int, beam: int, blocks: list[Page | None]) -> list[int]:
        """Return the row with the old entries where there are any."""
        row = super().table_row(sequence, cycle, beam, blocks)
        stale = self.stale_entries()
        return [stale.get((sequence.request, cycle, beam, block), slot) for block, slot in enumerate(row)]

    def free(self, sequence: Sequence) -> None:
        """Free the request, and its row with it."""
        super().free(sequence)
        for key in [key for key in self.stale_entries() if key[0] == sequence.request]:
            del self.stale_entries()[key]

    def extra_state(self) -> tuple[object, ...]:
        """Return the old entries."""
        return tuple(sorted(self.stale_entries().items()))


class KeyWithoutLora(RunningCache):
    """A block's key holds its tokens, and not the adapter that they were computed under."""

    def block_key(self, sequence_text: int, contents: list[int], end: int) -> Hashable:
        """Return the key that the same text has in scope 0."""
        return self.contents.prompt(sequence_text & 7, end)[-1]
