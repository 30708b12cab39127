"""Rule ``index-scale``: page indices count whole pages, the same in the data pool and in the scale pool."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding
from ..layout import KEY_SCALE, PageTable
from .rule import Inspection, Rule, buffer_name, place_of, pool_name


def check_index_scale(inspection: Inspection) -> Iterator[Finding]:
    """Yield page tables whose pages per slot, mapping offsets or scale pages do not fit the storage."""
    layout = inspection.layout
    for table in layout.tables:
        yield from _pages_per_slot(inspection, table)
        pair = table.kv_factor * table.page_bytes
        for key, offset in zip(table.key_buffers, table.mapping_offsets, strict=True):
            buffer = layout.buffers[key]
            distance = buffer.offset_bytes - table.pointer_bytes - table.row_offset * table.page_bytes
            if offset * pair != distance or buffer.pool != table.pool:
                exact = "" if pair and distance % pair == 0 else f", which is no whole number of pairs of {pair} B"
                yield Finding(
                    rule="index-scale",
                    message=f"{buffer_name(buffer)} starts {distance} B past the pool pointer{exact}, and its mapping "
                    f"offset {offset} stands for {offset * pair} B",
                    remedy="keep every page in the K/V pool a K or V page, so that each layer takes a whole number "
                    "of pairs",
                    where=(place_of(layout, key),),
                )
        if len(set(table.mapping_offsets)) != len(table.mapping_offsets):
            yield Finding(
                rule="index-scale",
                message=f"two layers of one page table have the same mapping offset: {table.mapping_offsets}",
                remedy="give every layer of a table an offset of its own",
                where=tuple([place_of(layout, key) for key in table.key_buffers[:2]]),
            )
        yield from _scales(inspection, table)


def _pages_per_slot(inspection: Inspection, table: PageTable) -> Iterator[Finding]:
    layout = inspection.layout
    if not table.key_buffers:
        return
    buffer = layout.buffers[table.key_buffers[0]]
    step = table.index_scale * table.expansion * table.page_bytes
    if step != buffer.slot_stride_bytes:
        yield Finding(
            rule="index-scale",
            message=f"a page table counts {table.index_scale} pages of {table.page_bytes} B per slot ({step} B), and "
            f"the slots of its pool are {buffer.slot_stride_bytes} B apart",
            remedy="take the pages per slot from the pool: slot bytes over page bytes",
            where=(place_of(layout, table.key_buffers[0]),),
        )


def _scales(inspection: Inspection, table: PageTable) -> Iterator[Finding]:
    layout = inspection.layout
    pair = table.kv_factor * table.scale_page_bytes
    for key, offset in zip(table.key_buffers, table.mapping_offsets, strict=True):
        index = inspection.by_role.get((table.manager, layout.buffers[key].layer, KEY_SCALE))
        if index is None:
            continue
        scales = layout.buffers[index]
        if table.scale_pool != scales.pool:
            target = "no scale pool" if table.scale_pool is None else pool_name(layout.pools[table.scale_pool])
            yield Finding(
                rule="index-scale",
                message=f"{buffer_name(scales)} lies in {pool_name(layout.pools[scales.pool])}, and its page table "
                f"points at {target}",
                remedy="point the table at the pool that holds the block scales",
                where=(place_of(layout, index),),
            )
            continue
        step = table.index_scale * table.expansion * table.scale_page_bytes
        distance = scales.offset_bytes - table.scale_pointer_bytes - table.row_offset * table.scale_page_bytes
        if step != scales.slot_stride_bytes or offset * pair != distance:
            yield Finding(
                rule="index-scale",
                message=f"the block index of {buffer_name(layout.buffers[key])} counts {table.index_scale} pages per "
                f"slot and offset {offset}; used on the scale pool it gives slots {step} B apart and {offset * pair} B "
                f"to {buffer_name(scales)}, and the pool has {scales.slot_stride_bytes} B and {distance} B "
                f"({table.scale_index_scale} scale pages per slot)",
                remedy="keep other buffers out of the data pool and the scale pool, so that both have the same pages "
                "per slot",
                where=(place_of(layout, key), place_of(layout, index)),
            )
        elif table.scale_index_scale * table.expansion * table.scale_page_bytes != scales.slot_stride_bytes:
            yield Finding(
                rule="index-scale",
                message=f"a page table counts {table.scale_index_scale} scale pages of {table.scale_page_bytes} B per "
                f"slot, and the slots of the scale pool are {scales.slot_stride_bytes} B apart",
                remedy="take the scale pages per slot from the scale pool",
                where=(place_of(layout, index),),
            )


RULE = Rule(
    "index-scale",
    "page indices count whole pages, and the same for data and scales",
    "A consumer turns a slot id into a page index by the pages per slot, and finds a layer by a whole number of K/V "
    "pairs. So pages per slot times page bytes must be the slot pitch, every layer must start a whole number of "
    "pairs behind the pointer, at an offset of its own. NVFP4 uses the same index and the same offset on the scale "
    "pool, which therefore needs the same pages per slot and the same order of layers as the data pool. A foreign "
    "page that joins one of the pools because it has the same size breaks all of this at once.",
    check_index_scale,
)
