"""Rule ``alignment``: bases, slot pitches and strides are multiples of what is accessed at once."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding
from ..page import Page
from .rule import Inspection, Rule, buffer_name, place_of


def check_alignment(inspection: Inspection) -> Iterator[Finding]:
    """Yield buffers and parts that are not aligned to their elements, or to what the spec's consumer declares."""
    layout = inspection.layout
    declared = layout.spec.consumer.alignment_bytes if layout.spec is not None else 1
    for index, buffer in enumerate(layout.buffers):
        pool_alignment = layout.pools[buffer.pool].alignment_bytes
        views: list[tuple[str, int, Page, int]] = [
            (buffer_name(buffer), buffer.offset_bytes, buffer.page, buffer.page_bytes)
        ]
        if buffer.parts:
            views = [
                (
                    f"layer {part.layer}'s {part.role}",
                    buffer.offset_bytes + part.offset_bytes,
                    part.page,
                    part.page.span_bytes,
                )
                for part in buffer.parts
            ]
        for name, offset, page, page_bytes in views:
            need = max(declared, page.format.container_bytes)
            pitch = buffer.slot_stride_bytes
            if not (offset % need or pitch % need or page_bytes % declared) and (
                declared == 1 or pool_alignment % declared == 0
            ):
                continue
            if not (offset % need or pitch % need or page_bytes % declared):
                problem, found = "the pool's base", pool_alignment
            elif offset % need:
                problem, found = "its first byte", offset
            else:
                problem, found = ("its slot pitch", pitch) if pitch % need else ("its page", page_bytes)
            whose = "one element" if need > declared else "what the consumer declares"
            yield Finding(
                rule="alignment",
                message=f"{name}: {problem} ({found} B) is not a multiple of {need} B, {whose}",
                remedy="pad the page or reorder the buffers so that offsets and pitches are multiples of the access "
                "width",
                where=(place_of(layout, index),),
            )


RULE = Rule(
    "alignment",
    "bases, slot pitches and pages are multiples of the access width",
    "Every view must be aligned to its own element, or it cannot be made at all. Wider accesses (16 B for vector "
    "loads, 128 B for tensor copies) are checked where the spec's consumer declares that it needs them: base, slot "
    "pitch and page must then be multiples of the declared width. Storage does not pad slots, so one odd page moves "
    "everything behind it.",
    check_alignment,
)
