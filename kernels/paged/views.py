"""``CacheView``: one role of one layer as a kernel is handed it, and ``LayoutMemory``, which gives views out.

The container ``(i, j, ...)`` of slot ``s`` lies at

    start + s * slot_stride + i * strides[0] + j * strides[1] + ...

containers from the start of the pool's allocation (guard zones included, so every index is positive). Nothing is
contiguous unless the strides say so. A view is built from a buffer's own storage, or from an ``Access``: the formula of
one consumer. So a kernel that is given an access computes what that consumer would compute, right or wrong.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ...model.arithmetic import InexactDivision, exact_div
from ...model.errors import SpecError
from ...model.formats import ElementFormat
from ...sim.layout import Access, Buffer, Layout
from ...sim.page import Page
from ..device import Device
from ..pools import DevicePool, allocate_pool

POISON_BYTE = 0xFF
"""Every format with NaN reads NaN from it: fp32, bf16, fp16, fp8 (e4m3) and block scales."""

TORCH_TYPES = {
    ElementFormat.FP32: torch.float32,
    ElementFormat.FP16: torch.float16,
    ElementFormat.BF16: torch.bfloat16,
    ElementFormat.FP8: torch.uint8,
    ElementFormat.NVFP4: torch.uint8,
    ElementFormat.INT32: torch.int32,
    ElementFormat.UINT8: torch.uint8,
}
"""What a container is for torch and Triton; fp8 and fp4 are bytes that the kernels decode."""

FORMAT_CODES = {
    ElementFormat.FP32: 0,
    ElementFormat.FP16: 1,
    ElementFormat.BF16: 2,
    ElementFormat.FP8: 3,
    ElementFormat.NVFP4: 4,
}
"""What the Triton kernels call the formats that they compute with."""


class CacheView(msgspec.Struct, frozen=True):
    """A strided view of a pool; see the module. Strides and ``start`` count containers, ``shape`` too."""

    name: str
    storage: Any
    format: ElementFormat
    start: int
    slot_stride: int
    slots: int
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def size(self, axis: str) -> int:
        """Return the containers along ``axis``; 1 where the page has no such axis."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1

    def stride(self, axis: str) -> int:
        """Return the containers between neighbours along ``axis``; 0 where the page has no such axis."""
        return self.strides[self.axes.index(axis)] if axis in self.axes else 0

    @property
    def dim(self) -> int:
        """Elements of one head's row."""
        return self.size("dim") * self.format.elements_per_container

    def moves_by(self, containers: int) -> bool:
        """Whether rows are contiguous and every row starts at, and is, a multiple of ``containers``."""
        outer = [self.start, self.slot_stride, *[self.stride(axis) for axis in self.axes if axis != "dim"]]
        aligned = all(value % containers == 0 for value in [*outer, self.size("dim")])
        return aligned and self.stride("dim") == 1

    @property
    def wide(self) -> bool:
        """Whether every row can be moved in pieces of 16 bytes."""
        return self.moves_by(exact_div(16, self.format.container_bytes, "containers of 16 bytes"))

    def tensor(self) -> Any:
        """Return the whole view as a torch tensor of shape (slots, *shape) that shares the pool's bytes."""
        return self.storage.as_strided((self.slots, *self.shape), (self.slot_stride, *self.strides), self.start)


class LayoutMemory:
    """A layout in memory: its pools, and views of them."""

    def __init__(self, device: Device, layout: Layout) -> None:
        self.device = device
        self.layout = layout
        self.pools: list[DevicePool] = [allocate_pool(device, pool) for pool in layout.pools]
        self.fill(POISON_BYTE)

    def fill(self, byte: int) -> None:
        """Set every byte of every pool, guard zones included."""
        for pool in self.pools:
            self.device.words(pool.memory, 1).view(torch.uint8).fill_(byte)

    def of_buffer(self, buffer: Buffer, part: int = -1) -> CacheView:
        """Return the storage of ``buffer``, or of its part number ``part``."""
        offset, page, layer, role = buffer.offset_bytes, buffer.page, buffer.layer, buffer.role
        if part >= 0:
            piece = buffer.parts[part]
            offset, page, layer, role = offset + piece.offset_bytes, piece.page, piece.layer, piece.role
        name = f"layer {layer}'s {role}"
        return self._view(name, buffer.pool, offset, buffer.slot_stride_bytes, buffer.slot_count, page)

    def of_access(self, access: Access) -> CacheView:
        """Return what the consumer of ``access`` reaches.

        Raises ``SpecError`` for an access that stands for a part of the slots only, as the odd rows of a view of pairs.
        """
        buffer = self.layout.buffers[access.buffer]
        layer, role = buffer.layer, buffer.role
        if access.part >= 0:
            layer, role = buffer.parts[access.part].layer, buffer.parts[access.part].role
        name = f"layer {layer}'s {role} of the {access.consumer}"
        if access.first_slot or access.slot_step != 1:
            found = f"found an access from slot {access.first_slot} in steps of {access.slot_step}"
            raise SpecError(name, f"{found}, a kernel needs one that counts all slots")
        return self._view(name, access.pool, access.offset_bytes, access.pitch_bytes, access.cell_count, access.page)

    def _view(self, name: str, pool: int, offset: int, pitch: int, slots: int, page: Page) -> CacheView:
        if page.format not in TORCH_TYPES:
            known = ", ".join(format.value for format in TORCH_TYPES)
            raise SpecError(name, f"found format {page.format.value}, the reference kernels know {known}")
        if "page" in page.axes:
            raise SpecError(name, "found several kernel pages per block, the reference kernels need one")
        held = self.pools[pool]
        last = offset + max(0, (slots - 1) * pitch) + page.span_bytes
        first = offset + min(0, (slots - 1) * pitch)
        if slots > 0 and not (first >= 0 and last <= held.size_bytes):
            found = f"reaches bytes {first} to {last - 1} of a pool of {held.size_bytes} B"
            raise SpecError(name, f"{found}, a kernel needs a view inside its pool: kvsan check names the fault")
        width = page.format.container_bytes
        before = held.base - held.memory.address
        try:
            start = exact_div(before + offset, width, "offset in bytes")
            slot_stride = exact_div(pitch, width, "slot stride in bytes")
            strides = tuple([exact_div(stride, width, "stride in bytes") for stride in page.stride_bytes])
        except InexactDivision as error:
            raise SpecError(name, f"{error}, and kernels address whole {page.format.value} containers") from None
        storage = self.device.words(held.memory, width).view(TORCH_TYPES[page.format])
        return CacheView(name, storage, page.format, start, slot_stride, slots, page.axes, page.shape, strides)


class PagedPlane(msgspec.Struct, frozen=True):
    """K or V (or index keys) of one layer as the kernels take it: the data, and for NVFP4 the block scales.

    ``unit`` multiplies every stored element: the scale of an fp8 plane, the global scale of an NVFP4 plane.
    """

    data: CacheView
    scales: CacheView | None = None
    unit: float = 1.0

    def __post_init__(self) -> None:
        data, scales = self.data, self.scales
        if data.format not in FORMAT_CODES:
            known = ", ".join(format.value for format in FORMAT_CODES)
            raise SpecError(data.name, f"found format {data.format.value}, attention kernels know {known}")
        if data.format.block_scaled != (scales is not None):
            found = "no block scales" if scales is None else "block scales"
            raise SpecError(data.name, f"found {found} with format {data.format.value}")
        if scales is not None:
            needed = [data.slots, data.size("head"), data.size("token"), data.dim]
            found_sizes = [scales.slots, scales.size("head"), scales.size("token"), 16 * scales.size("dim")]
            if needed != found_sizes:
                text = f"found scales for (slots, heads, tokens, dim) {found_sizes}, needs {needed}"
                raise SpecError(scales.name, text)

    @property
    def code(self) -> int:
        """The format, as the Triton kernels call it."""
        return FORMAT_CODES[self.data.format]

    @property
    def wide(self) -> bool:
        """Whether data moves in pieces of 16 bytes, and block scales in pieces of 4."""
        return self.data.wide and (self.scales is None or self.scales.moves_by(4))

    def arguments(self, name: str) -> dict[str, Any]:
        """Return the pointers and strides as keyword arguments ``{name}_...`` of a kernel."""
        scales = self.scales if self.scales is not None else self.data
        strides: dict[str, Any] = {name: self.data.storage, f"{name}_scales": scales.storage}
        for prefix, view in ((name, self.data), (f"{name}_scale", scales)):
            strides[f"{prefix}_start"] = view.start
            strides[f"{prefix}_slot"] = view.slot_stride
            for axis in ("head", "token", "dim"):
                strides[f"{prefix}_{axis}"] = view.stride(axis)
        return strides
