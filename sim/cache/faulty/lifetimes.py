"""Faults of when: freed, published, moved or rewritten too early, or never."""

from __future__ import annotations

from ..cache import RunningCache
from ..geometry import CycleGeometry
from ..pages import Page
from ..sequence import Sequence
from ..steps import Table


class FreeAtOutput(RunningCache):
    """A request's pages are free as soon as its output says so, although another step is in flight."""

    def ready_step(self, page: Page) -> int:
        """Return 0: nothing is waited for."""
        return 0


class OneHostTable(RunningCache):
    """All steps are given the one table, which is filled anew for each."""

    def new_table(self) -> Table:
        """Return the same table every time."""
        return self.table


class PublishedBeforeWritten(RunningCache):
    """Blocks are published when a step that fills them is dispatched."""

    def committable(self, sequence: Sequence) -> int:
        """Return the tokens that were given to a step, whether it has run or not."""
        return sequence.scheduled


class StoreBeforeCompute(RunningCache):
    """A request is suspended, and its pages are copied to the host, without waiting for its step."""

    def quiesce(self, sequence: Sequence) -> None:
        """Wait for nothing."""


class StaleKeyAfterEviction(RunningCache):
    """A page's key stays when its slot is used for something else."""

    def withdraw(self, page: Page) -> None:
        """Tell the ledger that nobody can find the page any more, and leave it in the tree."""
        self.ledger.publish(page, published=False)


class PartialAllocationKept(RunningCache):
    """Room is not asked for first: an allocation that fails half way keeps what it took."""

    def has_room(self, needs: list[int], kept: set[Page]) -> bool:
        """Return True, always."""
        return True


class HitNotHeld(RunningCache):
    """The pages of a hit are counted as held after everything else was allocated, which may have evicted them."""

    def has_room(self, needs: list[int], kept: set[Page]) -> bool:
        """Count the hit's own pages among those that may be evicted."""
        return super().has_room(needs, set())

    def take_hits(self, hits: list[Page]) -> None:
        """Hold nothing yet."""

    def settle_hits(self, hits: list[Page]) -> None:
        """Hold them now."""
        super().take_hits(hits)


class WindowEndOffByOne(RunningCache):
    """A block is dropped one token too early."""

    def stale_end(self, cycle: CycleGeometry, history: int) -> int:
        """Return the end of the dropped range for a history of one token more."""
        return super().stale_end(cycle, history + 1)
