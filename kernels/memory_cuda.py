"""A CUDA GPU as a device: CuPy memory, and compiled kernels on torch's current stream."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import torch
from numpy.typing import NDArray

from ..model.errors import SpecError
from .device import DeviceKind
from .tensors import integers_of


class DeviceMemory:
    """CuPy bytes; the allocator aligns them to 512."""

    def __init__(self, size_bytes: int) -> None:
        self.array = cupy.empty(size_bytes, dtype=cupy.uint8)
        self.address: int = self.array.data.ptr
        self.size_bytes = size_bytes


class PinnedMemory:
    """Pinned bytes of the host, which the GPU reaches at the same address; they begin at a multiple of 256."""

    def __init__(self, size_bytes: int) -> None:
        self.pinned = cupy.cuda.alloc_pinned_memory(size_bytes + 256)
        self.address: int = self.pinned.ptr + -self.pinned.ptr % 256
        self.size_bytes = size_bytes


class CudaDevice:
    """The current CUDA GPU. CuPy's default stream and torch's are the same legacy stream, so their work is in order."""

    kind: DeviceKind = "cuda"
    # a warp per program and 32 words a thread reach the copy's bandwidth; see docs/measurements.md
    block_words = 1024
    short_block_words = 1024
    fold_block_words = 2048
    warps = 1

    def __init__(self) -> None:
        self.name: str = torch.cuda.get_device_name()

    def allocate(self, size_bytes: int) -> DeviceMemory:
        """Return CuPy memory."""
        try:
            return DeviceMemory(size_bytes)
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(f"{self.name} has no {size_bytes} B left") from error

    def allocate_host(self, size_bytes: int) -> PinnedMemory:
        """Return pinned memory."""
        return PinnedMemory(size_bytes)

    def upload(self, values: NDArray[Any]) -> torch.Tensor:
        """Return a tensor on the GPU with the same values."""
        return torch.from_numpy(np.ascontiguousarray(values)).to("cuda")

    def download(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return a copy of the bytes at ``address``, after everything launched before."""
        copied = np.empty(size_bytes, dtype=np.uint8)
        self.synchronize()
        if size_bytes:
            cupy.cuda.runtime.memcpy(copied.ctypes.data, address, size_bytes, cupy.cuda.runtime.memcpyDefault)
        return copied

    def download_many(self, places: list[tuple[int, int]]) -> list[NDArray[np.uint8]]:
        """Return copies of the bytes at several (address, bytes), through pinned memory, waiting once."""
        total = sum(size_bytes for _, size_bytes in places)
        if total == 0:
            return [np.empty(0, dtype=np.uint8) for _ in places]
        pinned = cupy.cuda.alloc_pinned_memory(total)
        copied = np.frombuffer(pinned, dtype=np.uint8, count=total)
        stream = cupy.cuda.get_current_stream().ptr
        parts, at = [], 0
        for address, size_bytes in places:
            if size_bytes:
                either = cupy.cuda.runtime.memcpyDefault
                cupy.cuda.runtime.memcpyAsync(pinned.ptr + at, address, size_bytes, either, stream)
            parts.append(copied[at : at + size_bytes])
            at += size_bytes
        self.synchronize()
        return parts

    def borrow(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Raise: the host cannot read device memory in place."""
        raise TypeError(f"{size_bytes} B at {address} are on {self.name}, and the host cannot read them in place")

    def write(self, address: int, values: NDArray[np.uint8]) -> None:
        """Copy ``values`` to ``address``."""
        held = np.ascontiguousarray(values)
        if held.size:
            cupy.cuda.runtime.memcpy(address, held.ctypes.data, held.size, cupy.cuda.runtime.memcpyDefault)

    def words(self, memory: DeviceMemory, width: int) -> torch.Tensor:
        """Return the bytes as a tensor of integers of ``width`` bytes that shares them, through DLPack."""
        return integers_of(torch.from_dlpack(memory.array), width)

    def synchronize(self) -> None:
        """Wait for the GPU; raises what a kernel did wrong."""
        cupy.cuda.runtime.deviceSynchronize()

    def free_bytes(self) -> int:
        """Return the bytes that the driver and CuPy's pool can still give."""
        free, _ = cupy.cuda.runtime.memGetInfo()
        return int(free) + int(cupy.get_default_memory_pool().free_bytes())


def open_device() -> CudaDevice:
    """Return the current GPU, or raise ``SpecError`` in one line where there is none that works."""
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise SpecError("device", f"cuda needs a working NVIDIA driver: {' '.join(str(error).split())}") from error
    if count == 0 or not torch.cuda.is_available():
        why = "CuPy sees no GPU" if count == 0 else "this torch is built without CUDA, or sees no GPU"
        raise SpecError("device", f"cuda needs an NVIDIA GPU, and {why}: use --device cpu")
    return CudaDevice()
