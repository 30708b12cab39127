"""What is wrong with a layout, seen on memory: the rules bounds, alias and op-address, and replay-mismatch.

``bounds`` is decided by where each cell begins and ends, and a cell outside its pool is never touched. ``alias`` is in
``shared``, ``op-address`` in ``reached``. ``replay-mismatch`` would be an error of the arena itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from ..finding import Finding
from ..layout import Buffer, Layout
from ..rules.rule import access_name, buffer_name, place_of, pool_name
from .memory import PoolMemory
from .missing import missing_findings
from .owners import OwnerTable
from .reached import reached_findings
from .shared import shared_cells, shared_elements
from .views import ByteView, access_bytes, buffer_bytes, view_of_page

MEMORY_RULES: Final = ("bounds", "alias", "op-address", "sentinel", "int32", "replay-mismatch")
"""Rules that memory can break, in the order of a report; the arena has no consumers with 32-bit offsets."""


def find(layout: Layout, table: OwnerTable, limit: int) -> list[Finding]:
    """Return at most ``limit`` findings of each rule, pool by pool."""
    found: dict[str, list[Finding]] = {rule: [] for rule in MEMORY_RULES}
    _add(found, bounds_findings(layout), limit)
    _add(found, shared_elements(layout), limit)
    for pool in range(len(layout.pools)):
        _add(found, _pool_findings(layout, table, pool), limit)
    return [finding for findings in found.values() for finding in findings]


def _add(found: dict[str, list[Finding]], findings: Iterable[Finding], limit: int) -> None:
    for finding in findings:
        if len(found[finding.rule]) < limit:
            found[finding.rule].append(finding)


def _pool_findings(layout: Layout, table: OwnerTable, pool: int) -> Iterator[Finding]:
    """Yield what one pool shows; its memory lives no longer than this."""
    memory = PoolMemory(layout, table, pool)
    yield from shared_cells(layout, memory)
    memory.bytes[:] = 0
    yield from reached_findings(layout, memory)
    yield from missing_findings(layout, memory)


def bounds_findings(layout: Layout) -> Iterator[Finding]:
    """Yield buffers, parts and accesses with a cell outside its pool, slot or page."""
    for index, buffer in enumerate(layout.buffers):
        outside = _cell_outside(layout, buffer)
        if outside is not None:
            yield _buffer_outside(layout, index, outside)
        for part in buffer.parts:
            view = view_of_page(buffer.pool, part.offset_bytes, 0, 1, part.page)
            first, end = view.offset_bytes, view.offset_bytes + view.extent_bytes
            if first < 0 or end > buffer.page_bytes:
                yield Finding(
                    rule="bounds",
                    message=f"layer {part.layer}'s {part.role} takes bytes {first} to {end} of a "
                    f"packed {buffer.role} page of {buffer.page_bytes} B",
                    remedy="make the packed page as large as the sum of its planes",
                    where=(place_of(layout, index),),
                )
    for access in layout.accesses:
        pool = layout.pools[access.pool]
        view = access_bytes(access)
        cell = _outside(view, pool.size_bytes)
        if cell is not None:
            first, slot = view.start(cell), access.first_slot + cell * access.slot_step
            yield Finding(
                rule="bounds",
                message=f"the {access_name(layout, access)} in slot {slot} reaches bytes {first} to "
                f"{first + view.extent_bytes} of {pool_name(pool)}, which has {pool.size_bytes} B",
                remedy="check the pointer, the pages per slot and the number of slots that this consumer is given",
                where=(place_of(layout, access.buffer, slot=slot, consumer=access.consumer),),
            )


def _cell_outside(layout: Layout, buffer: Buffer) -> int | None:
    """Return the first slot in which a buffer leaves its pool, its slot or its page; None where it never does."""
    pool = layout.pools[buffer.pool]
    view = buffer_bytes(buffer)
    if view.count == 0 or view.item_bytes == 0:
        return None
    outside = _outside(view, pool.size_bytes)
    if outside is None and view.count > pool.slot_count:
        return max(0, pool.slot_count)
    slot_major = buffer.slot_stride_bytes == pool.slot_bytes
    end = view.offset_bytes + view.extent_bytes
    if outside is None and slot_major and (view.offset_bytes < 0 or end > pool.slot_bytes):
        return 0
    # a page may be scattered beyond what it takes, so its own bytes count here, and its extent where elements overlap
    taken = min(view.cell_bytes, view.extent_bytes)
    return 0 if outside is None and taken > buffer.page_bytes else outside


def _buffer_outside(layout: Layout, index: int, slot: int) -> Finding:
    buffer = layout.buffers[index]
    pool = layout.pools[buffer.pool]
    view = buffer_bytes(buffer)
    first = view.start(slot)
    return Finding(
        rule="bounds",
        message=f"{buffer_name(buffer)} takes bytes {first} to {first + view.extent_bytes} in slot {slot} "
        f"({buffer.page_bytes} B reserved, {buffer.slot_count} slots), but {pool_name(pool)} has {pool.slot_count} "
        f"slots of {pool.slot_bytes} B, {pool.size_bytes} B in all",
        remedy="place the buffer inside its slot, and give the pool as many slots as its views have",
        where=(place_of(layout, index, slot=slot),),
    )


def _outside(view: ByteView, size_bytes: int) -> int | None:
    """Return the first cell outside a pool of ``size_bytes``, None where all are inside."""
    inside = view.inside(size_bytes)
    if inside.stop - inside.start == view.count or view.item_bytes == 0:
        return None
    return inside.stop if inside.start == 0 else 0
