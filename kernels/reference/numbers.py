"""Rounding to the stored formats, in float64."""

from __future__ import annotations

import torch

from ...model.errors import SpecError
from ...model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat

FP4_LARGEST = 6.0
FP8_LARGEST = 448.0


def rounded(values: torch.Tensor, significand_bits: int, smallest_exponent: int, largest: float) -> torch.Tensor:
    """Return float64 ``values`` to nearest (ties to even) in a binary format, saturated at ``largest``.

    ``significand_bits`` count the leading one; ``smallest_exponent`` is that of the smallest normal number, below which
    the steps stay equal.
    """
    size = values.abs().clamp(min=torch.finfo(torch.float64).tiny)
    exponent = torch.floor(torch.log2(size)).clamp(min=smallest_exponent)
    step = torch.exp2(exponent - (significand_bits - 1))
    return (torch.round(torch.divide(values, step)) * step).clamp(-largest, largest)


def round_fp8(values: torch.Tensor) -> torch.Tensor:
    """Return float64 ``values`` rounded to e4m3."""
    return rounded(values, 4, -6, FP8_LARGEST)


def round_fp4(values: torch.Tensor) -> torch.Tensor:
    """Return float64 ``values`` rounded to e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, and their negatives."""
    return rounded(values, 2, 0, FP4_LARGEST)


def fp4_scales(values: torch.Tensor) -> torch.Tensor:
    """Return the e4m3 scale of each block of 16 elements of the last axis: a sixth of the block's largest element."""
    blocks = values.unflatten(-1, (-1, SCALE_BLOCK_ELEMENTS))
    return round_fp8(torch.divide(blocks.abs().amax(-1), FP4_LARGEST))


def as_stored(values: torch.Tensor, format: ElementFormat, unit: float = 1.0) -> torch.Tensor:
    """Return what a cache of ``format`` gives back for ``values``: rounded, quantised and dequantised, in float64."""
    scaled = torch.divide(values.to(torch.float64), unit)
    if format == ElementFormat.FP32:
        kept = scaled.to(torch.float32).to(torch.float64)
    elif format == ElementFormat.FP16:
        kept = scaled.to(torch.float16).to(torch.float64)
    elif format == ElementFormat.BF16:
        kept = rounded(scaled, 8, -126, torch.finfo(torch.bfloat16).max)
    elif format == ElementFormat.FP8:
        kept = round_fp8(scaled)
    elif format == ElementFormat.NVFP4:
        scales = fp4_scales(scaled)[..., None]
        blocks = torch.divide(scaled.unflatten(-1, (-1, SCALE_BLOCK_ELEMENTS)), scales)
        kept = (round_fp4(torch.nan_to_num(blocks, nan=0.0, posinf=0.0, neginf=0.0)) * scales).flatten(-2)
    else:
        raise SpecError("format", f"found {format.value}, needs fp32, fp16, bf16, fp8 or nvfp4")
    return kept * unit
