"""Rule ``op-address``: a consumer's formula reaches exactly the bytes that the storage gave the role it reads."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding
from ..layout import Access, Layout
from .rule import Inspection, Rule, access_name, place_of, pool_name, same_bytes, stored_place


def check_op_address(inspection: Inspection) -> Iterator[Finding]:
    """Yield every access that strays, with the first slot in which it does."""
    layout = inspection.layout
    for access in inspection.strays:
        start, pitch, page = stored_place(layout, access)
        slots = layout.buffers[access.buffer].slot_count
        beyond = access.first_slot + (access.cell_count - 1) * access.slot_step
        cell = 0 if access.offset_bytes != start or access.pool != layout.buffers[access.buffer].pool else 1
        slot = access.first_slot + cell * access.slot_step
        reached, right = access.offset_bytes + cell * access.pitch_bytes, start + cell * pitch
        if reached == right and beyond >= slots:
            what = f"slot {beyond}, and the buffer has {slots} slots"
        elif reached == right and not same_bytes(access.page, page):
            what = f"a page of {access.page.span_bytes} B, where the storage has one of {page.span_bytes} B"
        else:
            pool = pool_name(layout.pools[access.pool])
            what = f"byte {reached} of {pool} in slot {slot}, where the storage has it at byte {right}"
            what += _victim(layout, access, reached)
        yield Finding(
            rule="op-address",
            message=f"the {access_name(layout, access)} reaches {what}",
            remedy="derive the pointer, mapping offset and pages per slot from the storage that was really built",
            where=(place_of(layout, access.buffer, slot=slot, consumer=access.consumer),),
        )


def _victim(layout: Layout, access: Access, byte: int) -> str:
    """Return whose page the first byte reached belongs to, as the end of a sentence."""
    for buffer in layout.buffers:
        if buffer.pool != access.pool or byte < buffer.offset_bytes or buffer.slot_stride_bytes <= 0:
            continue
        slot, inside = divmod(byte - buffer.offset_bytes, buffer.slot_stride_bytes)
        if slot < buffer.slot_count and inside < buffer.page.span_bytes:
            return f", and reads byte {inside} of layer {buffer.layer}'s {buffer.role} of slot {slot}"
    return ", and reads nobody's page"


RULE = Rule(
    "op-address",
    "a consumer's formula reaches exactly the bytes that the storage gave its role",
    "The storage says where a page lies; kernels compute the address again from what they are given: a pointer, a "
    "mapping offset in K/V pairs, pages per slot, their own page size. Both must agree for every layer, role and "
    "slot, for the attention op, for the tensor views (a dense view counts rows of K/V pairs, so the pages per slot "
    "must divide by the pair), for the planes inside a packed buffer and for the states.",
    check_op_address,
)
