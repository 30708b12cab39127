"""``TensorContract``: what the kernels behind some tensors rely on, beyond bytes of their own."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ...model.errors import SpecError, require_int, shown


class TensorContract(msgspec.Struct, frozen=True, kw_only=True):
    """What is checked beyond overlap, storage bounds and the alignment of elements.

    ``alignment_bytes`` (a power of two): the first byte of every row along the innermost axis is a multiple of it.
    ``element_offset_bits``: width of the signed integer in which kernels compute element offsets from a view's first
    element, 32 or 64. ``canonical_strides``: axes of size 1 have the stride that a row-major tensor has there.
    ``shared``: groups of names that may share bytes on purpose (layers that reuse another's cache); ``self_overlap``:
    names whose own elements may (overlapping windows).
    """

    alignment_bytes: int = 1
    element_offset_bits: int = 64
    canonical_strides: bool = False
    shared: tuple[tuple[str, ...], ...] = ()
    self_overlap: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_int("contract.alignment_bytes", self.alignment_bytes, 1, 1 << 20)
        if self.alignment_bytes & (self.alignment_bytes - 1):
            raise SpecError("contract.alignment_bytes", f"found {self.alignment_bytes}, needs a power of two")
        bits = self.element_offset_bits
        if type(bits) is not int or bits not in (32, 64):
            raise SpecError("contract.element_offset_bits", f"found {shown(bits)}, needs 32 or 64")
        if type(self.canonical_strides) is not bool:
            raise SpecError("contract.canonical_strides", f"found {shown(self.canonical_strides)}, needs True or False")
        if not isinstance(self.shared, list | tuple):
            raise SpecError("contract.shared", f"found {shown(self.shared)}, needs a list of groups of names")
        groups = tuple([names(f"contract.shared[{number}]", group) for number, group in enumerate(self.shared)])
        msgspec.structs.force_setattr(self, "shared", groups)
        msgspec.structs.force_setattr(self, "self_overlap", names("contract.self_overlap", self.self_overlap))


def names(field: str, value: object) -> tuple[str, ...]:
    """Return an iterable of texts as a tuple; raise ``SpecError`` for anything else, one text included."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise SpecError(field, f"found {shown(value)}, needs a list of names")
    found = tuple(value)
    for name in found:
        if type(name) is not str:
            raise SpecError(field, f"found {shown(name)}, needs a name")
    return found
