"""``Rule``, and ``Inspection``: a layout with what several rules look up in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from ..finding import Finding, Where
from ..layout import Access, Buffer, Layout, Pool
from ..page import Page


class Inspection(msgspec.Struct, frozen=True):
    """A layout and its look-up tables.

    ``by_role`` gives a buffer's place by (manager, layer, role); ``by_pool`` the places of the buffers of each pool;
    ``strays`` the accesses
    that do not reach exactly the bytes of the buffer (or part) that they stand for.
    """

    layout: Layout
    by_role: dict[tuple[str, int, str], int]
    by_pool: list[list[int]]
    strays: list[Access]


RuleCheck: TypeAlias = Callable[[Inspection], Iterator[Finding]]


class Rule(msgspec.Struct, frozen=True):
    """A short name, one line, one paragraph, and the check; ``check`` is None for rules about an allocator's
    refusals or about decisions (the choice of a manager)."""

    name: str
    summary: str
    explanation: str
    check: RuleCheck | None


def inspect(layout: Layout) -> Inspection:
    """Return ``layout`` with its look-up tables."""
    by_role: dict[tuple[str, int, str], int] = {}
    by_pool: list[list[int]] = [[] for _ in layout.pools]
    for index, buffer in enumerate(layout.buffers):
        by_role[buffer.manager, buffer.layer, buffer.role] = index
        by_pool[buffer.pool].append(index)
    buffers = layout.buffers
    strays = []
    for access in layout.accesses:
        buffer = buffers[access.buffer]
        if access.part >= 0:
            part = buffer.parts[access.part]
            start, page = buffer.offset_bytes + part.offset_bytes, part.page
        else:
            start, page = buffer.offset_bytes, buffer.page
        stride = buffer.slot_stride_bytes
        if (
            access.pool != buffer.pool
            or access.offset_bytes != start + access.first_slot * stride
            or (access.pitch_bytes != access.slot_step * stride and access.cell_count > 1)
            or access.first_slot + (access.cell_count - 1) * access.slot_step >= buffer.slot_count
            or (access.page is not page and not same_bytes(access.page, page))
        ):
            strays.append(access)
    return Inspection(layout, by_role, by_pool, strays)


def same_bytes(one: Page, other: Page) -> bool:
    """Whether two pages at one place cover the same bytes, whatever they call their axes."""
    if one.dense and other.dense:
        return one.span_bytes == other.span_bytes
    return (one.stride_bytes == other.stride_bytes and one.shape == other.shape) or _runs(one) == _runs(other)


def _runs(page: Page) -> tuple[int, list[tuple[int, int]]]:
    """Return a page as a dense run of bytes repeated along axes (count, stride), inner axes merged where they
    continue."""
    run = page.format.container_bytes
    axes: list[tuple[int, int]] = []
    for stride, size in sorted(zip(page.stride_bytes, page.shape, strict=True)):
        if size == 1 or stride == 0:
            continue  # one element, or the same one again and again
        if not axes and stride == run:
            run *= size
        elif axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = (axes[-1][0] * size, axes[-1][1])
        else:
            axes.append((size, stride))
    return run, axes


def stored_place(layout: Layout, access: Access) -> tuple[int, int, Page]:
    """Return where the storage has the first cell that ``access`` stands for: first byte, pitch in bytes, and its
    page."""
    buffer = layout.buffers[access.buffer]
    start, page = buffer.offset_bytes, buffer.page
    if access.part >= 0:
        start += buffer.parts[access.part].offset_bytes
        page = buffer.parts[access.part].page
    return start + access.first_slot * buffer.slot_stride_bytes, access.slot_step * buffer.slot_stride_bytes, page


def access_name(layout: Layout, access: Access) -> str:
    """Return how a message calls an access, such as ``attention-op of layer 3's key``."""
    buffer = layout.buffers[access.buffer]
    layer, role = buffer.layer, buffer.role
    if access.part >= 0:
        layer, role = buffer.parts[access.part].layer, buffer.parts[access.part].role
    return f"{access.consumer} of layer {layer}'s {role}"


def buffer_name(buffer: Buffer) -> str:
    """Return how a message calls a buffer, such as ``layer 3's key``."""
    owner = "draft layer" if buffer.manager == "draft" else "layer"
    return f"{owner} {buffer.layer}'s {buffer.role}"


def pool_name(pool: Pool) -> str:
    """Return how a message calls a pool, such as ``pool 0 of group 1``."""
    return f"pool {pool.index} of {pool.manager + ' ' if pool.manager != 'target' else ''}group {pool.group}"


def place_of(
    layout: Layout, index: int, *, slot: int | None = None, byte: int | None = None, consumer: str | None = None
) -> Where:
    """Return the place of a buffer, or of one byte of it (counted from the pool's base)."""
    buffer = layout.buffers[index]
    pool = layout.pools[buffer.pool]
    first = buffer.offset_bytes + (slot or 0) * buffer.slot_stride_bytes if byte is None else byte
    return Where(
        manager=buffer.manager,
        layer=buffer.layer,
        role=buffer.role,
        group=pool.group,
        pool=pool.index,
        slot=slot,
        consumer=consumer,
        first_byte=first,
        last_byte=first + buffer.page.span_bytes - 1 if byte is None else byte,
    )
