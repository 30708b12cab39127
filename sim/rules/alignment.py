"""Rule ``alignment``: bases, slot pitches and strides are multiples of what is accessed at once."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding
from ..layout import Layout
from .rule import Inspection, Rule, buffer_name, place_of


def check_alignment(inspection: Inspection) -> Iterator[Finding]:
    """Yield buffers and parts that are not aligned to their elements, or to what the spec's consumer declares."""
    layout = inspection.layout
    declared = layout.spec.consumer.alignment_bytes if layout.spec is not None else 1
    pools = layout.pools
    for index, buffer in enumerate(layout.buffers):
        base, pitch = pools[buffer.pool].alignment_bytes, buffer.slot_stride_bytes
        if not buffer.parts:
            page, offset, page_bytes = buffer.page, buffer.offset_bytes, buffer.page_bytes
            need = max(declared, page.format.container_bytes)
            if offset % need or pitch % need or page_bytes % declared or base % declared:
                problem = _problem(declared, need, base, offset, pitch, page_bytes)
                yield _finding(layout, index, buffer_name(buffer), problem)
        for part in buffer.parts:
            page, offset = part.page, buffer.offset_bytes + part.offset_bytes
            need = max(declared, page.format.container_bytes)
            if offset % need or pitch % need or page.span_bytes % declared or base % declared:
                problem = _problem(declared, need, base, offset, pitch, page.span_bytes)
                yield _finding(layout, index, f"layer {part.layer}'s {part.role}", problem)


def _problem(declared: int, need: int, base: int, offset: int, pitch: int, page_bytes: int) -> str:
    """Return what is not aligned, the first of the base, the offset, the pitch and the page; all in bytes."""
    if base % declared:
        what, found = "the pool's base", base
    elif offset % need:
        what, found = "its first byte", offset
    else:
        what, found = ("its slot pitch", pitch) if pitch % need else ("its page", page_bytes)
    whose = "one element" if need > declared else "what the consumer declares"
    return f"{what} ({found} B) is not a multiple of {need} B, {whose}"


def _finding(layout: Layout, index: int, name: str, problem: str) -> Finding:
    return Finding(
        rule="alignment",
        message=f"{name}: {problem}",
        remedy="pad the page or reorder the buffers so that offsets and pitches are multiples of the access width",
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
