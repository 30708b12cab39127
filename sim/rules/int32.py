"""Rule ``int32``: the largest index and offset fit the integers that carry them."""

from __future__ import annotations

from collections.abc import Iterator

from ...model.spec import Consumer
from ..finding import Finding
from ..layout import Access, Layout
from .rule import Inspection, Rule, access_name, place_of


def check_int32(inspection: Inspection) -> Iterator[Finding]:
    """Yield page tables whose largest page index, and accesses whose last byte, overflow the consumer's integers."""
    layout = inspection.layout
    consumer = layout.spec.consumer if layout.spec is not None else Consumer()
    index_limit = 1 << (consumer.index_bits - 1)
    for table in layout.tables:
        if not table.key_buffers:
            continue
        buffer = layout.buffers[table.key_buffers[0]]
        pages = buffer.slot_count * table.index_scale * table.expansion
        if pages > index_limit:
            slots = index_limit // (table.index_scale * table.expansion)  # floor: the last slot that fits whole
            yield Finding(
                rule="int32",
                message=f"{buffer.slot_count} slots of {table.index_scale * table.expansion} pages give page indices "
                f"up to {pages - 1}, and a signed {consumer.index_bits}-bit index ends at {index_limit - 1}",
                remedy=f"use at most {slots} slots, or an index of 64 bits",
                where=(place_of(layout, table.key_buffers[0]),),
            )
    offset_limit = 1 << (consumer.offset_bits - 1)
    for access in layout.accesses:
        last = access.offset_bytes + (access.cell_count - 1) * access.pitch_bytes + access.page.span_bytes - 1
        if last >= offset_limit:
            yield offset_finding(layout, access, last, consumer.offset_bits)


def offset_finding(layout: Layout, access: Access, last: int, bits: int) -> Finding:
    """Return that ``access`` reaches byte offset ``last``, which a signed integer of ``bits`` bits does not hold."""
    return Finding(
        rule="int32",
        message=f"the {access_name(layout, access)} reaches byte offset {last}, and a signed "
        f"{bits}-bit offset ends at {(1 << (bits - 1)) - 1}",
        remedy="compute addresses with 64 bits, or use fewer slots",
        where=(place_of(layout, access.buffer, consumer=access.consumer),),
    )


RULE = Rule(
    "int32",
    "the largest page index and byte offset fit the integers that carry them",
    "Block tables hold page indices as signed 32-bit integers: slots times pages per slot must stay below 2^31, "
    "which layouts with many layers per slot reach long before memory runs out of slots. Kernels that compute byte "
    "offsets with 32 bits (declared by the consumer) overflow at 2 GiB of pool.",
    check_int32,
)
