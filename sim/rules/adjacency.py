"""Rule ``adjacency``: V follows K, and V's scales K's, at the declared distance with nothing between."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding
from ..layout import KEY_SCALE, VALUE, VALUE_SCALE, PageTable
from .rule import Inspection, Rule, buffer_name, place_of


def check_adjacency(inspection: Inspection) -> Iterator[Finding]:
    """Yield layers whose V (or V scale) page does not follow its K (or K scale) page as the page table says."""
    layout = inspection.layout
    for table in layout.tables:
        if table.kv_factor != 2:
            yield from _k_only(inspection, table)
            continue
        if table.kv_offset != table.expansion:
            yield Finding(
                rule="adjacency",
                message=f"a page table puts V {table.kv_offset} pages after K, and a block of K has "
                f"{table.expansion}: something lies between, or they overlap",
                remedy="register K and V one after the other, with equal sizes",
                where=tuple([place_of(layout, key) for key in table.key_buffers[:1]]),
            )
        for key in table.key_buffers:
            yield from _pair(
                inspection,
                table,
                key,
                inspection.by_role.get((table.manager, layout.buffers[key].layer, VALUE)),
                table.page_bytes,
            )
            if table.scale_pool is not None:
                layer = layout.buffers[key].layer
                scales = inspection.by_role.get((table.manager, layer, KEY_SCALE))
                values = inspection.by_role.get((table.manager, layer, VALUE_SCALE))
                if scales is not None:
                    yield from _pair(inspection, table, scales, values, table.scale_page_bytes)


def _k_only(inspection: Inspection, table: PageTable) -> Iterator[Finding]:
    """Yield what is wrong with a table for K alone: a V that it leaves out, a V offset, or another factor than 1."""
    layout = inspection.layout
    layers = [layout.buffers[key].layer for key in table.key_buffers]
    values = [layer for layer in layers if (table.manager, layer, VALUE) in inspection.by_role]
    problem = None
    if table.kv_factor != 1:
        problem = f"counts {table.kv_factor} pages per layer, and a layer has 1 (K) or 2 (K and V)"
    elif values:
        owner = "draft layer" if table.manager == "draft" else "layer"
        problem = f"serves K alone, and {owner} {values[0]} has V"
    elif table.kv_offset:
        problem = f"serves K alone, and puts V {table.kv_offset} pages after K"
    if problem is not None:
        yield Finding(
            rule="adjacency",
            message=f"a page table {problem}",
            remedy="give K/V layers a table of factor 2, and K-only layers one of factor 1 with V offset 0",
            where=tuple([place_of(layout, key) for key in table.key_buffers[:1]]),
        )


def _pair(
    inspection: Inspection, table: PageTable, first: int, second: int | None, page_bytes: int
) -> Iterator[Finding]:
    layout = inspection.layout
    key = layout.buffers[first]
    if second is None:
        yield Finding(
            rule="adjacency",
            message=f"{buffer_name(key)} has no second page, and its page table serves K/V pairs",
            remedy="register V with K, or use a K-only table",
            where=(place_of(layout, first),),
        )
        return
    value = layout.buffers[second]
    distance = table.kv_offset * page_bytes
    if value.pool != key.pool or value.offset_bytes - key.offset_bytes != distance:
        found = f"{value.offset_bytes - key.offset_bytes} B after it" if value.pool == key.pool else "in another pool"
        yield Finding(
            rule="adjacency",
            message=f"{buffer_name(value)} lies {found}, and the page table says {distance} B after {buffer_name(key)}",
            remedy="keep V right behind K in the slot, or give the consumer its true distance",
            where=(place_of(layout, first), place_of(layout, second)),
        )


RULE = Rule(
    "adjacency",
    "V follows K at the declared distance, with nothing between",
    "Page tables hold one index for K and a fixed number of pages from K to V; the same distance is used for the "
    "block scales. Tensor views take V as the page after K. So in every layer V must start one block of pages behind "
    "K, in the same pool, and the scales likewise.",
    check_adjacency,
)
