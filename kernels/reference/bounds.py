"""How far a kernel may be from its float64 reference, and the comparison that never lets NaN pass.

Two distances: the relative L2 norm of the difference, and its worst element over the largest element of the reference.
Products of bf16 round the softmax weights to 8 bits, those of fp16, fp8 and NVFP4 to 11; fp32 is computed in three
passes of tf32. A recurrent state, and whatever an append stored, is compared in the format that it is kept in.
"""

from __future__ import annotations

from typing import Final

import msgspec
import torch

from ...model.formats import ElementFormat


class Bound(msgspec.Struct, frozen=True):
    """The largest relative L2 distance, and the largest distance of one element over the largest reference element."""

    relative_l2: float
    worst: float


ATTENTION_BOUNDS: Final = {
    ElementFormat.FP32: Bound(3e-5, 1e-4),
    ElementFormat.FP16: Bound(1e-3, 2e-3),
    ElementFormat.BF16: Bound(6e-3, 1e-2),
    ElementFormat.FP8: Bound(1e-3, 2e-3),
    ElementFormat.NVFP4: Bound(1e-3, 2e-3),
}
"""Attention over K and V as they are stored, by KV format."""

STORED_BOUNDS: Final = {
    ElementFormat.FP32: Bound(1e-6, 1e-6),
    ElementFormat.FP16: Bound(1e-3, 1e-3),
    ElementFormat.BF16: Bound(6e-3, 8e-3),
    ElementFormat.FP8: Bound(5e-3, 7e-2),
    ElementFormat.NVFP4: Bound(1e-2, 4e-1),
}
"""What was stored, against the reference's rounding. Next to a tie a last digit may fall the other way: one of fp8 is a
16th of the element, one of NVFP4 up to a third, and the relative L2 norm keeps those rare."""

STATE_BOUNDS: Final = {
    ElementFormat.FP32: Bound(1e-5, 4e-5),
    ElementFormat.FP16: Bound(2e-3, 4e-3),
    ElementFormat.BF16: Bound(1e-2, 2e-2),
}
"""States and outputs of recurrent layers, by state format; the error of several steps adds up."""

SCORE_BOUND: Final = Bound(2e-5, 2e-5)
"""Index scores in fp32, of the largest that vectors of their lengths can have: the angle of a far position has few
digits left after its whole turns."""


class Difference(msgspec.Struct, frozen=True):
    """How a result differs from its reference. ``place`` is the index of the worst element."""

    relative_l2: float
    worst: float
    place: tuple[int, ...]
    got: float
    wanted: float
    within: bool


def compare(got: torch.Tensor, wanted: torch.Tensor, bound: Bound) -> Difference:
    """Compare a result with its float64 reference of the same shape; NaN or infinity in the result is never within.

    Raises ``ValueError`` for a reference that is not finite itself, as that would let anything pass.
    """
    if got.shape != wanted.shape:
        raise ValueError(f"found a result of shape {tuple(got.shape)}, needs {tuple(wanted.shape)}")
    if wanted.numel() == 0:
        return Difference(0.0, 0.0, (), 0.0, 0.0, True)
    reference = wanted.to(torch.float64)
    if not bool(torch.isfinite(reference).all()):
        raise ValueError("the reference is not finite, so nothing can be compared with it")
    result = got.to(torch.float64)
    distance = (result - reference).abs()
    distance = torch.where(torch.isfinite(distance), distance, torch.inf)
    place = int(distance.argmax())
    index = tuple([int(axis) for axis in torch.unravel_index(torch.tensor(place), wanted.shape)])
    largest = float(distance.max())
    size, norm = float(reference.abs().max()), float(torch.linalg.vector_norm(reference))
    if size == 0.0:
        worst = l2 = 0.0 if largest == 0.0 else float("inf")
    else:
        worst = float(torch.divide(distance.max(), size))
        l2 = float(torch.divide(torch.linalg.vector_norm(distance), norm))
    within = l2 <= bound.relative_l2 and worst <= bound.worst
    return Difference(l2, worst, index, float(result.flatten()[place]), float(reference.flatten()[place]), within)
