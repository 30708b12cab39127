"""Side planes: the index keys of sparse attention, and the position plane that a rank keeps once.

>>> from hypothesis import find
>>> [plane.token_bytes for plane in find(side_planes(), lambda planes: planes[0].token_bytes < 100)]
[68]
"""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from ..model.formats import ElementFormat
from ..model.layers import INDEX_KEY, INDEX_POSITION, SidePlane
from .formats import PLANE_ORDER
from .numbers import between, draw_number, draw_one

_KNOWN: Final = (
    (128, ElementFormat.BF16, 1),
    (128, ElementFormat.FP8, 1),
    (132, ElementFormat.UINT8, 1),
    (68, ElementFormat.UINT8, 1),
    (64, ElementFormat.BF16, 1),
    (32, ElementFormat.BF16, 1),
    (256, ElementFormat.BF16, 1),
    (128, ElementFormat.BF16, 2),
    (16, ElementFormat.FP8, 1),
)
"""Index keys as published (QSA and MiniMax 128 x bf16 or fp8, DSA 132 or 68 bytes), and plain multiples: dim, format,
heads."""

POSITION: Final = SidePlane(role=INDEX_POSITION, dim=3, format=ElementFormat.INT32, scope="rank")
"""Three position axes, one plane per rank."""


@st.composite
def side_planes(
    draw: st.DrawFn,
    *,
    position: bool = True,
    like: tuple[int, ElementFormat] | None = None,
    dims: st.SearchStrategy[int] | None = None,
    formats: st.SearchStrategy[ElementFormat] | None = None,
) -> tuple[SidePlane, ...]:
    """Return the side planes of one layer: an index-key plane, and with ``position`` at times the rank's position
    plane.

    ``dims`` and ``formats`` pin the index plane's elements; ``like`` is the head dim and format of the K page beside
    it, which the index key may share.
    """
    if dims is not None or formats is not None:
        dim = draw_number(draw, (128, 64), 1024) if dims is None else draw(dims)
        format = draw_one(draw, PLANE_ORDER) if formats is None else draw(formats)
        planes: tuple[SidePlane, ...] = (SidePlane(role=INDEX_KEY, dim=dim, format=format),)
        return (*planes, POSITION) if position and draw(between(0, 1)) else planes
    return draw_planes(draw, like or (128, ElementFormat.BF16), position=position)


def draw_planes(draw: st.DrawFn, like: tuple[int, ElementFormat], *, position: bool) -> tuple[SidePlane, ...]:
    """Draw an index plane and perhaps the position plane.

    The first choices are a key as wide as one or two K heads: they let a collision or a tie shrink one coordinate at a
    time.
    """
    row = draw(between(0, len(_KNOWN) + 2))
    if row < 2:
        dim, format, heads = *_containers(*like), 1 + row
    elif row < len(_KNOWN) + 2:
        dim, format, heads = _KNOWN[row - 2]
    else:
        dim, format, heads = draw(between(1, 1024)), draw_one(draw, PLANE_ORDER), draw_one(draw, (1, 2, 3))
    index = SidePlane(role=INDEX_KEY, dim=dim, format=format, heads=heads)
    return (index, POSITION) if position and draw(between(0, 1)) else (index,)


def _containers(dim: int, kv_format: ElementFormat) -> tuple[int, ElementFormat]:
    """Return ``dim`` elements in a format that a side plane may have: packed pairs as plain bytes."""
    if not kv_format.block_scaled:
        return dim, kv_format
    return kv_format.bytes_of(dim), ElementFormat.UINT8
