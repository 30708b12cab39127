"""Where the parts of a page lie: K, V, scales, rows, index keys and states, in the three eras' views."""

from __future__ import annotations

import msgspec

from ....model.arithmetic import exact_div
from ....model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ...layout import KEY, KEY_SCALE, VALUE, VALUE_SCALE
from ...page import Page, dense_page, strided_page
from .layer_specs import LayerSpec


class Cell(msgspec.Struct, frozen=True):
    """One role of a page: ``page`` lies ``offset_bytes`` behind the start of the layer's page."""

    role: str
    offset_bytes: int
    page: Page


def state_cells(spec: LayerSpec) -> list[Cell]:
    """Return the states back to back, without any alignment between them."""
    cells, offset = [], 0
    for state in spec.states:
        cells.append(Cell(state.role, offset, dense_page(state.format, state.axes, state.shape)))
        offset += state.size_bytes
    return cells


def row_cells(spec: LayerSpec) -> list[Cell]:
    """Return the rows of a latent layer, or its index keys: one head, token after token."""
    shape = (spec.block_tokens, spec.heads, spec.dim)
    return [Cell(spec.role, 0, dense_page(spec.format, ("token", "head", "dim"), shape))]


def plane_cells(spec: LayerSpec, kv_layout: str, value_offset: int, kernel_tokens: int) -> list[Cell]:
    """Return K and V as dense planes, V's ``value_offset`` bytes behind K's, each kernel block after kernel block."""
    kernel = msgspec.structs.replace(spec, block_tokens=kernel_tokens)
    page = _repeated(
        _plane(spec.format, kernel, spec.dim, kv_layout), spec, kernel, exact_div(kernel.natural_bytes, 2, "K")
    )
    return [Cell(KEY, 0, page), Cell(VALUE, value_offset, page)]


def split_cells(spec: LayerSpec, kv_layout: str, kernel_tokens: int) -> list[Cell]:
    """Return K and V as the halves of each kernel block (eras 1 and 2)."""
    kernel = msgspec.structs.replace(spec, block_tokens=kernel_tokens)
    page = _repeated(_plane(spec.format, kernel, spec.dim, kv_layout), spec, kernel, kernel.natural_bytes)
    return [Cell(KEY, 0, page), Cell(VALUE, exact_div(kernel.natural_bytes, 2, "kernel block of K and V"), page)]


def _repeated(page: Page, spec: LayerSpec, kernel: LayerSpec, stride_bytes: int) -> Page:
    """Return ``page``, of one kernel block, for all kernel blocks of a block; they are ``stride_bytes`` apart."""
    count = exact_div(spec.block_tokens, kernel.block_tokens, "tokens of a block over those of a kernel block")
    if count == 1:
        return page
    axes, shape = ("page", *page.axes), (count, *page.shape)
    return strided_page(page.format, axes, shape, (stride_bytes, *page.stride_bytes))


def content_cells(
    spec: LayerSpec, kv_layout: str, head_stride: int | None = None, kernel_tokens: int | None = None
) -> list[Cell]:
    """Return K and V side by side in each (head, token) cell of ``dim + value_dim`` elements (era 3).

    ``head_stride`` is given where heads are scattered over the block, in bytes; tokens of one head stay together then.
    ``kernel_tokens`` is given where kernels see smaller blocks, each dense.
    """
    if kernel_tokens is not None and kernel_tokens != spec.block_tokens:
        kernel = msgspec.structs.replace(spec, block_tokens=kernel_tokens)
        return [
            Cell(cell.role, cell.offset_bytes, _repeated(cell.page, spec, kernel, kernel.natural_bytes))
            for cell in content_cells(kernel, kv_layout)
        ]
    if spec.format.block_scaled:
        return _side_cells(spec, kv_layout)
    item = spec.format.container_bytes
    content = (spec.dim + spec.value_dim) * item
    heads, tokens = spec.heads, spec.block_tokens
    cells = []
    for role, dim, offset in ((KEY, spec.dim, 0), (VALUE, spec.value_dim, spec.dim * item)):
        if kv_layout == "NHD":
            axes, shape, strides = ("token", "head", "dim"), (tokens, heads, dim), (heads * content, content, item)
        else:
            step = tokens * content if head_stride is None else head_stride
            axes, shape, strides = ("head", "token", "dim"), (heads, tokens, dim), (step, content, item)
        cells.append(Cell(role, offset, strided_page(spec.format, axes, shape, strides)))
    return cells


def _side_cells(spec: LayerSpec, kv_layout: str) -> list[Cell]:
    """Return NVFP4 sides: all K data, all K scales, all V data, all V scales."""
    blocks = exact_div(spec.dim, SCALE_BLOCK_ELEMENTS, "head dim in elements per block scale")
    cells, offset = [], 0
    for role, scale_role in ((KEY, KEY_SCALE), (VALUE, VALUE_SCALE)):
        for name, format, dim in ((role, spec.format, spec.dim), (scale_role, ElementFormat.FP8, blocks)):
            page = _plane(format, spec, dim, kv_layout)
            cells.append(Cell(name, offset, page))
            offset += page.span_bytes
    return cells


def _plane(format: ElementFormat, spec: LayerSpec, dim: int, kv_layout: str) -> Page:
    if kv_layout == "HND":
        return dense_page(format, ("head", "token", "dim"), (spec.heads, spec.block_tokens, dim))
    return dense_page(format, ("token", "head", "dim"), (spec.block_tokens, spec.heads, dim))
