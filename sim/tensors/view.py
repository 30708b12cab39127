"""``TensorView``: where the elements of one live tensor lie, whichever library made it."""

from __future__ import annotations

import math

import msgspec

from ..overlap import SlotView, byte_range

MAX_NAME_CHARACTERS = 80
"""Longest name that a message shows whole."""


class TensorView(msgspec.Struct, frozen=True, kw_only=True):
    """Element ``(i, j, ...)`` lies at byte ``address + i * stride_bytes[0] + j * stride_bytes[1] + ...`` of ``space``.

    ``space`` names what addresses are compared in: the one address space of host and CUDA memory, or a storage of its
    own where there is no address (meta tensors). ``storage`` is the first byte of the allocation and one past its
    last, None where that is unknown. ``kind`` says what it is, such as ``torch.bfloat16 on cuda:0``.
    """

    name: str
    kind: str
    space: str
    address: int
    shape: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    item_bytes: int
    storage: tuple[int, int] | None

    @property
    def empty(self) -> bool:
        """Whether the tensor has no byte at all."""
        return self.item_bytes == 0 or math.prod(self.shape) == 0


def byte_set(view: TensorView) -> SlotView:
    """Return the tensor's bytes, axis for axis, as the overlap solver takes them."""
    return SlotView(view.address, 1, 0, tuple(zip(view.shape, view.stride_bytes, strict=True)), view.item_bytes)


def address_range(view: TensorView) -> tuple[int, int]:
    """Return the lowest address and one past the highest; both equal for an empty tensor."""
    return byte_range(byte_set(view))


def label(name: str) -> str:
    """Return a tensor's name as a message shows it: printable, on one line, not endless."""
    text = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in name)
    return text if len(text) <= MAX_NAME_CHARACTERS else text[: MAX_NAME_CHARACTERS - 3] + "..."


def described(view: TensorView) -> str:
    """Return what a message says of a tensor: its name, kind, shape and strides in bytes."""
    return f"{label(view.name)} ({view.kind}, shape {view.shape}, strides {view.stride_bytes} B)"
