"""``SlotView``, the byte set of one view over a pool, and ``Collision``, a byte that two elements share.

Byte ``u`` of element ``(i, j, ...)`` of the cell of slot ``s`` lies at

    offset_bytes + s * slot_stride_bytes + i * axes[0].stride + j * axes[1].stride + ... + u,    0 <= u < item_bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class SlotView(msgspec.Struct, frozen=True):
    """The same cell in every slot: ``axes`` are ``(count, stride_bytes)``, an element ``item_bytes`` contiguous bytes.

    Strides and the offset may be any integers; a stride of 0 broadcasts. A count of 0 is a view without bytes. Raises
    ``ValueError`` for a negative count.
    """

    offset_bytes: int
    slot_count: int
    slot_stride_bytes: int
    axes: tuple[tuple[int, int], ...]
    item_bytes: int

    def __post_init__(self) -> None:
        if self.slot_count < 0 or self.item_bytes < 0 or any(count < 0 for count, _ in self.axes):
            raise ValueError(f"slot_count, item_bytes and the counts of axes must be at least 0: {self}")


class Collision(msgspec.Struct, frozen=True):
    """``byte``, an address in the pool, lies in an element of both sides: the slot, the index, the byte of the item."""

    byte: int
    slot_a: int
    index_a: tuple[int, ...]
    byte_in_item_a: int
    slot_b: int
    index_b: tuple[int, ...]
    byte_in_item_b: int


def dims(view: SlotView) -> Iterator[tuple[int, int]]:
    """Yield ``(count, stride_bytes)`` of each coordinate in the order of ties: slot, axes, byte in the item."""
    yield view.slot_count, view.slot_stride_bytes
    yield from view.axes
    yield view.item_bytes, 1


def is_empty(view: SlotView) -> bool:
    """Return whether the view has no byte at all."""
    return not (view.slot_count and view.item_bytes) or any(count == 0 for count, _ in view.axes)


def byte_range(view: SlotView) -> tuple[int, int]:
    """Return the view's first byte and the one past its last; ``(offset_bytes, offset_bytes)`` for an empty view."""
    if is_empty(view):
        return view.offset_bytes, view.offset_bytes
    first, end = cell_range(view)
    reach = (view.slot_count - 1) * view.slot_stride_bytes
    return first + min(0, reach), end + max(0, reach)


def cell_range(view: SlotView) -> tuple[int, int]:
    """Return the first byte of slot 0's cell and the one past its last; the view must not be empty."""
    first, end = view.offset_bytes, view.offset_bytes + view.item_bytes
    for count, stride in view.axes:
        if stride > 0:
            end += (count - 1) * stride
        else:
            first += (count - 1) * stride
    return first, end


def restrict(view: SlotView, first_slot: int, last_slot: int) -> SlotView:
    """Return the view over slots ``first_slot`` to ``last_slot`` (inclusive) only; slot 0 of it is ``first_slot``."""
    return SlotView(
        view.offset_bytes + first_slot * view.slot_stride_bytes,
        max(0, last_slot - first_slot + 1),
        view.slot_stride_bytes,
        view.axes,
        view.item_bytes,
    )
