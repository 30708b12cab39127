"""``Page``, and ``SlotPool``: slot ids of one group, with the steps that a freed one must wait for."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tree import Node


class Page:
    """What one life cycle keeps of one block (or of one request's state): a slot of its group, here or on the host.

    ``slot`` is -1 while the page is on the host, where it is ``host``. ``block_id`` is the id that V1 gave the memory
    when the page was made; it stays when memory is swapped. ``refs`` is the cache's own count of holders, ``node`` the
    tree's node that publishes the page, ``last_step`` the newest step that names it. ``holders`` and ``published`` are
    the ledger's own account of the same.
    """

    __slots__ = ("block_id", "cycle", "group", "holders", "host", "last_step", "node", "published", "refs", "slot")

    def __init__(self, cycle: int, group: int, slot: int, block_id: int) -> None:
        self.cycle = cycle
        self.group = group
        self.slot = slot
        self.host = -1
        self.block_id = block_id
        self.refs = 0
        self.node: Node | None = None
        self.last_step = 0
        self.holders = 0
        self.published = False


class SlotPool:
    """The free slots of one group, and the cached pages that may be evicted for more (least recently used first).

    ``brand_new`` counts ids up from the first that was never handed out; ``recycled`` holds (slot, step it waits for).
    """

    def __init__(self, slots: int, *, recycle_first: bool) -> None:
        self.slots = slots
        self.recycle_first = recycle_first
        self.brand_new = 0
        self.recycled: deque[tuple[int, int]] = deque()
        self.cached: dict[Page, None] = {}
        self.host_cached: dict[Page, None] = {}
        self.host_free: deque[int] = deque(range(slots))
        self.block_ids = list(range(slots))
        self.host_ids = list(range(slots, 2 * slots))

    @property
    def free_count(self) -> int:
        """Slots that nobody holds, ready or not."""
        return self.slots - self.brand_new + len(self.recycled)

    def pop(self, completed: int) -> int | None:
        """Return a slot that no step uses any more, None where there is none.

        A recycled slot goes before one that was never used, unless the free list is a plain queue.
        """
        if not self.recycle_first and self.brand_new < self.slots:
            self.brand_new += 1
            return self.brand_new - 1
        for index, (slot, step) in enumerate(self.recycled):
            if step <= completed:
                del self.recycled[index]
                return slot
        if self.brand_new < self.slots:
            self.brand_new += 1
            return self.brand_new - 1
        return None

    def push(self, slot: int, step: int) -> None:
        """Take a slot back; it is ready when ``step`` is completed."""
        self.recycled.append((slot, step))
