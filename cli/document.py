"""The JSON document of ``check``: one rank, one allocator.

``page_bytes`` and ``pages_per_slot`` of a pool are null when its buffers differ in size, ``mapping_offset`` is null for
all but K buffers. Keys are always present.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..model.spec import encode_spec
from ..sim.finding import Finding
from ..sim.layout import Buffer, Layout
from ..sim.rejection import Rejected
from .examination import Examination


def document_of(examination: Examination) -> dict[str, Any]:
    """Return the document of one examination, ready to be encoded; ``spec`` is its canonical text."""
    layout, rejection = examination.layout, examination.rejection
    return {
        "allocator": examination.allocator.name,
        "status": examination.status,
        "spec": msgspec.Raw(encode_spec(examination.spec)),
        "pools": pools_of(layout) if layout is not None else [],
        "buffers": buffers_of(layout) if layout is not None else [],
        "side_planes_bytes": layout.side_planes_bytes if layout is not None else 0,
        "findings": [_finding(finding) for finding in examination.findings],
        "rejection": _rejection(rejection) if rejection is not None else None,
        "notes": examination.notes,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "message": finding.message,
        "remedy": finding.remedy,
        "where": finding.where,
    }


def _rejection(rejection: Rejected) -> dict[str, Any]:
    return {
        "rule": rejection.rule,
        "message": rejection.message,
        "remedy": rejection.remedy,
        "where": rejection.where,
        "supported": rejection.supported,
    }


def pools_of(layout: Layout) -> list[dict[str, Any]]:
    """Return the pools; the life cycles are those with a buffer in the pool, by their number in the layout."""
    cycles: list[set[int]] = [set() for _ in layout.pools]
    for buffer in layout.buffers:
        cycles[buffer.pool].add(buffer.life_cycle)
    rows = []
    for pool, used_by, page_bytes in zip(layout.pools, cycles, page_bytes_of_pools(layout), strict=True):
        rows.append(
            {
                "manager": pool.manager,
                "group": pool.group,
                "pool": pool.index,
                "slots": pool.slot_count,
                "slot_bytes": pool.slot_bytes,
                "page_bytes": page_bytes,
                "pages_per_slot": None if page_bytes is None else whole_pages(pool.slot_bytes, page_bytes),
                "life_cycles": sorted(used_by),
            }
        )
    return rows


def page_bytes_of_pools(layout: Layout) -> list[int | None]:
    """Return the one page size of each pool, None where its buffers differ in size or there are none."""
    sizes: list[set[int]] = [set() for _ in layout.pools]
    for buffer in layout.buffers:
        sizes[buffer.pool].add(buffer.page_bytes)
    return [next(iter(found)) if len(found) == 1 else None for found in sizes]


def whole_pages(slot_bytes: int, page_bytes: int) -> int | None:
    """Return how many pages a slot holds, None when that is no whole number."""
    pages, rest = divmod(slot_bytes, page_bytes) if page_bytes > 0 else (0, 1)
    return None if rest else pages


def buffers_of(layout: Layout) -> list[dict[str, Any]]:
    """Return the buffers in layer order, each manager's on their own, the roles of a layer as they were registered."""
    offsets = mapping_offsets_of(layout)
    scales = _index_scales(layout)
    managers = {name: place for place, name in enumerate(dict.fromkeys(buffer.manager for buffer in layout.buffers))}
    rows = []
    for index, buffer in sorted(enumerate(layout.buffers), key=lambda item: (managers[item[1].manager], item[1].layer)):
        pool = layout.pools[buffer.pool]
        rows.append(
            {
                "manager": buffer.manager,
                "layer": buffer.layer,
                "role": buffer.role,
                "group": pool.group,
                "pool": pool.index,
                "life_cycle": buffer.life_cycle,
                "offset": buffer.offset_bytes,
                "page_bytes": buffer.page_bytes,
                "index_scale": scales[index],
                "mapping_offset": offsets.get(index),
            }
        )
    return rows


def mapping_offsets_of(layout: Layout) -> dict[int, int]:
    """Return the mapping offset of each K buffer that a page table serves, by its place in the layout."""
    return {
        buffer: offset
        for table in layout.tables
        for buffer, offset in zip(table.key_buffers, table.mapping_offsets, strict=True)
    }


def _index_scales(layout: Layout) -> list[int]:
    """Return the pages per slot of each buffer, in pages of its own size.

    It is 1 where a slot is not made of such pages: pools that keep the layers apart, pools in which the buffers of one
    life cycle differ in size, slots that are no whole number of pages.
    """
    sizes: dict[tuple[int, int], set[int]] = {}
    for buffer in layout.buffers:
        sizes.setdefault((buffer.pool, buffer.life_cycle), set()).add(buffer.page_bytes)

    def scale(buffer: Buffer) -> int:
        slot_bytes = layout.pools[buffer.pool].slot_bytes
        if buffer.slot_stride_bytes != slot_bytes or len(sizes[buffer.pool, buffer.life_cycle]) > 1:
            return 1
        return whole_pages(slot_bytes, buffer.page_bytes) or 1

    return [scale(buffer) for buffer in layout.buffers]
