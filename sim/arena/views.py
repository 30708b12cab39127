"""``ByteView``: the bytes of one view over a pool, written and read through NumPy strides.

Byte ``u`` of element ``(i, j, ...)`` of cell ``k`` lies at

    offset_bytes + k * pitch_bytes + i * axes[0].stride + j * axes[1].stride + ... + u,    0 <= u < item_bytes

from the pool's base. Axes are reduced: those of size 1 or stride 0 are dropped, negative strides turned around, and an
axis that continues its inner ones is merged into the item. The set of bytes stays the same, and a page without gaps
has no axis left. Offsets are taken from shape and strides alone, never from what a page says of itself.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...model.arithmetic import div_up
from ..layout import Access, Buffer
from ..page import Page

Memory: TypeAlias = NDArray[np.uint8]
Numbers: TypeAlias = NDArray[Any]
"""Owner numbers, in the smallest unsigned type that holds them."""


class ByteView(msgspec.Struct, frozen=True, gc=False):
    """``count`` cells of one shape in pool ``pool``; ``axes`` are (size, stride in bytes), reduced (see the module)."""

    pool: int
    offset_bytes: int
    pitch_bytes: int
    count: int
    axes: tuple[tuple[int, int], ...]
    item_bytes: int

    @property
    def extent_bytes(self) -> int:
        """Bytes from a cell's first byte to one past its last."""
        if not self.axes:
            return self.item_bytes
        return self.item_bytes + sum((size - 1) * stride for size, stride in self.axes)

    @property
    def cell_bytes(self) -> int:
        """Bytes of a cell, those of elements that overlap counted for each."""
        return self.item_bytes * math.prod([size for size, _ in self.axes])

    @property
    def cells_apart(self) -> bool:
        """Whether each cell begins past the end of its neighbour."""
        return self.count < 2 or abs(self.pitch_bytes) >= self.extent_bytes

    def start(self, cell: int) -> int:
        """Return the first byte of a cell, from the pool's base."""
        return self.offset_bytes + cell * self.pitch_bytes

    def inside(self, size_bytes: int) -> range:
        """Return the cells that lie in a pool of ``size_bytes``; they are consecutive, since starts are monotone."""
        last = size_bytes - self.extent_bytes  # the largest start that fits
        end_start = self.offset_bytes + (self.count - 1) * self.pitch_bytes
        if self.item_bytes and 0 <= self.offset_bytes <= last and 0 <= end_start <= last:
            return range(self.count)
        if self.count == 0 or self.item_bytes == 0 or last < 0:
            return range(0)
        if self.pitch_bytes == 0:
            return range(self.count if 0 <= self.offset_bytes <= last else 0)
        low, high = (0, last) if self.pitch_bytes > 0 else (last, 0)
        first = max(0, div_up(low - self.offset_bytes, self.pitch_bytes))
        end = min(self.count, (high - self.offset_bytes) // self.pitch_bytes + 1)  # floor: the last cell that fits
        return range(first, max(first, end))


def view_of_page(pool: int, offset_bytes: int, pitch_bytes: int, count: int, page: Page) -> ByteView:
    """Return ``count`` cells of ``page``, the first at ``offset_bytes``."""
    lowest, axes, item = _reduced(page)
    return ByteView(pool, offset_bytes + lowest, pitch_bytes, count, axes, item)


@functools.lru_cache(maxsize=4096)
def _reduced(page: Page) -> tuple[int, tuple[tuple[int, int], ...], int]:
    """Return a page's lowest byte from its first element on, its reduced axes, and the item's bytes (0: no element)."""
    if 0 in page.shape:
        return 0, (), 0
    lowest, item = 0, page.format.container_bytes
    axes: list[tuple[int, int]] = []
    for size, stride in sorted(zip(page.shape, page.stride_bytes, strict=True), key=_by_stride):
        if size == 1 or stride == 0:
            continue
        lowest += min(0, (size - 1) * stride)
        if not axes and abs(stride) == item:
            item *= size
        else:
            axes.append((size, abs(stride)))
    return lowest, tuple(axes), item


def _by_stride(axis: tuple[int, int]) -> int:
    return abs(axis[1])


def buffer_bytes(buffer: Buffer, part: int = -1) -> ByteView:
    """Return all cells of a buffer's page, or of one of its parts."""
    offset, page = buffer.offset_bytes, buffer.page
    if part >= 0:
        offset += buffer.parts[part].offset_bytes
        page = buffer.parts[part].page
    return view_of_page(buffer.pool, offset, buffer.slot_stride_bytes, buffer.slot_count, page)


def access_bytes(access: Access) -> ByteView:
    """Return all cells that a consumer reaches."""
    return view_of_page(access.pool, access.offset_bytes, access.pitch_bytes, access.cell_count, access.page)


def through(memory: Memory, view: ByteView, cells: range) -> Memory:
    """Return ``cells`` of ``view`` (consecutive, and inside the memory) as a strided view of ``memory``.

    Its axes are the cell, the view's axes, and the byte of the item.
    """
    start = view.start(cells[0]) if cells else 0
    shape = (len(cells), *[size for size, _ in view.axes], view.item_bytes)
    strides = (view.pitch_bytes, *[stride for _, stride in view.axes], 1)
    # unlike as_strided, this refuses strides that would leave the memory
    return np.ndarray(shape, np.uint8, memory, start, strides)


def write(memory: Memory, view: ByteView, cells: range, values: Numbers) -> None:
    """Write ``values[k]`` to every byte of the k-th of ``cells``; where cells share bytes, the later one wins."""
    window = through(memory, view, cells)
    if view.cells_apart:
        window[...] = _along_cells(values, view)
        return
    for cell, value in zip(window, values, strict=True):
        cell[...] = value


def unlike(memory: Memory, view: ByteView, cells: range, values: Numbers) -> NDArray[np.bool_]:
    """Return which bytes of the k-th of ``cells`` differ from ``values[k]``, with the axes of ``through``."""
    found: NDArray[np.bool_] = through(memory, view, cells) != _along_cells(values, view)
    return found


def first_byte(view: ByteView, cells: range, chosen: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Return (place in the pool, cell) of the lowest byte that ``chosen`` (an answer of ``unlike``) marks."""
    by_cell = chosen.reshape(len(cells), -1) if cells else chosen.reshape(0, 1)
    marked = np.flatnonzero(by_cell.any(axis=1))
    found = []
    for position in marked:
        inside = cell_offsets(view)[by_cell[position]].min() if view.axes else by_cell[position].argmax()
        found.append((view.start(cells[int(position)]) + int(inside), cells[int(position)]))
    return min(found, default=None)


def cell_offsets(view: ByteView) -> NDArray[np.int64]:
    """Return the place of every byte of a cell from the cell's start, by plain sums, in the order of the axes."""
    places = np.zeros(1, dtype=np.int64)
    for size, stride in (*view.axes, (view.item_bytes, 1)):
        places = (places[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return places


def cell_place(view: ByteView, cell: int) -> slice | NDArray[np.int64]:
    """Return what indexes the bytes of a cell in an array over the pool."""
    start = view.start(cell)
    return start + cell_offsets(view) if view.axes else slice(start, start + view.item_bytes)


def claim(shadow: Numbers, view: ByteView, cells: range, numbers: Numbers) -> None:
    """Enter ``numbers[k]`` as the owner of every byte of the k-th of ``cells``; the later one wins.

    By slices and sums, not by strides, so that the expected bytes owe nothing to the way the bytes are written.
    """
    if not cells:
        return
    first, span, pitch = view.start(cells[0]), view.item_bytes, view.pitch_bytes
    if not view.axes and pitch >= span and len(cells) > 1:
        body = shadow[first : first + (len(cells) - 1) * pitch].reshape(len(cells) - 1, pitch)
        body[:, :span] = numbers[:-1, None]
        cells, numbers = cells[-1:], numbers[-1:]
    for cell, number in zip(cells, numbers, strict=True):
        shadow[cell_place(view, cell)] = number


def holds(view: ByteView, size_bytes: int, byte: int) -> list[int]:
    """Return the cells of ``view`` inside a pool of ``size_bytes`` that contain ``byte``."""
    cells = view.inside(size_bytes)
    if not cells:
        return []
    distances = byte - (view.start(cells[0]) + np.arange(len(cells), dtype=np.int64) * view.pitch_bytes)
    within = (distances >= 0) & (distances < view.extent_bytes)
    if view.axes and within.any():
        within &= np.isin(distances, cell_offsets(view))
    return [cells.start + int(cell) for cell in np.flatnonzero(within)]


def shared_element(page: Page) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Return the lowest byte that two elements of ``page`` share, from its first element on, and their indices."""
    view = view_of_page(0, 0, 0, 1, page)
    item, shape = page.format.container_bytes, page.shape
    if 0 in shape or (not view.axes and view.item_bytes == item * math.prod(shape)):
        return None
    starts = np.zeros(1, dtype=np.int64)
    for size, stride in zip(shape, page.stride_bytes, strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    order = np.argsort(starts, kind="stable")
    close = np.flatnonzero(np.diff(starts[order]) < item)
    if not close.size:
        return None
    first, second = order[close[0]], order[close[0] + 1]
    index_a, index_b = (tuple(int(x) for x in np.unravel_index(element, shape)) for element in (first, second))
    return int(starts[second]), index_a, index_b


def _along_cells(values: Numbers, view: ByteView) -> Numbers:
    """Return one value per cell with the axes of ``through``."""
    return values.reshape(-1, *[1] * len(view.axes), 1)
