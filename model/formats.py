"""Element formats of cached data, as exact bits.

    >>> ElementFormat.NVFP4.bytes_of(32)
    16
    >>> element_format("float8_e4m3fn").value
    'fp8'

NVFP4 stores two elements per byte and one fp8 (e4m3) scale per 16 elements in a buffer of its own; its storage
container
is therefore one byte that holds two elements.
"""

from __future__ import annotations

import enum
from typing import Final

from .arithmetic import exact_div
from .errors import SpecError, shown

SCALE_BLOCK_ELEMENTS: Final = 16
"""Elements that share one NVFP4 block scale."""


class ElementFormat(enum.Enum):
    """How one cached element is stored. The value is the canonical name in JSON and on the command line.

    ``bits`` is the size of one element; ``container_bytes`` the size of the smallest piece of memory that a view can
    address, which holds ``elements_per_container`` elements; ``block_scaled`` says that one-byte scales lie beside
    the data.
    """

    bits: int
    container_bytes: int
    elements_per_container: int
    block_scaled: bool

    FP32 = "fp32", 32
    FP16 = "fp16", 16
    BF16 = "bf16", 16
    FP8 = "fp8", 8
    FP8_E5M2 = "fp8_e5m2", 8
    INT8 = "int8", 8
    NVFP4 = "nvfp4", 4
    INT32 = "int32", 32
    INT64 = "int64", 64
    UINT8 = "uint8", 8

    def __new__(cls, name: str, bits: int) -> ElementFormat:
        member = object.__new__(cls)
        member._value_ = name
        member.bits = bits
        member.container_bytes = max(1, bits >> 3)
        member.elements_per_container = max(1, 8 // bits)  # floor: a wider element has one container
        member.block_scaled = name == "nvfp4"
        return member

    def bytes_of(self, elements: int) -> int:
        """Return the bytes that ``elements`` elements fill; raise ``InexactDivision`` if they do not fill whole
        bytes."""
        return exact_div(elements * self.bits, 8, f"bits of {elements} {self.value} elements")


_BY_NAME: Final = {member.value: member for member in ElementFormat}
_ALIASES: Final = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8_e5m2",
    "fp4": "nvfp4",
}


def element_format(name: object, field: str = "format") -> ElementFormat:
    """Return the format called ``name``: a canonical name, or the spelling of torch or Hugging Face
    (``torch.bfloat16``).

    Raises ``SpecError`` for ``field`` listing the known names.
    """
    if isinstance(name, ElementFormat):
        return name
    if isinstance(name, str):
        key = name.strip().lower().removeprefix("torch.")
        try:
            return _BY_NAME[_ALIASES.get(key, key)]
        except KeyError:
            pass
    known = ", ".join(member.value for member in ElementFormat)
    raise SpecError(field, f"unknown element format {shown(name)}, needs one of {known}")


KV_FORMATS: Final = (
    ElementFormat.FP32,
    ElementFormat.FP16,
    ElementFormat.BF16,
    ElementFormat.FP8,
    ElementFormat.FP8_E5M2,
    ElementFormat.INT8,
    ElementFormat.NVFP4,
)
"""Formats that K/V pages may have."""

STATE_FORMATS: Final = (ElementFormat.FP32, ElementFormat.FP16, ElementFormat.BF16)
"""Formats that recurrent states may have (both the temporal and the convolution state)."""
