"""The baseline of ``kvsan bench replay``: a replay as one would write it in torch, view by view.

Each buffer is filled through its strided view with numbers of its own, then each buffer and each consumer's address is
read and compared, then the next digit. It looks at less than the replay does: no guard zones, no padding, no second
reading, consumers in one direction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...kernels.device import Device
from ...kernels.pools import DevicePool, allocate_pool
from ...sim.arena import ByteView, owner_table
from ...sim.arena.views import access_bytes
from ...sim.layout import Layout


def torch_replay(device: Device, layouts: Iterable[Layout]) -> tuple[int, int]:
    """Replay ``layouts`` and return how many there were, and how many read back other numbers than were written."""
    verdicts = [_replay(device, layout) for layout in layouts]
    return len(verdicts), verdicts.count(False)


def _replay(device: Device, layout: Layout) -> bool:
    table = owner_table(layout)
    pools = [allocate_pool(device, pool) for pool in layout.pools]
    firsts = {(owner.buffer, owner.part): owner.first_number for owner in table.owners}
    right = []
    for digit in range(table.digits):
        for pool in pools:
            device.words(pool.memory, 1).zero_()
        for owner in table.owners:
            view = _view(device, pools[owner.view.pool], owner.view)
            view.copy_(_digits(view, owner.first_number, 1, digit))
        for owner in table.owners:
            view = _view(device, pools[owner.view.pool], owner.view)
            right.append((view == _digits(view, owner.first_number, 1, digit)).all())
        for access in layout.accesses:
            first = firsts.get((access.buffer, access.part))
            if first is not None:
                view = _view(device, pools[access.pool], access_bytes(access))
                right.append((view == _digits(view, first + access.first_slot, access.slot_step, digit)).all())
    return bool(torch.stack(right).all()) if right else True


def _view(device: Device, pool: DevicePool, view: ByteView) -> torch.Tensor:
    """Return the bytes of all cells of ``view``, of shape (cells, *axes, item)."""
    before = pool.base - pool.memory.address
    shape = (view.count, *[size for size, _ in view.axes], view.item_bytes)
    strides = (view.pitch_bytes, *[stride for _, stride in view.axes], 1)
    words: torch.Tensor = device.words(pool.memory, 1)
    return words.as_strided(shape, strides, before + view.offset_bytes)


def _digits(view: torch.Tensor, first: int, step: int, digit: int) -> Any:
    numbers = first + torch.arange(view.shape[0], device=view.device) * step
    return ((numbers >> (8 * digit)) & 255).to(torch.int8).view(-1, *[1] * (view.dim() - 1))
