"""Values as the bytes that a cache stores, and back, in float64.

A row of the last axis is one head (or channel) of one token; its bytes come in the order of its elements. NVFP4 has two
elements in a byte, the first in the low bits, and one e4m3 scale per 16 elements beside them.
"""

from __future__ import annotations

from typing import Final

import torch

from ...model.errors import SpecError
from ...model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ..reference.numbers import fp4_scales, round_fp4, round_fp8

_PLAIN: Final = {
    ElementFormat.FP32: torch.float32,
    ElementFormat.FP16: torch.float16,
    ElementFormat.BF16: torch.bfloat16,
    ElementFormat.INT32: torch.int32,
}
_FP4: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def encode(values: torch.Tensor, format: ElementFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the bytes of ``values`` (..., dim) as uint8 (..., bytes), and those of the block scales or None.

    Raises ``SpecError`` for a format that this model does not store.
    """
    if format in _PLAIN:
        return values.to(_PLAIN[format]).contiguous().view(torch.uint8), None
    if format is ElementFormat.FP8:
        return _fp8(round_fp8(values)), None
    if format is ElementFormat.NVFP4:
        scales = fp4_scales(values)
        blocks = torch.divide(values.unflatten(-1, (-1, SCALE_BLOCK_ELEMENTS)), scales[..., None])
        rounded = round_fp4(torch.nan_to_num(blocks, nan=0.0)).flatten(-2)
        codes = torch.searchsorted(_FP4, rounded.abs().contiguous()) + 8 * (rounded < 0)
        return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), _fp8(scales)
    raise SpecError("format", f"found {format.value}, the testbed stores fp32, fp16, bf16, fp8 and nvfp4")


def decode(data: torch.Tensor, format: ElementFormat, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Return the values of bytes (..., bytes) as float64 (..., dim); what ``encode`` returned, or any other bytes."""
    if format in _PLAIN:
        return data.contiguous().view(_PLAIN[format]).to(torch.float64)
    if format is ElementFormat.FP8:
        return _from_fp8(data)
    if scales is None:
        raise SpecError("format", f"found {format.value} without block scales, needs them")
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2).to(torch.int64)
    values = _FP4[codes & 7] * (1 - 2 * (codes >> 3))
    unit = _from_fp8(scales)[..., None]
    return (values.unflatten(-1, (-1, SCALE_BLOCK_ELEMENTS)) * unit).flatten(-2)


def _fp8(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn).contiguous().view(torch.uint8)


def _from_fp8(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float8_e4m3fn).to(torch.float64)


def rounded(values: torch.Tensor, format: ElementFormat) -> torch.Tensor:
    """Return ``values`` as they come back from the cache."""
    data, scales = encode(values, format)
    return decode(data, format, scales)
