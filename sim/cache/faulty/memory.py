"""Faults of what is cleared and copied: the right pages, with the wrong bytes."""

from __future__ import annotations

from ..cache import RunningCache
from ..geometry import CycleGeometry
from ..pages import Page


class ClearPitchIsSpan(RunningCache):
    """One number serves as the bytes to clear and as the distance between slots."""

    def clear_ranges(self, cycle: CycleGeometry, slot: int) -> list[tuple[int, int, int]]:
        """Return each page's bytes at ``slot`` times the page, in place of ``slot`` times the pool's pitch."""
        return [(start + slot * count, count, pool) for start, count, _, pool in cycle.clears]


class ClearSpanIsSlab(RunningCache):
    """The whole slot's bytes are cleared from where a layer's own page starts."""

    def clear_ranges(self, cycle: CycleGeometry, slot: int) -> list[tuple[int, int, int]]:
        """Return a whole pitch from each page's start: the rest of the slot, and the head of the next."""
        return [(start + slot * pitch, pitch, pool) for start, _, pitch, pool in cycle.clears]


class CopyTwoPlanes(RunningCache):
    """A partial copy of a K-only block moves as many bytes as K and V would have."""

    def copy_tokens(self, cycle: CycleGeometry, source: Page, target: Page, tokens: int) -> None:
        """Copy twice the tokens where there is one plane, however far past the block that runs."""
        if cycle.kv_planes == 2 or cycle.recurrent:
            super().copy_tokens(cycle, source, target, tokens)
            return
        first, second = source.slot * cycle.tokens, target.slot * cycle.tokens
        count = 2 * tokens
        if count > cycle.tokens:
            self.ledger.check_copy(target, count, cycle.tokens, len(cycle.read) - second)
        count = min(count, len(cycle.read) - first, len(cycle.read) - second)
        self.shadow.copy(cycle.read[first : first + count], cycle.read[second : second + count])


class PartialCopyForgetsScales(RunningCache):
    """A partial block is copied in the data pool alone: its block scales stay behind."""

    def copy_tokens(self, cycle: CycleGeometry, source: Page, target: Page, tokens: int) -> None:
        """Copy K and V, and nothing else of the slot."""
        first, second = source.slot * cycle.tokens, target.slot * cycle.tokens
        targets = self.geometry.targets
        kept = [targets[int(cell)].role in ("key", "value") for cell in cycle.read_cells]
        self.shadow.copy(cycle.read[first : first + tokens][:, kept], cycle.read[second : second + tokens][:, kept])
