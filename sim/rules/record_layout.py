"""Rule ``record-layout``: writer and reader agree on format, axis order and shape of a page."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding
from ..layout import Access, Layout
from ..page import Page
from .rule import Inspection, Rule, access_name, place_of


def check_record_layout(inspection: Inspection) -> Iterator[Finding]:
    """Yield accesses whose page means something else than the stored page, and views with too few slots."""
    layout = inspection.layout
    for access in layout.accesses:
        buffer = layout.buffers[access.buffer]
        page = buffer.page if access.part < 0 else buffer.parts[access.part].page
        seen = access.page
        if seen is page or (seen.format is page.format and seen.axes == page.axes and seen.shape == page.shape):
            continue
        yield Finding(
            rule="record-layout",
            message=f"the {access_name(layout, access)} takes the page for {_spelled(seen)}, and it was stored as "
            f"{_spelled(page)}",
            remedy="declare the record's axes and format to the consumer; do not infer them from a shape",
            where=(place_of(layout, access.buffer, consumer=access.consumer),),
        )
    yield from _missing_slots(layout)


def _missing_slots(layout: Layout) -> Iterator[Finding]:
    """Yield consumers whose cells, over all of their accesses of a buffer, are fewer than its slots."""
    partial: dict[tuple[str, int, int], list[Access]] = {}
    for access in layout.accesses:
        if access.cell_count < layout.buffers[access.buffer].slot_count:
            partial.setdefault((access.consumer, access.buffer, access.part), []).append(access)
    for (_, buffer, _), accesses in partial.items():
        cells, slots = sum(access.cell_count for access in accesses), layout.buffers[buffer].slot_count
        if cells < slots:
            yield Finding(
                rule="record-layout",
                message=f"the {access_name(layout, accesses[0])} has cells for {cells} slots, and the buffer has "
                f"{slots}",
                remedy="give every view of a life cycle as many slots as its pool has",
                where=(place_of(layout, buffer, consumer=accesses[0].consumer),),
            )


def _spelled(page: Page) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in zip(page.axes, page.shape, strict=True))
    return f"{page.format.value} {axes}"


RULE = Rule(
    "record-layout",
    "writer and reader agree on the format, axis order and shape of a page",
    "The same bytes can be read as head-major or token-major, as one format or another of equal width, and nothing "
    "crashes. So the record is declared with the storage, and every consumer must declare the same: inferring the "
    "block size from one axis of a shape goes wrong as soon as the axes are ordered differently.",
    check_record_layout,
)
