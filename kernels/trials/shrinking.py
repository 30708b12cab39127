"""``shrink_shape``: the smallest shape that still fails, found field by field until nothing gets simpler."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from ...model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from .shape import Shape


def shrink_shape(shape: Shape, fails: Callable[[Shape], bool], limit: int = 1000) -> Shape:
    """Return a shape that ``fails`` and none of whose simpler neighbours does; at most ``limit`` are tried."""
    tried = 0
    seen = {msgspec.json.encode(shape)}
    found = True
    while found:
        found = False
        for simpler in _simpler(shape):
            key = msgspec.json.encode(simpler)
            if key in seen:
                continue
            if tried >= limit:
                return shape
            seen.add(key)
            tried += 1
            if fails(simpler):
                shape, found = simpler, True
                break
    return shape


def _simpler(shape: Shape) -> Iterator[Shape]:
    """Yield simpler shapes, the boldest first: fewer requests and tokens, no gaps, bf16, one head, small dims."""
    for lengths in _fewer(shape.lengths):
        yield msgspec.structs.replace(shape, lengths=lengths)
    for field, value in (
        ("window", None),
        ("element_step", 1),
        ("row_gap", 0),
        ("page_gap", 0),
        ("slot_gap", 0),
        ("planes_apart", False),
        ("kv_layout", "HND"),
        ("unit", 1.0),
        ("sinks", 0),
        ("format", ElementFormat.BF16),
        ("seed", 0),
    ):
        if getattr(shape, field) != value:
            changed = msgspec.structs.replace(shape, **{field: value})
            yield msgspec.structs.replace(changed, sinks=0) if field == "window" else changed
    for field in ("group", "query_tokens", "heads", "page_tokens", "row_gap", "page_gap", "slot_gap", "taps"):
        yield from _smaller(shape, field, 1, 0 if field.endswith("_gap") else 1)
    step = SCALE_BLOCK_ELEMENTS if shape.format.block_scaled else 1
    if shape.value_dim != shape.head_dim:
        yield msgspec.structs.replace(shape, value_dim=shape.head_dim)
    for field in ("head_dim", "value_dim"):
        yield from _smaller(shape, field, step, step)


def _fewer(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if len(lengths) > 1:
        for index in range(len(lengths)):
            yield lengths[:index] + lengths[index + 1 :]
    for index, length in enumerate(lengths):
        for smaller in _numbers_below(length, 1, 1):
            yield (*lengths[:index], smaller, *lengths[index + 1 :])


def _smaller(shape: Shape, field: str, step: int, least: int) -> Iterator[Shape]:
    for value in _numbers_below(getattr(shape, field), step, least):
        yield msgspec.structs.replace(shape, **{field: value})


def _numbers_below(value: int, step: int, least: int) -> Iterator[int]:
    """Yield the least value, then ever closer ones, all ``least`` plus multiples of ``step``."""
    gap = (value - least) // step  # floor: steps that fit
    if gap > 0:
        yield least
    while gap > 1:
        gap = gap // 2  # floor: any smaller gap
        yield value - gap * step
