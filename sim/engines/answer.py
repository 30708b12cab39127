"""What a driven engine answers, whichever it is: allocations, groups of layers that share ids, and views.

The engine's process knows nothing of this package; it describes the tensors that its own code made in plain numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...model.errors import SpecError, shown
from ..layout import Buffer, Pool


class View(msgspec.Struct, frozen=True):
    """One tensor as the engine made it.

    ``name`` is the layer as the engine was told it, ``part`` which of the layer's tensors this is, ``group`` the group
    of layers that it shares ids with, ``allocation`` the storage it lies in. ``axes`` names the axes in the engine's
    order, the block first. ``offset`` is in bytes from that storage, ``stride`` in elements of ``item`` bytes.
    """

    name: str
    part: int
    group: int
    allocation: int
    axes: tuple[str, ...]
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    item: int

    @property
    def stride_bytes(self) -> tuple[int, ...]:
        """Strides in bytes."""
        return tuple(stride * self.item for stride in self.stride)


class Answer(msgspec.Struct, frozen=True):
    """What the engine made of a spec on one rank: ``allocations`` are the bytes of each storage, ``reported`` what the
    engine says of its sizes, by its own names."""

    blocks: int
    allocations: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...]
    views: tuple[View, ...]
    reported: dict[str, int] = {}


def read_answer(answer: object, engine: str) -> Answer:
    """Return an answer of ``engine``; raise ``SpecError`` for one that makes no sense."""
    try:
        found = msgspec.convert(answer, Answer)
    except msgspec.ValidationError as error:
        raise SpecError("engine", f"{engine} answered what is no plan: {error}") from None
    for view in found.views:
        if not 0 <= view.allocation < len(found.allocations):
            raise SpecError(
                "engine", f"{engine} answered a view of allocation {view.allocation}, which it did not list"
            )
        if not 0 <= view.group < len(found.groups) or view.name not in found.groups[view.group]:
            raise SpecError("engine", f"{engine} answered a view of {shown(view.name)}, which is not in its group")
        if not view.axes or not len(view.axes) == len(view.shape) == len(view.stride) or view.item < 1:
            raise SpecError("engine", f"{engine} answered a view of {shown(view.name)} whose axes do not fit")
    return found


def pools_of(answer: Answer, buffers: Sequence[Buffer], manager: str, alignment_bytes: int) -> tuple[Pool, ...]:
    """Return the allocations as pools of ``answer.blocks`` slots; what no group uses of a slot is padding.

    Raises ``SpecError`` for an allocation that is no whole number of blocks.
    """
    used: dict[tuple[int, int], int] = {}
    for held in buffers:
        place = held.pool, held.life_cycle
        used[place] = used.get(place, 0) + held.page_bytes
    pools = []
    for number, size in enumerate(answer.allocations):
        slot, rest = divmod(size, max(1, answer.blocks))
        if rest:
            raise SpecError("engine", f"answered {size} B for {answer.blocks} blocks, which do not divide")
        most = max((taken for (pool, _), taken in used.items() if pool == number), default=0)
        pools.append(Pool(manager, 0, number, answer.blocks, slot, size, alignment_bytes, max(0, slot - most)))
    return tuple(pools)
