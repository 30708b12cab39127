"""``sentinel`` seen on memory: what a consumer finds where the table entry of a missing page leads it."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding
from ..layout import Layout
from ..rules.sentinel import reachable_lane, sentinel_finding
from .memory import PoolMemory
from .views import ByteView


def missing_pages(layout: Layout) -> Iterator[tuple[int, ByteView]]:
    """Yield tables (by place) whose entry for a missing page can be followed, with the bytes of the page it leads to.

    Bytes outside the pool are left out.
    """
    for index, table in enumerate(layout.tables):
        lane = reachable_lane(table)
        if lane is not None:
            first = table.pointer_bytes + (table.missing_lanes[lane] + table.row_offset) * table.page_bytes
            end = min(layout.pools[table.pool].size_bytes, first + table.page_bytes)
            if 0 <= first < end:
                yield index, ByteView(table.pool, first, 0, 1, (), end - first)


def missing_findings(layout: Layout, memory: PoolMemory) -> Iterator[Finding]:
    """Yield the tables whose missing pages lead to bytes of one pool that have an owner."""
    for index, view in missing_pages(layout):
        place = slice(view.offset_bytes, view.offset_bytes + view.item_bytes)
        if view.pool == memory.pool and any(shadow[place].any() for shadow in memory.shadows[:1]):
            yield sentinel_finding(layout, layout.tables[index])
