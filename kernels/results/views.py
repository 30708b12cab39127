"""What each consumer is given for each layer, and which slots the requests of a check hold."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ...model.errors import SpecError
from ...sim.layout import Access, Layout
from ..paged.views import CacheView, LayoutMemory

STORAGE = "storage"
"""Stands for a consumer where the layout names none: the buffers themselves."""


class LayerViews(msgspec.Struct, frozen=True):
    """The views of one layer by role, and the accesses that they were built from (None: the storage itself)."""

    manager: str
    layer: int
    life_cycle: int
    views: dict[str, CacheView]
    accesses: dict[str, Access | None]


def layers_of(memory: LayoutMemory, consumer: str, refused: list[str]) -> Iterator[LayerViews]:
    """Yield what ``consumer`` is given, layer by layer; layers that no kernel can be run on are told in ``refused``."""
    layout = memory.layout
    found: dict[tuple[str, int, int], LayerViews] = {}
    broken: set[tuple[str, int, int]] = set()
    for access, buffer, part in _given(layout, consumer):
        owner = layout.buffers[buffer]
        layer, role = owner.layer, owner.role
        if part >= 0:
            layer, role = owner.parts[part].layer, owner.parts[part].role
        key = (owner.manager, layer, owner.life_cycle)
        try:
            view = memory.of_access(access) if access is not None else memory.of_buffer(owner, part)
        except SpecError as error:
            refused.append(str(error))
            broken.add(key)
            continue
        entry = found.setdefault(key, LayerViews(*key, {}, {}))
        entry.views[role] = view
        entry.accesses[role] = access
    for key, entry in found.items():
        if key not in broken:
            yield entry


def _given(layout: Layout, consumer: str) -> Iterator[tuple[Access | None, int, int]]:
    """Yield (access, buffer, part) of a consumer; of all buffers where the layout has no accesses at all."""
    if layout.accesses:
        for access in layout.accesses:
            if access.consumer == consumer:
                yield access, access.buffer, access.part
        return
    for index, buffer in enumerate(layout.buffers):
        for part in range(len(buffer.parts)) if buffer.parts else (-1,):
            yield None, index, part


def slots_of(layout: Layout, life_cycle: int) -> list[int]:
    """Return the slots that a life cycle may hold while all others hold theirs: those of one group take turns."""
    own = layout.life_cycles[life_cycle]
    sharing = [
        index
        for index, cycle in enumerate(layout.life_cycles)
        if (cycle.manager, cycle.group) == (own.manager, own.group)
    ]
    counts = [buffer.slot_count for buffer in layout.buffers if buffer.life_cycle == life_cycle]
    return list(range(min(counts, default=0)))[sharing.index(life_cycle) :: len(sharing)]


def formula(layer: LayerViews, role: str) -> str:
    """Return the address that a consumer computes for a role, in bytes."""
    view, access = layer.views[role], layer.accesses[role]
    width = view.format.container_bytes
    terms = [f"slot * {view.slot_stride * width}"]
    terms += [f"{axis} * {stride * width}" for axis, stride in zip(view.axes, view.strides, strict=True)]
    if access is None:
        return f"its storage is byte start + {' + '.join(terms)}"
    return f"the {access.consumer} computes byte {' + '.join([str(access.offset_bytes), *terms])} of pool {access.pool}"
