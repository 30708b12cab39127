"""A second pair of eyes: the same cells read element by element, from shapes and strides as they were declared.

On a GPU this is CUDA C++ through CuPy, on the host NumPy's own strided indexing. Neither shares a line of address
arithmetic with the Triton kernels, nor the reduction of axes that their rows went through, so that a mistake that
``stamp`` and ``verify`` have in common does not cancel out.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Final

import msgspec
import numpy as np

from ...model.errors import SpecError
from ...sim.page import Page
from ..device import Device
from .rows import AXES, Integers

COLUMNS: Final = 7 + 2 * AXES
"""Address of element 0 of the first cell, pitch, bytes of an element, number of the first cell, first cell's place in
the results, pool, unused; then size and stride of each axis, outermost first."""

_SOURCE: Final = r"""
extern "C" __global__ void verify_elements(
    const long long* rows, const long long* ends, int row_count, long long total, int digit,
    unsigned long long* counts, long long* lowest)
{
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < total;
         i += gridDim.x * (long long)blockDim.x) {
        int low = 0, high = row_count;
        while (low < high) {
            int middle = (low + high) / 2;
            if (ends[middle] > i) high = middle; else low = middle + 1;
        }
        const long long* row = rows + (long long)low * COLUMNS;
        unsigned long long rest = i - (low ? ends[low - 1] : 0);
        long long address = row[0];
        for (int axis = AXES - 1; axis >= 0; --axis) {
            unsigned long long size = row[7 + 2 * axis];
            if (size == 1) continue;
            unsigned long long outer = rest / size;
            address += (long long)(rest - outer * size) * row[8 + 2 * axis];
            rest = outer;
        }
        address += (long long)rest * row[1];
        unsigned char expected = (unsigned char)((row[3] + (long long)rest) >> (8 * digit));
        for (long long byte = 0; byte < row[2]; ++byte) {
            if (*(const unsigned char*)(address + byte) != expected) {
                atomicAdd(counts + row[4], 1ULL);
                atomicMin(lowest + row[4], address + byte);
            }
        }
    }
}
"""


def element_rows(
    offset_bytes: int, pitch_bytes: int, cells: range, page: Page, number: int, pool: int, place: int
) -> tuple[int, ...]:
    """Return the row of ``cells`` (part of a view whose element 0 of cell 0 is at ``offset_bytes`` of its pool).

    ``number`` is that of cell 0. Raises ``SpecError`` on a page of more than ``AXES`` axes.
    """
    if len(page.shape) > AXES:
        raise SpecError("page", f"found {len(page.shape)} axes, needs at most {AXES} to be read element by element")
    axes = ((1, 0),) * (AXES - len(page.shape)) + tuple(zip(page.shape, page.stride_bytes, strict=True))
    return (
        offset_bytes + cells.start * pitch_bytes,
        pitch_bytes,
        page.format.container_bytes,
        number + cells.start,
        place,
        pool,
        len(cells),
        *[value for axis in axes for value in axis],
    )


class ElementTable(msgspec.Struct, frozen=True):
    """Rows with addresses, on the host and on the device, and how many elements come before the end of each."""

    rows: Integers
    uploaded: Any
    ends: Any
    total: int

    @classmethod
    def upload(cls, device: Device, rows: list[tuple[int, ...]], addresses: Integers) -> ElementTable:
        """Return ``rows`` placed at the pools' ``addresses``, on ``device``."""
        table: Integers = np.array(rows, dtype=np.int64).reshape(len(rows), COLUMNS)
        table[:, 0] += addresses[table[:, 5]]
        ends = np.cumsum(table[:, 6] * np.prod(table[:, 7::2], axis=1))
        return cls(table, device.upload(table), device.upload(ends), int(ends[-1]) if len(rows) else 0)


def verify_elements(device: Device, table: ElementTable, digit: int, counts: Any, lowest: Any) -> None:
    """Add to ``counts`` the bytes that differ from digit ``digit`` of their cell's number, and keep the lowest address.

    ``counts`` and ``lowest`` are int64 tensors on the device.
    """
    if table.total == 0:
        return
    if device.kind == "cuda":
        _verify_cuda(table, digit, counts, lowest)
        return
    for row in table.rows.tolist():
        _verify_row(device, row, digit, counts.numpy(), lowest.numpy())


@functools.cache
def _kernel() -> Any:
    cupy = importlib.import_module("cupy")
    options = (f"-DAXES={AXES}", f"-DCOLUMNS={COLUMNS}")
    return cupy.RawKernel(_SOURCE, "verify_elements", options=options)


def _verify_cuda(table: ElementTable, digit: int, counts: Any, lowest: Any) -> None:
    cupy = importlib.import_module("cupy")
    threads = 256
    blocks = min(-(-table.total // threads), 1 << 16)  # floor: up, at most so many blocks
    arguments = (
        cupy.from_dlpack(table.uploaded),
        cupy.from_dlpack(table.ends),
        np.int32(len(table.rows)),
        np.int64(table.total),
        np.int32(digit),
        cupy.from_dlpack(counts),
        cupy.from_dlpack(lowest),
    )
    _kernel()((blocks,), (threads,), arguments)


def _verify_row(device: Device, row: list[int], digit: int, counts: Integers, lowest: Integers) -> None:
    """Verify one row on the host, through a NumPy view of exactly the bytes from its lowest to its highest."""
    address, pitch, container, first, place, _, cells = row[:7]
    shape = (cells, *row[7::2], container)
    strides = (pitch, *row[8::2], 1)
    if 0 in shape:
        return
    before = sum(min(0, (size - 1) * stride) for size, stride in zip(shape, strides, strict=True))
    extent = 1 + sum((size - 1) * abs(stride) for size, stride in zip(shape, strides, strict=True))
    held = device.borrow(address + before, extent)
    window = np.ndarray(shape, np.uint8, held, -before, strides)
    expected = ((first + np.arange(cells, dtype=np.int64)) >> (8 * digit)).astype(np.uint8)
    wrong = np.argwhere(window != expected.reshape(-1, *[1] * (len(shape) - 1)))
    if len(wrong):
        counts[place] += len(wrong)
        lowest[place] = min(int(lowest[place]), address + int((wrong @ np.array(strides, dtype=np.int64)).min()))
