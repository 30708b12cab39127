"""Rule ``kv-dtype``: the KV format is the one that was asked for, and accuracy is compared with its own reference."""

from __future__ import annotations

from collections.abc import Iterator

from ...model.formats import ElementFormat
from ...model.layers import paged_part
from ...model.selection import KvDecision
from ..finding import Finding
from .rule import Inspection, Rule, buffer_name, place_of

_REMEDY = "store what was asked for, or refuse with the formats that can be stored"


def check_kv_dtype(decision: KvDecision) -> Iterator[Finding]:
    """Yield an effective format that nobody asked for, and a reference measured with another one."""
    if decision.effective is None:
        return
    asked = decision.request.asked
    if decision.effective is not asked:
        yield Finding(
            rule="kv-dtype",
            message=f"the KV format {asked.value} is asked for, and the run has {decision.effective.value}",
            remedy=_REMEDY,
        )
    reference = decision.reference
    if reference is not None and reference.measured_with is not decision.effective:
        selector = "has no KV selector" if reference.kv_format is None else "has another KV selector"
        yield Finding(
            rule="kv-dtype",
            message=f"the run has KV in {decision.effective.value}, and the accuracy reference {reference.name} was "
            f"measured with {reference.measured_with.value}: it {selector}",
            remedy="register a reference for this KV format, and match the selector exactly",
        )


def check_stored_format(inspection: Inspection) -> Iterator[Finding]:
    """Yield K and V pages stored in another format than the spec asks for their layer, each pair of formats once.

    Pages declared as plain bytes (uint8, or the int8 containers of NVFP4) say nothing about their format.
    """
    layout = inspection.layout
    spec = layout.spec
    if spec is None:
        return
    layers = spec.layers + spec.draft.layers
    seen: set[tuple[ElementFormat, ElementFormat]] = set()
    for index, buffer in enumerate(layout.buffers):
        if buffer.role not in ("key", "value") or not 0 <= buffer.layer < len(layers):
            continue
        paged = paged_part(layers[buffer.layer])
        asked = spec.kv_format if paged is None or paged.kv_format is None else paged.kv_format
        found = buffer.page.format
        if found is asked or _plain_bytes(found, asked) or (found, asked) in seen:
            continue
        seen.add((found, asked))
        yield Finding(
            rule="kv-dtype",
            message=f"{buffer_name(buffer)} is stored as {found.value}, and {asked.value} is asked for",
            remedy=_REMEDY,
            where=(place_of(layout, index),),
        )


def _plain_bytes(found: ElementFormat, asked: ElementFormat) -> bool:
    return found is ElementFormat.UINT8 or (found is ElementFormat.INT8 and asked is ElementFormat.NVFP4)


RULE = Rule(
    "kv-dtype",
    "the effective KV format is the requested one, and an accuracy reference matches it exactly",
    "Where the hardware or its kernels lack a KV format, the run is refused: silently storing another one changes both "
    "the memory and the answers. An accuracy reference says which KV format it was measured with; one without a KV "
    "selector was measured with the model's own format and never stands in for a quantized cache. `kvsan check` asks "
    "it of the pages that an allocator stores, `kvsan select` of the decision.",
    check_stored_format,
)
