"""Faults of naming: the wrong slot in a table, a map or a key."""

from __future__ import annotations

from collections.abc import Hashable

from ..cache import RunningCache
from ..pages import Page
from ..sequence import Sequence


class BlockIdIsSlot(RunningCache):
    """The page table is filled with block ids, which stay when memory is swapped with the host."""

    def table_row(self, sequence: Sequence, cycle: int, beam: int, blocks: list[Page | None]) -> list[int]:
        """Return the ids of the blocks in place of where their memory is."""
        return [-1 if page is None else page.block_id for page in blocks]


class WindowMapNotCleared(RunningCache):
    """A window's page is freed through a map from full-attention slots, which is not cleared when they are recycled."""

    def window_map(self) -> dict[tuple[int, int], int]:
        """Return the window's slot beside each full-attention slot, by window life cycle and full slot."""
        found: dict[tuple[int, int], int] = self.__dict__.setdefault("full_to_window", {})
        return found

    def partners(self) -> dict[Page, int]:
        """Return the full-attention slot beside each of the windows' pages."""
        found: dict[Page, int] = self.__dict__.setdefault("beside", {})
        return found

    def admit(self, request: int, tokens: int, text: int) -> None:
        """Admit a request, and enter its pages in the map."""
        super().admit(request, tokens, text)
        self.enter(self.sequences[request])

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """Extend a request, and enter its new pages in the map."""
        super().extend(sequence, tokens)
        self.enter(sequence)

    def enter(self, sequence: Sequence) -> None:
        """Enter the windows' new pages in the map, unless the full slot beside has an entry: the old one stays."""
        full = next((cycle for cycle in self.paged if cycle.window is None), None)
        if full is None:
            return
        for cycle in self.paged:
            rows = zip(sequence.blocks[full.cycle], sequence.blocks[cycle.cycle], strict=True)
            for one, other in (pair for full_row, row in rows for pair in zip(full_row, row, strict=True)):
                if cycle.window is not None and one is not None and other is not None and other not in self.partners():
                    self.partners()[other] = one.slot
                    self.window_map().setdefault((cycle.cycle, one.slot), other.slot)

    def extra_state(self) -> tuple[object, ...]:
        """Return the map, and which full slots stand beside the windows' pages."""
        partners = sorted((page.cycle, page.slot, full) for page, full in self.partners().items())
        return tuple(sorted(self.window_map().items())), tuple(partners)

    def freed_slot(self, page: Page) -> int:
        """Return the slot that the map has for the full slot beside this page."""
        full = self.partners().pop(page, None)
        return page.slot if full is None else self.window_map()[page.cycle, full]


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
