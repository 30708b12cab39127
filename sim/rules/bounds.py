"""Rule ``bounds``: every byte that is addressed lies inside its pool, its slot and its page."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding, Where
from ..page import data_bytes
from .rule import Inspection, Rule, access_name, buffer_name, place_of, pool_name


def check_bounds(inspection: Inspection) -> Iterator[Finding]:
    """Yield buffers that leave their slot or pool, parts that leave their buffer, and accesses that leave the pool."""
    layout = inspection.layout
    pools = layout.pools
    for index, buffer in enumerate(layout.buffers):
        pool = pools[buffer.pool]
        page, offset, stride, count = buffer.page, buffer.offset_bytes, buffer.slot_stride_bytes, buffer.slot_count
        first, end = reach(offset, stride, count, page.span_bytes)
        leaves_slot = stride == pool.slot_bytes and offset + page.span_bytes > stride
        taken = page.span_bytes if page.dense else data_bytes(page)
        if first < 0 or end > pool.size_bytes or leaves_slot or count > pool.slot_count or taken > buffer.page_bytes:
            yield _buffer_finding(inspection, index, first, end)
        for part in buffer.parts:
            if part.offset_bytes < 0 or part.offset_bytes + part.page.span_bytes > buffer.page_bytes:
                yield Finding(
                    rule="bounds",
                    message=f"layer {part.layer}'s {part.role} takes bytes {part.offset_bytes} to "
                    f"{part.offset_bytes + part.page.span_bytes} of a packed {buffer.role} page of "
                    f"{buffer.page_bytes} B",
                    remedy="make the packed page as large as the sum of its planes",
                    where=(place_of(layout, index),),
                )
    for pool in pools:
        if pool.slot_count * pool.slot_bytes > pool.size_bytes:
            yield Finding(
                rule="bounds",
                message=f"{pool_name(pool)} has {pool.size_bytes} B, and its {pool.slot_count} slots of "
                f"{pool.slot_bytes} B take {pool.slot_count * pool.slot_bytes} B",
                remedy="allocate the pool for all of its slots",
                where=(Where(manager=pool.manager, group=pool.group, pool=pool.index),),
            )
    for access in layout.accesses:
        pool = pools[access.pool]
        offset, pitch = access.offset_bytes, access.pitch_bytes
        if 0 <= offset <= pool.size_bytes - access.cell_count * pitch and access.page.span_bytes <= pitch:
            continue  # the common case: every cell fits into its own step
        first, end = reach(offset, pitch, access.cell_count, access.page.span_bytes)
        if first < 0 or end > pool.size_bytes:
            yield Finding(
                rule="bounds",
                message=f"the {access_name(layout, access)} reaches bytes {first} to {end} of {pool_name(pool)}, "
                f"which has {pool.size_bytes} B",
                remedy="check the pointer, the pages per slot and the number of slots that this consumer is given",
                where=(place_of(layout, access.buffer, consumer=access.consumer),),
            )


def reach(offset: int, stride: int, count: int, span: int) -> tuple[int, int]:
    """Return the first byte of ``count`` cells of ``span`` bytes and one past their last, for either sign of stride."""
    if count <= 0:
        return 0, 0  # no cell reaches anything
    far = offset + (count - 1) * stride
    return (offset, far + span) if stride >= 0 else (far, offset + span)


def _buffer_finding(inspection: Inspection, index: int, first: int, end: int) -> Finding:
    layout = inspection.layout
    buffer = layout.buffers[index]
    pool = layout.pools[buffer.pool]
    return Finding(
        rule="bounds",
        message=f"{buffer_name(buffer)} takes bytes {buffer.offset_bytes} to "
        f"{buffer.offset_bytes + buffer.page.span_bytes} of its first slot ({buffer.page_bytes} B reserved, "
        f"{buffer.slot_count} slots, bytes {first} to {end} in all), but {pool_name(pool)} has {pool.slot_count} slots "
        f"of {pool.slot_bytes} B, {pool.size_bytes} B in all",
        remedy="place the buffer inside its slot, and give the pool as many slots as its views have",
        where=(place_of(layout, index),),
    )


RULE = Rule(
    "bounds",
    "every byte addressed lies inside its pool, its slot and its page",
    "A view whose slot is contiguous must stay inside that slot, any other view inside its pool; no view has more "
    "slots than its pool, and the planes of a packed buffer stay inside it. What a consumer's formula reaches must "
    "lie in the pool too, for every slot. Nothing is ever clamped: an address outside its buffer is a read or a "
    "write of somebody else's memory.",
    check_bounds,
)
