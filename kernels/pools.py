"""``DevicePool``: one pool of a layout as one raw allocation, with guard zones on both sides.

    memory:  | guard | byte 0 ... byte size-1 of the pool | guard | room |

torch and Triton see the bytes in place, through DLPack; ``strided`` gives a buffer as the strided tensor that an
engine's kernels would be handed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..model.arithmetic import exact_div
from ..sim.layout import Buffer, Pool
from ..sim.page import Page
from .device import Device, RawMemory
from .plan import GUARD_BYTES, pool_memory_bytes


class DevicePool(msgspec.Struct, frozen=True):
    """A pool in memory: the allocation, and the address of byte 0 of the pool."""

    memory: RawMemory
    base: int
    size_bytes: int


def allocate_pool(device: Device, pool: Pool) -> DevicePool:
    """Return memory for ``pool``, its base a multiple of 256 bytes.

    A declared alignment beyond that (the granularity of a driver's mappings, often 2 MiB) is a promise to hardware that
    no kernel here depends on, and honouring it would cost megabytes for pools of a few bytes.
    """
    size_bytes = max(0, pool.size_bytes)
    memory = device.allocate(pool_memory_bytes(size_bytes))
    return DevicePool(memory, memory.address + GUARD_BYTES, size_bytes)


def strided(device: Device, pool: DevicePool, buffer: Buffer) -> Any:
    """Return all slots of ``buffer`` as a torch tensor of shape (slots, *page shape) that shares the pool's bytes.

    Its elements are unsigned integers as wide as the page's storage containers. Raises ``InexactDivision`` where an
    offset or a stride is no whole number of them, as torch cannot express that, and ``SpecError`` from torch's checks
    where a view would leave the allocation.
    """
    return strided_page(device, pool, buffer.offset_bytes, buffer.slot_stride_bytes, buffer.slot_count, buffer.page)


def strided_page(device: Device, pool: DevicePool, offset_bytes: int, pitch_bytes: int, cells: int, page: Page) -> Any:
    """Return ``cells`` pages from ``offset_bytes`` on, ``pitch_bytes`` apart; see ``strided``."""
    width = page.format.container_bytes
    before = pool.base - pool.memory.address
    # the allocation's own bytes begin at a multiple of 256, so a whole number of words precedes the base
    usable = device.words(pool.memory, width)
    strides = [exact_div(stride, width, "stride in bytes") for stride in (pitch_bytes, *page.stride_bytes)]
    start = exact_div(before + offset_bytes, width, "offset in bytes")
    return usable.as_strided((cells, *page.shape), strides, start)
