"""Element formats, the simplest first.

>>> from hypothesis import find
>>> find(kv_formats(), lambda format: format.bits <= 8).value
'fp8'
"""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from ..model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat

KV_ORDER: Final = (
    ElementFormat.BF16,
    ElementFormat.FP8,
    ElementFormat.NVFP4,
    ElementFormat.FP16,
    ElementFormat.FP32,
    ElementFormat.INT8,
    ElementFormat.FP8_E5M2,
)
"""Formats of K/V pages in the order of simplicity."""

STATE_ORDER: Final = (ElementFormat.BF16, ElementFormat.FP32, ElementFormat.FP16)
"""Formats of recurrent states in the order of simplicity."""

PLANE_ORDER: Final = (
    ElementFormat.BF16,
    ElementFormat.FP8,
    ElementFormat.UINT8,
    ElementFormat.FP32,
    ElementFormat.FP16,
    ElementFormat.INT8,
    ElementFormat.INT32,
    ElementFormat.FP8_E5M2,
    ElementFormat.INT64,
)
"""Formats of side planes in the order of simplicity."""


def kv_formats(*, block_scaled: bool = True) -> st.SearchStrategy[ElementFormat]:
    """Return the formats of K/V pages; ``block_scaled=False`` leaves out those with block scales (NVFP4)."""
    return st.sampled_from([format for format in KV_ORDER if block_scaled or not format.block_scaled])


def state_formats() -> st.SearchStrategy[ElementFormat]:
    """Return the formats of recurrent and convolution states."""
    return st.sampled_from(STATE_ORDER)


def dim_multiple(kv_format: ElementFormat) -> int:
    """Return what a head dim must be a multiple of: the elements of one block scale, 1 without scales."""
    return SCALE_BLOCK_ELEMENTS if kv_format.block_scaled else 1
