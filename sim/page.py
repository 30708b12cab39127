"""``Page``: what one page holds and how it is strided.

A page is described in storage containers, the smallest pieces a view can address: one element for most formats, one
byte of
two elements for NVFP4. So an NVFP4 K page of dim D has last axis D/2 and stride 1 byte.
"""

from __future__ import annotations

import math

import msgspec

from ..model.arithmetic import exact_div
from ..model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat


class Page(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """One page of one role.

    ``axes`` names the axes from outermost in, ``shape`` counts storage containers along each, ``stride_bytes`` are
    the byte
    distances between neighbours. ``span_bytes`` is the distance from the first byte to one past the last, and
    ``dense`` says
    that the page fills its span without gap or overlap. ``self_overlap`` declares that elements share bytes on purpose.
    """

    format: ElementFormat
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    span_bytes: int
    dense: bool
    self_overlap: bool = False


def dense_page(format: ElementFormat, axes: tuple[str, ...], shape: tuple[int, ...]) -> Page:
    """Return a page stored row-major without gaps; ``shape`` counts elements.

    Raises ``InexactDivision`` when the last axis does not fill whole storage containers.
    """
    last = exact_div(shape[-1], format.elements_per_container, f"{axes[-1]} axis of a {format.value} page")
    shape = (*shape[:-1], last)
    strides = []
    pitch = format.container_bytes
    for size in reversed(shape):
        strides.append(pitch)
        pitch *= size
    return Page(format, axes, shape, tuple(reversed(strides)), pitch, True)


def strided_page(
    format: ElementFormat, axes: tuple[str, ...], shape: tuple[int, ...], stride_bytes: tuple[int, ...]
) -> Page:
    """Return a page with arbitrary non-negative strides; ``shape`` counts storage containers, strides are bytes."""
    span = format.container_bytes + sum((size - 1) * stride for size, stride in zip(shape, stride_bytes, strict=True))
    return Page(format, axes, shape, stride_bytes, span, _is_dense(format.container_bytes, shape, stride_bytes))


def data_bytes(page: Page) -> int:
    """Return the bytes that a page's elements take, gaps left out; at most its span, however they overlap."""
    return min(page.span_bytes, page.format.container_bytes * math.prod(page.shape))


def _is_dense(container_bytes: int, shape: tuple[int, ...], stride_bytes: tuple[int, ...]) -> bool:
    """Whether the axes, from the smallest stride up, each continue exactly where the inner ones end."""
    pitch = container_bytes
    for stride, size in sorted(zip(stride_bytes, shape, strict=True)):
        if size == 1:
            continue
        if stride != pitch:
            return False
        pitch *= size
    return True


def kv_page(format: ElementFormat, heads: int, tokens: int, dim: int, kv_layout: str) -> Page:
    """Return a K or V page of ``heads x tokens x dim`` elements, head-major (HND) or token-major (NHD)."""
    if kv_layout == "HND":
        return dense_page(format, ("head", "token", "dim"), (heads, tokens, dim))
    return dense_page(format, ("token", "head", "dim"), (tokens, heads, dim))


def scale_page(heads: int, tokens: int, dim: int, kv_layout: str) -> Page:
    """Return the block-scale page of an NVFP4 K or V page: one fp8 scale per 16 elements of each head's row.

    Raises ``InexactDivision`` when ``dim`` does not divide by 16.
    """
    blocks = exact_div(dim, SCALE_BLOCK_ELEMENTS, "head dim of an nvfp4 page, in elements per block scale")
    return kv_page(ElementFormat.FP8, heads, tokens, blocks, kv_layout)


def repeated_page(page: Page, count: int) -> Page:
    """Return ``count`` dense pages one after the other as one page with a leading axis ``page``."""
    if count == 1:
        return page
    return Page(
        page.format,
        ("page", *page.axes),
        (count, *page.shape),
        (page.span_bytes, *page.stride_bytes),
        page.span_bytes * count,
        page.dense,
        page.self_overlap,
    )
