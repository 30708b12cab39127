"""``TritonMemory``: K and V written by the append kernel and read by the fetch kernel, in place of plain indexing.

The kernels are given what the consumer of a role is given: its start, strides and slots. Formats without block scales
alone; what the kernels do not take (block scales, recurrent states, side planes) goes by index as before. Open a device
first: that settles whether Triton compiles or interprets, and so whether the bytes must be the GPU's or the host's.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...model.arithmetic import exact_div
from ...model.spec import CacheSpec
from ...sim.cache.steps import Row
from ...sim.layout import KEY, VALUE, Access
from ...sim.registry import Allocator
from ..paged.views import TORCH_TYPES, CacheView, PagedPlane
from ..quantize.rows import append, fetch
from .codec import decode, encode
from .paged import POISON, PagedMemory

_WRITER, _READER = "attention-op", "kv-view"


class TritonMemory(PagedMemory):
    """One rank whose K and V move through kernels; ``launches`` counts them."""

    def __init__(self, spec: CacheSpec, allocator: str | Allocator, device: str = "cpu") -> None:
        super().__init__(spec, allocator, device)
        self.launches = 0
        self._planes: dict[tuple[int, str, str], PagedPlane] = {}
        layout = self.cache.geometry.layout
        for access in layout.accesses:
            buffer = layout.buffers[access.buffer]
            plain = not access.page.format.block_scaled and "page" not in access.page.axes
            whole = access.first_slot == 0 and access.slot_step == 1
            if buffer.role in (KEY, VALUE) and access.part < 0 and plain and whole:
                view = self._view(access, f"layer {buffer.layer}'s {buffer.role} of the {access.consumer}")
                self._planes[buffer.layer, buffer.role, access.consumer] = PagedPlane(view)

    def put(self, row: Row, layer: int, role: str, position: int, data: torch.Tensor) -> None:
        """See ``PagedMemory``."""
        plane = self._planes.get((layer, role, _WRITER))
        if plane is None:
            super().put(row, layer, role, position, data)
            return
        codes = self._codes(self.planes[layer, role].cycle, row.seat, np.array([position]))
        values = decode(data, plane.data.format).to(torch.float32)[None]
        append(plane, values.to(plane.data.storage.device), *_places(codes, plane))
        self.launches += 1

    def get(self, row: Row, layer: int, role: str, position: int) -> tuple[NDArray[np.int64], torch.Tensor]:
        """See ``PagedMemory``."""
        plane = self._planes.get((layer, role, _READER)) or self._planes.get((layer, role, _WRITER))
        if plane is None:
            return super().get(row, layer, role, position)
        positions, codes = self._found(row, layer, role, position)
        shape = (len(codes), plane.data.size("head"), plane.data.dim)
        values = torch.full(shape, torch.nan, device=plane.data.storage.device)
        fetch(plane, values, *_places(codes, plane))
        self.launches += 1
        data = encode(values.cpu().to(torch.float64), plane.data.format)[0].flatten(1)
        data[torch.from_numpy(codes < 0)] = POISON
        return positions, data

    def _view(self, access: Access, name: str) -> CacheView:
        """Return what a consumer reaches, as the kernels take it."""
        page = access.page
        width = page.format.container_bytes
        start = self.cache.geometry.pool_starts[access.pool] + access.offset_bytes
        return CacheView(
            name,
            self.bytes_as(TORCH_TYPES[page.format], width),
            page.format,
            exact_div(start, width, "bytes before a view"),
            exact_div(access.pitch_bytes, width, "bytes from slot to slot"),
            access.cell_count,
            page.axes,
            page.shape,
            tuple([exact_div(stride, width, "stride in bytes") for stride in page.stride_bytes]),
        )


def _places(codes: NDArray[np.int64], plane: PagedPlane) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (requests, positions, table) that lead to the tokens ``codes``: each is a request of one page."""
    tokens = plane.data.size("token")
    entries = np.where(codes < 0, -1, codes % tokens).astype(np.int32)  # a negative position is skipped
    slots = (np.maximum(codes, 0) // tokens).astype(np.int32)  # floor: the slot of a token
    device = plane.data.storage.device
    requests = torch.arange(len(codes), dtype=torch.int32, device=device)
    return requests, torch.from_numpy(entries).to(device), torch.from_numpy(slots)[:, None].to(device)
