"""Rule ``stride``: a view steps by the physical pitch of what it walks."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding
from .rule import Inspection, Rule, access_name, buffer_name, place_of, pool_name, stored_place


def check_stride(inspection: Inspection) -> Iterator[Finding]:
    """Yield accesses whose pitch or page strides differ from the storage, and life cycles with several pitches in a
    pool."""
    layout = inspection.layout
    for access in inspection.strays:
        _, pitch, page = stored_place(layout, access)
        if access.pitch_bytes != pitch and access.cell_count > 1:
            yield Finding(
                rule="stride",
                message=f"the {access_name(layout, access)} steps {access.pitch_bytes} B from one slot to the next, "
                f"where the storage steps {pitch} B",
                remedy="take the step from the storage (pages per slot times page bytes), not from the consumer's "
                "own shape",
                where=(place_of(layout, access.buffer, consumer=access.consumer),),
            )
    for access in layout.accesses:
        page = (
            layout.buffers[access.buffer].page
            if access.part < 0
            else layout.buffers[access.buffer].parts[access.part].page
        )
        if (
            access.page is not page
            and access.page.shape == page.shape
            and access.page.stride_bytes != page.stride_bytes
        ):
            yield Finding(
                rule="stride",
                message=f"the {access_name(layout, access)} has strides {access.page.stride_bytes} B on axes "
                f"{', '.join(access.page.axes)}, where the storage has {page.stride_bytes} B on "
                f"{', '.join(page.axes)}",
                remedy="give the consumer the storage's strides, on axes of size 1 too",
                where=(place_of(layout, access.buffer, consumer=access.consumer),),
            )
    yield from _mixed_pitches(inspection)


def _mixed_pitches(inspection: Inspection) -> Iterator[Finding]:
    layout = inspection.layout
    for pool, members in zip(layout.pools, inspection.by_pool, strict=True):
        seen: dict[int, int] = {}
        for index in members:
            buffer = layout.buffers[index]
            first = seen.setdefault(buffer.life_cycle, index)
            if layout.buffers[first].slot_stride_bytes != buffer.slot_stride_bytes:
                other = layout.buffers[first]
                yield Finding(
                    rule="stride",
                    message=f"{buffer_name(buffer)} steps {buffer.slot_stride_bytes} B per slot and "
                    f"{buffer_name(other)} steps {other.slot_stride_bytes} B, in one life cycle of "
                    f"{pool_name(pool)}",
                    remedy="give all buffers of a life cycle in one pool the same slot pitch",
                    where=(place_of(layout, index), place_of(layout, first)),
                )


RULE = Rule(
    "stride",
    "a view steps by the physical pitch of the page it walks",
    "The distance from one slot to the next belongs to the pool: it is the slot's bytes, not the page's, wherever "
    "several pages share a slot. A consumer that derives the distance from its own shape (as if K were one dense "
    "plane) is right in the first slot and wrong in all others. Strides inside the page must equal the storage's as "
    "well, also on axes of size 1, where a wrong stride is harmless until somebody reshapes the view.",
    check_stride,
)
