"""Numbers drawn for shrinking: an index into a short table of familiar values, or any number of a range.

Tables start with the simplest value, so that Hypothesis, which lowers indices, ends at the simplest spec. The last
index of a table stands for "any": one more draw picks a number from a range, a multiple of whatever the format asks
for.

    >>> legal((128, 64, 72), multiple=16)
    (128, 64)
"""

from __future__ import annotations

import functools
from typing import Final, TypeVar

from hypothesis import strategies as st

from ..model.arithmetic import div_up

T = TypeVar("T")

HEADS: Final = (1, 2, 4, 8, 3, 16, 5, 32, 6, 7, 12)
MAX_HEADS: Final = 256
HEAD_DIMS: Final = (128, 64, 256, 32, 16, 96, 192, 512, 80, 72, 8, 1)
MAX_HEAD_DIM: Final = 1024
LATENT_DIMS: Final = (512, 256, 128, 64, 16)
ROPE_DIMS: Final = (64, 0, 32, 128)
TOKENS_PER_BLOCK: Final = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_TOKENS_PER_BLOCK: Final = 128
WINDOWS: Final = (128, 1, 32, 512, 1024, 4096)
MAX_WINDOW: Final = 8192
SINKS: Final = (1, 4, 32)
MAX_SINKS: Final = 256
SLOTS: Final = (1, 2, 3, 4, 8)
MAX_SLOTS: Final = 8
LAYER_COUNTS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32, 36, 40, 48, 61, 64, 80, 94, 126)


@functools.cache
def between(low: int, high: int) -> st.SearchStrategy[int]:
    """Return the whole numbers from ``low`` to ``high``, the lowest being the simplest."""
    return st.integers(low, high)


def draw_one(draw: st.DrawFn, table: tuple[T, ...]) -> T:
    """Draw one entry of ``table``, the first being the simplest; a table of one entry costs no draw."""
    return table[draw(between(0, len(table) - 1))] if len(table) > 1 else table[0]


@functools.cache
def legal(table: tuple[int, ...], *, multiple: int) -> tuple[int, ...]:
    """Return the entries of ``table`` that are multiples of ``multiple``."""
    return tuple(entry for entry in table if entry % multiple == 0)


def draw_number(draw: st.DrawFn, table: tuple[int, ...], high: int, *, low: int = 1, multiple: int = 1) -> int:
    """Draw an entry of ``table``, or any multiple of ``multiple`` from ``low`` to ``high``."""
    entries = legal(table, multiple=multiple) if multiple > 1 else table
    index = draw(between(0, len(entries)))
    if index < len(entries):
        return entries[index]
    first, last = div_up(low, multiple), high // multiple  # floor: the largest multiple inside the range
    return multiple * draw(between(first, last))
