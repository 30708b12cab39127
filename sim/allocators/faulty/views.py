"""Faults of a single consumer: its own formula or view strays, while storage and page tables are right."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ....model.formats import ElementFormat
from ....model.spec import CacheSpec
from ...layout import KEY, KEY_SCALE, VALUE, VALUE_SCALE, Access, Buffer, Layout
from ...page import Page
from ..trtllm.allocators import allocate_dense, allocate_qsa_packed
from .bases import sound_layout


def with_accesses(layout: Layout, name: str, consumer: str, change: Callable[[Access, Buffer], Access]) -> Layout:
    """Return ``layout`` as allocator ``name`` with the accesses of one consumer changed."""
    accesses = [
        change(access, layout.buffers[access.buffer]) if access.consumer == consumer else access
        for access in layout.accesses
    ]
    return msgspec.structs.replace(layout, allocator=name, accesses=tuple(accesses))


def allocate_dense_plane_pitch(spec: CacheSpec) -> Layout:
    """Return the V2 layout whose K/V views find block b one page after block b - 1."""
    name = "fault:dense-plane-pitch"
    layout = sound_layout(spec, name, allocate_dense)
    paired = {(buffer.manager, buffer.layer) for buffer in layout.buffers if buffer.role == VALUE}

    def change(access: Access, buffer: Buffer) -> Access:
        if (buffer.manager, buffer.layer) not in paired:
            return access
        return msgspec.structs.replace(access, pitch_bytes=access.slot_step * buffer.page_bytes)

    return with_accesses(layout, name, "kv-view", change)


def allocate_swap_kv_lanes(spec: CacheSpec) -> Layout:
    """Return the V2 layout whose attention op reads V where K is and K where V is, block scales alike."""
    name = "fault:swap-kv-lanes"
    layout = sound_layout(spec, name, allocate_dense)
    other = {KEY: VALUE, VALUE: KEY, KEY_SCALE: VALUE_SCALE, VALUE_SCALE: KEY_SCALE}
    offsets = {}
    for access in layout.accesses:
        buffer = layout.buffers[access.buffer]
        if access.consumer == "attention-op":
            offsets[buffer.manager, buffer.layer, buffer.role] = access.offset_bytes

    def change(access: Access, buffer: Buffer) -> Access:
        lane = other.get(buffer.role, buffer.role)
        offset = offsets.get((buffer.manager, buffer.layer, lane), access.offset_bytes)
        return msgspec.structs.replace(access, offset_bytes=offset)

    return with_accesses(layout, name, "attention-op", change)


def allocate_block_size_from_dim1(spec: CacheSpec) -> Layout:
    """Return the V2 layout whose attention op reads head-major 4-bit pages as token-major ones.

    A head count that 4 does not divide is noticed by the kernel, which then takes the right axis; head counts equal to
    the tokens per block give the right block size by luck.
    """
    seen: dict[Page, Page] = {}

    def change(access: Access, buffer: Buffer) -> Access:
        page = access.page
        if page not in seen:
            seen[page] = _token_major(page, scales=buffer.role in (KEY_SCALE, VALUE_SCALE))
        return access if seen[page] is page else msgspec.structs.replace(access, page=seen[page])

    name = "fault:block-size-from-dim1"
    return with_accesses(sound_layout(spec, name, allocate_dense), name, "attention-op", change)


def _token_major(page: Page, *, scales: bool) -> Page:
    """Return a 4-bit page (or its scales) with heads taken for tokens, where nothing stops the kernel from doing so."""
    if not (scales or page.format is ElementFormat.NVFP4) or "head" not in page.axes:
        return page
    head, token = page.axes.index("head"), page.axes.index("token")
    heads, tokens = page.shape[head], page.shape[token]
    if token < head or heads == tokens or heads % 4:
        return page
    names = {"head": "token", "token": "head"}
    return msgspec.structs.replace(page, axes=tuple([names.get(axis, axis) for axis in page.axes]))


def allocate_global_id_for_extras(spec: CacheSpec) -> Layout:
    """Return the packed QSA layout whose side-plane views are off by the layers of the earlier pipeline stages."""
    layout = sound_layout(spec, "fault:global-id-for-extras", allocate_qsa_packed)
    first = layout.stages[spec.parallel.coordinates(spec.rank).pp_rank][0]

    def change(access: Access, buffer: Buffer) -> Access:
        if buffer.manager != "target":
            return access  # a draft manager of its own numbers its layers from 0
        return msgspec.structs.replace(access, offset_bytes=access.offset_bytes + first * access.page.span_bytes)

    return with_accesses(layout, "fault:global-id-for-extras", "side-plane-view", change)
