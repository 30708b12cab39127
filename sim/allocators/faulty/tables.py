"""Faults of the page table: what the attention op is given, while the storage is right.

Each fault changes fields of the table; the bytes that the op then reaches follow by the op's own formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from ....model.spec import CacheSpec
from ...layout import KEY_SCALE, VALUE, VALUE_SCALE, Access, Layout, PageTable
from ...page import Page
from ..trtllm.allocators import allocate_dense
from ..trtllm.consumers import PagedBuffers, Stored, op_accesses
from ..trtllm.storage import Storage
from .bases import sound_layout

TableChange: TypeAlias = Callable[[PageTable], PageTable]


def with_tables(spec: CacheSpec, name: str, change: TableChange) -> Layout:
    """Return the V2 layout as allocator ``name``, every table changed and the attention op following its tables."""
    layout = sound_layout(spec, name, allocate_dense)
    tables = tuple([change(table) for table in layout.tables])
    by_role = {(buffer.manager, buffer.layer, buffer.role): index for index, buffer in enumerate(layout.buffers)}
    stored = Stored("", 0, 0, 0, Storage((), (), ()), list(layout.pools), list(layout.life_cycles), [*layout.buffers])
    reached: dict[int, Access] = {}
    for table in tables:
        for layer, key, offset in zip(table.layers, table.key_buffers, table.mapping_offsets, strict=True):
            value, key_scale, value_scale = (
                by_role.get((table.manager, layer, role), -1) for role in (VALUE, KEY_SCALE, VALUE_SCALE)
            )
            paged = PagedBuffers(layer, key, value, key_scale, value_scale)
            for access in op_accesses(stored, table, paged, offset):
                reached[access.buffer] = access
    accesses = [
        reached.get(access.buffer, access) if access.consumer == "attention-op" else access
        for access in layout.accesses
    ]
    return msgspec.structs.replace(layout, allocator=name, tables=tables, accesses=tuple(accesses))


def allocate_v_is_k_plus_one(spec: CacheSpec) -> Layout:
    """Return the V2 layout whose tables give a missing page K index -1 and V index 0."""

    def change(table: PageTable) -> PageTable:
        lanes = (-1, 0) if table.kv_factor == 2 else (-1,)
        return msgspec.structs.replace(table, missing_lanes=lanes, missing_guard="negative")

    return with_tables(spec, "fault:v-is-k-plus-one", change)


def allocate_scale_is_pairs(spec: CacheSpec) -> Layout:
    """Return the V2 layout whose index scale counts pairs: half the pages per slot."""

    def change(table: PageTable) -> PageTable:
        pairs = table.index_scale // table.kv_factor  # floor: this is the fault; an odd count loses a page more
        scale_pairs = table.scale_index_scale // table.kv_factor  # floor: as above
        return msgspec.structs.replace(table, index_scale=pairs, scale_index_scale=scale_pairs)

    return with_tables(spec, "fault:scale-is-pairs", change)


def allocate_v_offset_from_k_only(spec: CacheSpec) -> Layout:
    """Return the V2 layout whose V pages are looked for 0 pages behind K."""
    return with_tables(spec, "fault:v-offset-from-k-only", lambda table: msgspec.structs.replace(table, kv_offset=0))


def allocate_scale_pool_uses_data_scale(spec: CacheSpec) -> Layout:
    """Return the V2 layout whose scale pages are addressed in units of data pages."""

    def change(table: PageTable) -> PageTable:
        if table.scale_pool is None:
            return table
        return msgspec.structs.replace(table, scale_page_bytes=table.page_bytes)

    return with_tables(spec, "fault:scale-pool-uses-data-scale", change)


def allocate_ledger_tokens(spec: CacheSpec) -> Layout:
    """Return the V2 layout whose attention op takes a page for ``tokens per block * cp`` tokens."""
    cp = spec.parallel.cp
    name = "fault:ledger-tokens"
    if cp == 1:
        return msgspec.structs.replace(sound_layout(spec, name, allocate_dense), allocator=name)

    def change(table: PageTable) -> PageTable:
        return msgspec.structs.replace(
            table, page_bytes=cp * table.page_bytes, scale_page_bytes=cp * table.scale_page_bytes
        )

    layout = with_tables(spec, name, change)
    larger: dict[Page, Page] = {}
    accesses = []
    for access in layout.accesses:
        if access.consumer == "attention-op":
            page = access.page
            if page not in larger:
                larger[page] = _more_tokens(page, cp)
            access = msgspec.structs.replace(access, page=larger[page])
        accesses.append(access)
    return msgspec.structs.replace(layout, accesses=tuple(accesses))


def _more_tokens(page: Page, times: int) -> Page:
    """Return a dense page with ``times`` as many tokens."""
    shape = [size * times if axis == "token" else size for axis, size in zip(page.axes, page.shape, strict=True)]
    strides = []
    pitch = page.format.container_bytes
    for size in reversed(shape):
        strides.append(pitch)
        pitch *= size
    return msgspec.structs.replace(page, shape=tuple(shape), stride_bytes=tuple(reversed(strides)), span_bytes=pitch)
