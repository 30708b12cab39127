"""``state_key``: a running cache's whole state as a value, so that a search visits no state twice.

Pages, events and contents are numbered in the order in which a fixed walk meets them, steps by how many must still
complete: two caches of equal keys behave alike from here on.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from .cache import RunningCache
from .pages import Page
from .shadow import TARGET_BITS
from .steps import Step
from .tree import Node


class _Numbers:
    """Numbers for what the walk meets, by order of appearance."""

    def __init__(self, completed: int) -> None:
        self.completed = completed
        self.pages: dict[Page, int] = {}
        self.events: dict[int, int] = {}
        self.contents: dict[Hashable, int] = {}

    def page(self, page: Page | None) -> object:
        if page is None:
            return None
        known = self.pages.get(page)
        if known is not None:
            return known
        number = self.pages[page] = len(self.pages)
        flags = (page.cycle, page.slot, page.host, page.refs, page.node is not None, page.published, page.holders)
        return number, flags, page.block_id, max(0, page.last_step - self.completed)

    def event(self, event: int) -> int:
        return self.events.setdefault(event, len(self.events))

    def content(self, content: Hashable) -> int:
        return self.contents.setdefault(content, len(self.contents))


def state_key(cache: RunningCache) -> tuple[object, ...]:
    """Return the state of ``cache``, findings left out."""
    ledger = cache.ledger
    numbers = _Numbers(ledger.completed)
    sequences = []
    for request, sequence in sorted(cache.sequences.items()):
        lengths = (sequence.capacity, sequence.scheduled, sequence.done, sequence.history, sequence.committed)
        sequences.append(
            (
                (request, sequence.text, sequence.prompt, sequence.beams, sequence.suspended, *lengths),
                [[numbers.content(entry) for entry in beam] for beam in sequence.contents],
                [[numbers.event(entry) for entry in beam] for beam in sequence.events],
                sequence.origin,
                [[[numbers.page(page) for page in row] for row in rows] for rows in sequence.blocks],
                [(cycle, numbers.page(page)) for cycle, page in sequence.sources.items()],
                [numbers.event(event) for event in sequence.state_events],
            )
        )
    nodes: list[object] = []
    for node in cache.tree.roots.values():
        _walk(node, numbers, nodes)
    dummies = [(cycle, numbers.page(page)) for cycle, page in cache.dummies.items()]
    pools = [
        (
            pool.brand_new,
            [(slot, max(0, step - ledger.completed)) for slot, step in pool.recycled],
            [numbers.page(page) for page in pool.cached],
            [numbers.page(page) for page in pool.host_cached],
            list(pool.host_free),
            pool.block_ids,
            pool.host_ids,
        )
        for pool in cache.pools
    ]
    books = [
        [(numbers.page(owner), ledger.pending(group, slot)) for slot, owner in enumerate(owners)]
        for group, owners in enumerate(ledger.owners)
    ]
    flight = [_step(step, cache, numbers) for step in cache.flight]
    tables = [[id(step.table) == id(other.table) for other in cache.flight] for step in cache.flight]
    key = repr((sequences, nodes, dummies, pools, books, flight, tables, cache.extra_state()))
    return key, _bytes(cache, numbers)


def _walk(node: Node, numbers: _Numbers, found: list[object]) -> None:
    found.append(
        (
            numbers.content(node.key),
            [numbers.content(entry) for entry in node.contents],
            [numbers.event(entry) for entry in node.events],
            [numbers.page(page) for page in node.pages],
            numbers.event(node.state_event),
            len(node.children),
        )
    )
    for child in node.children.values():
        _walk(child, numbers, found)


def _step(step: Step, cache: RunningCache, numbers: _Numbers) -> object:
    rows = [
        (
            row.seat,
            cache.sequences.get(row.sequence.request) is row.sequence,
            (row.start, row.end),
            [numbers.event(event) for event in row.events],
            [
                [(seat, first, [numbers.event(event) for event in events]) for seat, first, events in reads]
                for reads in row.reads
            ],
            numbers.event(row.state_event),
        )
        for row in step.rows
    ]
    return sorted(step.table.items()), rows, step.padding


def _bytes(cache: RunningCache, numbers: _Numbers) -> bytes:
    """Return the tags of all bytes with the events' new numbers; an event that nobody expects is like any other."""
    tags, places = np.unique(cache.shadow.tags, return_inverse=True)
    low = (1 << TARGET_BITS) - 1
    renamed = [
        tag if tag < 0 else numbers.events.get(tag >> TARGET_BITS, -1) << TARGET_BITS | tag & low
        for tag in tags.tolist()
    ]
    return np.array(renamed, dtype=np.int64)[places].tobytes()
