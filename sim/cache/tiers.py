"""Tiers: pages that nobody needs right now move to the host and back, and their slot ids with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from .pages import Page
from .refusal import Refused
from .sequence import Sequence

if TYPE_CHECKING:
    from .cache import RunningCache

MAX_USED_PERCENT: Final = 97
"""Slots of a group in use, in percent, above which no request is resumed."""


def suspend(cache: RunningCache, sequence: Sequence) -> None:
    """Take a request out of the batch; its pages may go to the host."""
    if not cache.rules.suspends:
        raise Refused("not-supported", f"{cache.rules.name} has no suspend: free the request")
    if sequence.suspended:
        raise Refused("suspended", f"request {sequence.request} is suspended already")
    cache.quiesce(sequence)
    sequence.suspended = True


def resume(cache: RunningCache, sequence: Sequence) -> None:
    """Bring all pages of a suspended request back to the device, into whatever slots are free."""
    if not cache.rules.suspends:
        raise Refused("not-supported", f"{cache.rules.name} has no resume")
    if not sequence.suspended:
        raise Refused("not-suspended", f"request {sequence.request} is not suspended")
    pages = dict.fromkeys(page for page in _pages(sequence))
    needs = [0] * len(cache.pools)
    for page in pages:
        needs[page.group] += page.slot < 0
    for group, pool in enumerate(cache.pools):
        used = pool.slots - pool.free_count - len(pool.cached)
        if 100 * used > MAX_USED_PERCENT * pool.slots and needs[group]:
            raise Refused("utilization", f"{used} of {pool.slots} slots of group {group} are in use")
    cache.require_room(needs, set(), f"request {sequence.request}")
    before = [page.slot for page in pages]
    for page in pages:
        bring(cache, page)
    if [page.slot for page in pages] != before:
        cache.seen.add("resume in other slots")
    sequence.suspended = False


def bring(cache: RunningCache, page: Page) -> None:
    """Bring a page of the host to the device, where it is not there already."""
    if page.slot >= 0:
        return
    pool = cache.pools[page.group]
    slot, host = cache.take_slot(page.group), page.host
    cache.ledger.onload(page, slot)
    if cache.rules.swaps_memory:
        pool.block_ids[slot], pool.host_ids[host] = pool.host_ids[host], pool.block_ids[slot]
    page.last_step = 0
    cache.free_host(page)


def offload(cache: RunningCache, count: int) -> None:
    """Move up to ``count`` pages to the host: cached ones first, then those of suspended requests."""
    pages: list[Page] = []
    for page in _movable(cache):
        pool = cache.pools[page.group]
        if len(pages) < count and (pool.host_free or pool.host_cached):
            pages.append(page)
    if not pages:
        raise Refused("nothing-to-move", "no page is cached or of a suspended request alone, with room on the host")
    for page in pages:
        pool = cache.pools[page.group]
        if not pool.host_free and pool.host_cached:
            oldest = next(iter(pool.host_cached))
            del pool.host_cached[oldest]
            cache.withdraw(oldest)
            cache.free_host(oldest)
        if pool.host_free:
            cache.seen.add("cached page to the host" if page in pool.cached else "suspended page to the host")
            _send(cache, page)


def _send(cache: RunningCache, page: Page) -> None:
    pool = cache.pools[page.group]
    page.host = pool.host_free.popleft()
    cache.ledger.host_take(page)
    slot = page.slot
    cache.ledger.leave(page)
    pool.push(slot, cache.ready_step(page))
    if cache.rules.swaps_memory:
        pool.block_ids[slot], pool.host_ids[page.host] = pool.host_ids[page.host], pool.block_ids[slot]
    page.slot = -1
    if page in pool.cached:
        del pool.cached[page]
        pool.host_cached[page] = None


def onload(cache: RunningCache, count: int) -> None:
    """Bring up to ``count`` cached pages of the host back into slots that nobody holds."""
    pages = [page for pool in cache.pools for page in list(pool.host_cached)[:count] if pool.free_count]
    if not pages:
        raise Refused("nothing-to-move", "no cached page is on the host, with a free slot on the device")
    for page in pages[:count]:
        pool = cache.pools[page.group]
        if pool.free_count:
            bring(cache, page)
            del pool.host_cached[page]
            pool.cached[page] = None
            cache.seen.add("page from the host")


def _movable(cache: RunningCache) -> Iterator[Page]:
    """Yield the pages that may leave the device."""
    for pool in cache.pools:
        yield from list(pool.cached)
    suspended = [sequence for sequence in cache.sequences.values() if sequence.suspended]
    counts: dict[Page, int] = {}
    for sequence in suspended:
        for page in _pages(sequence):
            counts[page] = counts.get(page, 0) + 1
    for page, holders in counts.items():
        if page.slot >= 0 and page.refs == holders:
            yield page


def _pages(sequence: Sequence) -> Iterator[Page]:
    for cycle in sequence.blocks:
        for row in cycle:
            yield from (page for page in row if page is not None)
    yield from sequence.sources.values()
