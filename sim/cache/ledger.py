"""``Ledger``: an account of who holds which slot, kept beside the cache and independent of it.

The cache announces what it does; the ledger compares with its own books and reports: slots handed out twice or leaked
(``conservation``), pages freed or written while others hold them (``refcount``), slots reused under a step that still
reads or writes them (``in-flight``).
"""

from __future__ import annotations

from ..finding import Where
from .geometry import Geometry
from .pages import Page
from .shadow import FREED, FRESH, Shadow


class Ledger:
    """The books over all groups. ``completed`` is the newest step that is done."""

    def __init__(self, geometry: Geometry, shadow: Shadow) -> None:
        self.geometry = geometry
        self.shadow = shadow
        self.completed = 0
        self.owners: list[list[Page | None]] = [[None] * group.slots for group in geometry.groups]
        self.guests: list[list[Page | None]] = [[None] * group.slots for group in geometry.groups]
        self.owned = [0] * len(geometry.groups)
        self.holds = 0
        self._busy = [[0] * group.slots for group in geometry.groups]
        self._written = [[0] * group.slots for group in geometry.groups]
        self._orphans: dict[Page, None] = {}
        self._fills: dict[int, list[tuple[int, int]]] = {}

    def take(self, page: Page) -> None:
        """A slot of the device is handed out to ``page``."""
        group, slot = page.group, page.slot
        if self.owners[group][slot] is not None:
            self._report(
                "conservation",
                page,
                f"slot {slot} of group {group} is handed out while another page holds it",
                "take a slot off the free list when it is handed out, and put it back once, when its page is freed",
            )
        else:
            self.owned[group] += 1
        if self._busy[group][slot] > self.completed:
            self._report(
                "in-flight",
                page,
                f"slot {slot} of group {group} is handed out again while step {self._busy[group][slot]}, which is not "
                "completed, still reads or writes it",
                "give a freed slot back only after the newest step that names it",
            )
        self.owners[group][slot] = page
        self._orphans[page] = None
        self.shadow.fill(self.geometry.groups[group].device[slot], FRESH)

    def give_back(self, page: Page, slot: int) -> None:
        """``slot`` is freed, in the belief that it is ``page``'s."""
        group = page.group
        owner = self.owners[group][slot]
        if owner is None:
            self._report(
                "conservation",
                page,
                f"slot {slot} of group {group} is freed twice",
                "free a slot once, and only through the page that holds it",
            )
            return
        if owner is not page:
            self._report(
                "conservation",
                page,
                f"slot {slot} of group {group} is freed, and another page holds it",
                "free a slot once, and only through the page that holds it",
            )
        if owner.holders or owner.published:
            who = f"{owner.holders} tables name it" if owner.holders else "it is published for reuse"
            self._report(
                "refcount",
                page,
                f"slot {slot} of group {group} is freed while {who}",
                "free a page when its last holder drops it and its key is withdrawn",
            )
        self.owners[group][slot] = None
        self.owned[group] -= 1
        self._orphans.pop(owner, None)
        self._poison(group, slot)

    def host_take(self, page: Page) -> None:
        """``page`` moves to slot ``page.host`` of the host; its bytes are copied."""
        step = self._written[page.group][page.slot]
        if step > self.completed:
            self._report(
                "in-flight",
                page,
                f"slot {page.slot} of group {page.group} is copied to the host while step {step}, which is not "
                "completed, still writes it",
                "copy a page after the steps that write it, on the same stream or behind an event",
            )
        self.guests[page.group][page.host] = page
        group = self.geometry.groups[page.group]
        self.shadow.copy(group.device[page.slot], group.host[page.host])

    def host_give_back(self, page: Page) -> None:
        """The host slot of ``page`` is free again."""
        self.guests[page.group][page.host] = None
        self.shadow.fill(self.geometry.groups[page.group].host[page.host], FREED)

    def leave(self, page: Page) -> None:
        """The device slot of ``page``, which is on the host now, is free; its holders stay."""
        group, slot = page.group, page.slot
        self.owners[group][slot] = None
        self.owned[group] -= 1
        self._poison(group, slot)

    def onload(self, page: Page, slot: int) -> None:
        """The bytes of ``page`` are copied from the host to device slot ``slot``, which is handed out to it."""
        page.slot = slot
        self.take(page)
        if page.holders or page.published:
            self._orphans.pop(page, None)
        group = self.geometry.groups[page.group]
        self.shadow.copy(group.host[page.host], group.device[slot])

    def hold(self, page: Page) -> None:
        """A table names ``page`` from now on."""
        if self.owners[page.group][page.slot] is not page if page.slot >= 0 else page.host < 0:
            self._report(
                "refcount",
                page,
                f"a request takes a page of group {page.group} that was freed",
                "withdraw a page's key when its slot is freed, and count a hit as a holder before anything is evicted",
            )
        page.holders += 1
        self.holds += 1
        self._orphans.pop(page, None)

    def drop(self, page: Page) -> None:
        """A table names ``page`` no longer."""
        page.holders -= 1
        self.holds -= 1
        self._settle(page)

    def publish(self, page: Page, *, published: bool) -> None:
        """The page's key is published, or withdrawn."""
        step = self._written[page.group][page.slot] if page.slot >= 0 else 0
        if published and step > self.completed:
            self._report(
                "freshness",
                page,
                f"the key of slot {page.slot} of group {page.group} is published while step {step}, which is not "
                "completed, still writes it: whoever hits it reads what the page held before",
                "publish a block when the step that fills it is completed",
            )
        page.published = published
        self._orphans.pop(page, None)
        self._settle(page)

    def pending(self, group: int, slot: int) -> tuple[int, int]:
        """Return how many steps must still complete until nobody uses a slot, and until nobody writes it."""
        busy, written = self._busy[group][slot], self._written[group][slot]
        return max(0, busy - self.completed), max(0, written - self.completed)

    def name(self, page: Page, step: int) -> None:
        """``step`` reads or writes the page."""
        self._busy[page.group][page.slot] = step

    def check_write(self, page: Page, step: int, request: int) -> None:
        """``step`` will write into ``page`` for ``request``, which must be its alone."""
        if page.slot >= 0:
            self._written[page.group][page.slot] = step
        if page.holders > 1 or page.published:
            why = "whose key is published" if page.published else f"that {page.holders} tables name"
            self._report(
                "refcount",
                page,
                f"step {step} writes slot {page.slot} of group {page.group} for request {request}, {why}",
                "copy a shared page before the first write, and write to the copy",
            )

    def check_copy(self, page: Page, tokens: int, block_tokens: int, pool_tokens: int) -> None:
        """More tokens are copied into ``page`` than it has; ``pool_tokens`` fit before the pool's end."""
        past = "the pool" if tokens > pool_tokens else "its block"
        self._report(
            "bounds" if tokens > pool_tokens else "alias",
            page,
            f"copying {tokens} tokens into slot {page.slot} of group {page.group}, a block of {block_tokens}, runs "
            f"past {past}",
            "copy the tokens that match, once for each plane that the cache really has",
        )

    def clear(self, page: Page, ranges: list[tuple[int, int, int]]) -> None:
        """The cache clears (flat start, bytes, pool) for ``page``; they must be bytes of its own slot."""
        own = self.geometry.groups[page.group].device[page.slot]
        low, high = int(own[0]), int(own[-1])
        starts, pools = self.geometry.pool_starts, self.geometry.layout.pools
        for start, count, pool in ranges:
            end = starts[pool] + pools[pool].size_bytes
            if start < starts[pool] or start + count > end:
                self._report(
                    "bounds",
                    page,
                    f"clearing slot {page.slot} reaches {max(start + count - end, starts[pool] - start)} B past "
                    f"pool {pool}",
                    "clear a page's own bytes: its place in the slot, and no more than its size",
                )
                count = max(0, min(start + count, end) - start)
            if not (low <= start and start + count - 1 <= high) and not set(range(start, start + count)) <= set(
                own.tolist()
            ):
                self._report(
                    "alias",
                    page,
                    f"clearing slot {page.slot} clears bytes {start - starts[pool]} to "
                    f"{start + count - 1 - starts[pool]} of pool {pool}, which are not all of that slot",
                    "step from slot to slot by the pool's pitch, and clear a page's own bytes only",
                )
            self.shadow.clear(start, count)

    def complete(self, step: int) -> None:
        """``step`` is done: what was freed under it is poisoned now."""
        self.completed = step
        for group, slot in self._fills.pop(step, ()):
            if self.owners[group][slot] is None:
                self.shadow.fill(self.geometry.groups[group].device[slot], FREED)

    def balance(self, free_counts: list[int]) -> None:
        """Compare with the cache's own number of free slots of each group, after an operation."""
        for page in self._orphans:
            self._report(
                "conservation",
                page,
                f"slot {page.slot} of group {page.group} is held by no table and not free: it has leaked",
                "give back what an operation has taken when it fails, and what nobody holds",
            )
            break
        for group, free in enumerate(free_counts):
            owned, slots = self.owned[group], self.geometry.groups[group].slots
            if free + owned != slots and "conservation" not in self.shadow.broken:
                self.shadow.report(
                    "conservation",
                    f"group {group} has {slots} slots, and {free} free ones with {owned} held make {free + owned}",
                    "keep every slot either free or held, and never both",
                    (Where(group=group),),
                )

    def check_refusal(self, owned: list[int], holds: int, message: str) -> None:
        """A refused operation leaves all as it was: ``owned`` and ``holds`` are from before."""
        if (self.owned, self.holds) != (owned, holds):
            self.shadow.report(
                "conservation",
                f"an operation was refused ({message}), and {sum(self.owned) - sum(owned)} more slots are held than "
                f"before, by {self.holds - holds} more holders",
                "ask for room before taking anything, or give everything back",
            )

    def _poison(self, group: int, slot: int) -> None:
        """Fill a freed slot, now or when the step that still uses it is done."""
        if self._busy[group][slot] > self.completed:
            self._fills.setdefault(self._busy[group][slot], []).append((group, slot))
        else:
            self.shadow.fill(self.geometry.groups[group].device[slot], FREED)

    def _settle(self, page: Page) -> None:
        unheld = page.holders <= 0 and not page.published and page.slot >= 0
        if unheld and self.owners[page.group][page.slot] is page:
            self._orphans[page] = None

    def _report(self, rule: str, page: Page, message: str, remedy: str) -> None:
        manager = self.geometry.groups[page.group].manager
        self.shadow.report(rule, message, remedy, (Where(manager=manager, group=page.group, slot=page.slot),))
