"""Faults of the mapping offset: how many K/V pairs a layer's K page lies behind its representative's."""

from __future__ import annotations

from ....model.arithmetic import exact_div
from ....model.spec import CacheSpec
from ...layout import KEY, Layout
from ...rejection import Rejected
from ..trtllm.consumers import MappingQuestion, Stored, exact_mapping
from ..trtllm.manager_v2 import PolicyV2, allocate_v2
from .bases import sound_layout


def floored_mapping(question: MappingQuestion) -> int:
    """Return the K page's mapping offset rounded down, for its scales too: no check is left that would compare them."""
    stored = question.stored
    key = stored.at(_key_of(stored, question.buffer))
    first = _key_of(stored, question.representative)
    entry = stored.placement(first).registration
    pair_bytes = 2 * exact_div(entry.size_bytes, entry.expansion, "bytes of a kernel page")
    distance_bytes = key.offset_bytes - stored.at(first).offset_bytes
    return distance_bytes // pair_bytes  # floor: this is the fault


def _key_of(stored: Stored, index: int) -> int:
    """Return the K page of the layer that owns a K page or K scale page; it is registered first."""
    while stored.at(index).role != KEY:
        index -= 1
    return index


def offset_from_one(question: MappingQuestion) -> int:
    """Return the mapping offset of the next layer."""
    return exact_mapping(question) + 1


COALESCE_BY_SIZE = PolicyV2("fault:coalesce-by-size", "separate", floored_mapping)
BARE_ASSERT = PolicyV2("fault:bare-assert", "separate")
LAYER_ORDINAL = PolicyV2("fault:layer-ordinal-off-by-one", "unsupported", offset_from_one)


def allocate_coalesce_by_size(spec: CacheSpec) -> Layout:
    """Return the legacy QSA layout with every mapping offset rounded down.

    Where nothing needs rounding this is the legacy policy, which is at fault itself when a guest in the K/V pool leaves
    the scale pool with other pages per slot; such a spec is refused as outside, so that all findings are this fault's.
    """
    layout = allocate_v2(spec, COALESCE_BY_SIZE)
    if not any(_rounded(layout)):
        for table in layout.tables:
            if table.scale_pool is not None and table.scale_index_scale != table.index_scale:
                raise Rejected(
                    f"no offset needs rounding, and the scale pool has {table.scale_index_scale} pages per slot where "
                    f"the data pool has {table.index_scale}, which is the legacy policy's own weakness",
                    "use --allocator trtllm-v2-qsa-legacy",
                    supported=False,
                )
    return layout


def _rounded(layout: Layout) -> list[bool]:
    """Return for each layer with a page table whether its mapping offset was rounded."""
    found = []
    for table in layout.tables:
        pair = table.kv_factor * table.page_bytes
        for key, offset in zip(table.key_buffers, table.mapping_offsets, strict=True):
            distance = layout.buffers[key].offset_bytes - table.pointer_bytes - table.row_offset * table.page_bytes
            found.append(offset * pair != distance)
    return found


def allocate_bare_assert(spec: CacheSpec) -> Layout:
    """Return the legacy QSA layout; raise AssertionError without a word where the legacy policy refuses and explains.

    The error is raised, not asserted, so that it is there under ``python -O`` too.
    """
    try:
        return allocate_v2(spec, BARE_ASSERT)
    except Rejected as rejection:
        if rejection.supported:
            raise AssertionError from None
        raise


def allocate_layer_ordinal_off_by_one(spec: CacheSpec) -> Layout:
    """Return the V2 layout with the mapping offset of the first layer 1, of the second 2, and so on."""
    return sound_layout(spec, LAYER_ORDINAL.name, lambda each: allocate_v2(each, LAYER_ORDINAL))
