"""The host as a device: NumPy memory, and kernels through Triton's interpreter."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .device import DeviceKind
from .tensors import integers_of

ALIGNMENT_BYTES = 256


class HostMemory:
    """NumPy bytes whose first is at a multiple of ``ALIGNMENT_BYTES``."""

    def __init__(self, size_bytes: int) -> None:
        whole = np.empty(size_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
        start = -whole.ctypes.data % ALIGNMENT_BYTES
        self.array: NDArray[np.uint8] = whole[start : start + size_bytes]
        self.address: int = self.array.ctypes.data
        self.size_bytes = size_bytes


class HostDevice:
    """The host; its tiles are large, since the interpreter takes its time for every program and not for every byte."""

    kind: DeviceKind = "cpu"
    block_words = 1 << 14
    short_block_words = 1 << 14
    fold_block_words = 1 << 14
    warps = 4

    def __init__(self) -> None:
        self.name = platform.processor() or platform.machine()

    def allocate(self, size_bytes: int) -> HostMemory:
        """Return NumPy memory."""
        return HostMemory(size_bytes)

    def allocate_host(self, size_bytes: int) -> HostMemory:
        """Return NumPy memory: the host has one kind only."""
        return HostMemory(size_bytes)

    def upload(self, values: NDArray[Any]) -> torch.Tensor:
        """Return a tensor that shares the array's memory."""
        return torch.from_numpy(np.ascontiguousarray(values))

    def download(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return a copy of the bytes at ``address``."""
        return self.borrow(address, size_bytes).copy()

    def download_many(self, places: list[tuple[int, int]]) -> list[NDArray[np.uint8]]:
        """Return copies of the bytes at several (address, bytes)."""
        return [self.download(address, size_bytes) for address, size_bytes in places]

    def borrow(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return the bytes at ``address`` as they are."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))

    def write(self, address: int, values: NDArray[np.uint8]) -> None:
        """Copy ``values`` to ``address``."""
        self.borrow(address, values.size)[:] = values

    def words(self, memory: HostMemory, width: int) -> torch.Tensor:
        """Return the bytes as a tensor of integers of ``width`` bytes that shares them, through DLPack."""
        return integers_of(torch.from_dlpack(memory.array), width)

    def synchronize(self) -> None:
        """Return at once: the interpreter is done when it returns."""

    def free_bytes(self) -> int:
        """Return the host's available memory in bytes."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def open_device() -> HostDevice:
    """Return the host."""
    return HostDevice()
