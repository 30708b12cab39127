"""``Shape``: one trial's numbers, drawn from a seed, small enough to read and to shrink.

Nothing is a power of two or contiguous unless a draw says so: rows have gaps, pages have gaps, elements may stand
apart, head dims and pages have odd sizes.
"""

from __future__ import annotations

import random
from typing import Final, Literal

import msgspec

from ...model.formats import ElementFormat

KV_DRAWN: Final = (
    ElementFormat.BF16,
    ElementFormat.FP8,
    ElementFormat.NVFP4,
    ElementFormat.FP16,
    ElementFormat.FP32,
)
STATES_DRAWN: Final = (ElementFormat.FP32, ElementFormat.BF16, ElementFormat.FP16)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One trial.

    ``lengths`` are the tokens of each request, ``query_tokens`` the last ones that ask. ``element_step`` is the
    distance of neighbouring elements, ``row_gap``, ``page_gap`` and ``slot_gap`` are unused containers after each row,
    page and slot; ``planes_apart`` keeps K and V in planes of their own instead of side by side in the slot. Recurrent
    trials read ``heads``, ``group`` (heads per group), ``head_dim``, ``value_dim`` (state size), ``taps``, ``lengths``
    (steps are ``query_tokens``), ``format`` and ``conv_format``.
    """

    seed: int = 0
    format: ElementFormat = ElementFormat.BF16
    kv_layout: Literal["HND", "NHD"] = "HND"
    heads: int = 1
    group: int = 1
    head_dim: int = 16
    value_dim: int = 16
    page_tokens: int = 1
    lengths: tuple[int, ...] = (1,)
    query_tokens: int = 1
    window: int | None = None
    sinks: int = 0
    element_step: int = 1
    row_gap: int = 0
    page_gap: int = 0
    slot_gap: int = 0
    planes_apart: bool = False
    unit: float = 1.0
    conv_format: ElementFormat = ElementFormat.BF16
    taps: int = 1


LARGE: Final = "large"
SMALL: Final = "small"


def draw_shape(kernel: str, seed: int, size: str = LARGE) -> Shape:
    """Return the shape number ``seed`` of ``kernel``; ``size`` is ``small`` for the interpreter, else ``large``."""
    random_ = random.Random(f"{kernel} {seed}")
    small = size == SMALL
    format = random_.choice(KV_DRAWN)
    requests = random_.randint(1, 2 if small else 5)
    longest = random_.choice((5, 40, 70)) if small else random_.choice((3, 40, 200, 700, 1500))
    lengths = tuple([random_.randint(0 if index else 1, longest) for index in range(requests)])
    step = 16 if format.block_scaled else 1
    top = 80 if small else 256
    dims = [random_.randint(1, top // step) * step for _ in range(2)]  # floor: whole blocks of scales
    if random_.random() < 0.5:
        dims = [random_.choice([dim for dim in (32, 64, 96, 128, 256) if dim <= top])] * 2
    window = random_.randint(1, longest) if random_.random() < 0.4 else None
    loose = random_.random() < 0.5
    head_dim, value_dim = _latent(random_, step, small) if kernel == "latent" else dims
    return Shape(
        seed=seed,
        format=format,
        kv_layout=random_.choice(("HND", "NHD")),
        heads=1 if kernel == "latent" else random_.randint(1, 2 if small else 6),
        group=random_.choice((1, 2, 3, 5) if small else (1, 2, 3, 4, 8, 12, 17)),
        head_dim=head_dim,
        value_dim=value_dim,
        page_tokens=random_.choice((1, 3, 8, 32)) if small else random_.choice((1, 5, 16, 24, 32, 64, 129)),
        lengths=lengths,
        query_tokens=random_.randint(1, 5 if small else 20),
        window=window,
        sinks=random_.randint(0, 9) if window is not None else 0,
        element_step=random_.choice((1, 1, 1, 2, 3)) if loose else 1,
        row_gap=random_.randint(0, 9) if loose else random_.choice((0, 0, 16)),
        page_gap=random_.randint(0, 40) if loose else random_.choice((0, 64)),
        slot_gap=random_.randint(0, 40) if loose else random_.choice((0, 128)),
        planes_apart=random_.random() < 0.5,
        unit=random_.choice((1.0, 0.5, 0.037)) if format in (ElementFormat.FP8, ElementFormat.NVFP4) else 1.0,
    )


def _latent(random_: random.Random, step: int, small: bool) -> tuple[int, int]:
    """Return (row dim, latent dim)."""
    latent, rope = random_.choice(((512, 64), (64, 16), (96, 32), (320, 64), (48, 0)))
    if small and latent > 96:
        latent, rope = 64, 32
    return latent + rope, latent


def draw_state_shape(kernel: str, seed: int, size: str = LARGE) -> Shape:
    """Return the shape number ``seed`` of a recurrent kernel."""
    random_ = random.Random(f"{kernel} {seed}")
    small = size == SMALL
    top = 24 if small else 128
    loose = random_.random() < 0.5
    groups, group = random_.randint(1, 2 if small else 4), random_.randint(1, 3)
    requests = random_.randint(1, 2 if small else 5)
    return Shape(
        seed=seed,
        format=random_.choice(STATES_DRAWN),
        conv_format=random_.choice(STATES_DRAWN),
        heads=groups * group,
        group=group,
        head_dim=random_.choice((random_.randint(1, top), 16 if small else 64)),
        value_dim=random_.choice((random_.randint(1, top), 16 if small else 128)),
        lengths=(1,) * requests,
        query_tokens=random_.randint(1, 3),
        element_step=random_.choice((1, 2)) if loose else 1,
        row_gap=random_.randint(0, 9) if loose else 0,
        page_gap=random_.randint(0, 40) if loose else 0,
        slot_gap=random_.randint(0, 40) if loose else 0,
        planes_apart=random_.random() < 0.5,
        taps=random_.randint(1, 4),
    )
