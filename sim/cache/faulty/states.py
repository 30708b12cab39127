"""Faults of recurrent states: written where others read."""

from __future__ import annotations

from ..cache import RunningCache
from ..geometry import CycleGeometry
from ..pages import Page


class ShortChunkWritesSource(RunningCache):
    """A chunk shorter than the convolution's window stores the new state where it read the old one."""

    def state_target(self, cycle: CycleGeometry, source: Page | None, live: Page, tokens: int) -> Page:
        """Return the snapshot that the state was read from, for a short chunk right after a hit."""
        return source if source is not None and tokens < cycle.conv_taps else live


class SnapshotIsLiveState(RunningCache):
    """The live state itself is published as the snapshot, and goes on being updated."""

    def snapshot(self, cycle: CycleGeometry, live: Page) -> Page | None:
        """Return the live state."""
        return live


class PaddingWritesSlotZero(RunningCache):
    """The invalid index of a padding row is clamped to 0, a slot like any other."""

    def padding_slot(self, cycle: CycleGeometry) -> int:
        """Return slot 0."""
        return 0
