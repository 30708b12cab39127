"""``execute``: a plan carried out in host memory.

Any executor needs no more than ``ByteCopy``: source pool and byte, destination pool and byte, run, counts, strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...model.arithmetic import exact_div
from .plan import ByteCopy

Arenas: TypeAlias = Mapping[tuple[int, int], npt.NDArray[Any]]
"""One flat array for each pool, by (rank, pool)."""


def execute(copies: Iterable[ByteCopy], source: Arenas, destination: Arenas) -> int:
    """Carry out ``copies`` on flat arrays of bytes; return the bytes written.

    Raises ``IndexError`` naming the copy that reaches past a pool; what was copied before stays.
    """
    written = 0
    for copy in copies:
        reached = views(copy, source[copy.source_rank, copy.source_pool], destination, 1)
        if reached is None:
            raise IndexError(f"{copy} reaches past the end of a pool")
        taken, given = reached
        given[...] = taken
        written += given.nbytes
    return written


def views(
    copy: ByteCopy, source: npt.NDArray[Any], destination: Arenas, unit_bytes: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """Return what a copy reads and writes, as views of the arrays; None where it reaches past one of them.

    One array element stands for ``unit_bytes`` bytes, of which all numbers of the copy are multiples.
    """
    target = destination[copy.destination_rank, copy.destination_pool]
    taken = window(source, copy.source_offset, copy.run_bytes, copy.counts, copy.source_strides, unit_bytes)
    given = window(target, copy.destination_offset, copy.run_bytes, copy.counts, copy.destination_strides, unit_bytes)
    return None if taken is None or given is None else (taken, given)


def window(
    array: npt.NDArray[Any],
    offset_bytes: int,
    run_bytes: int,
    counts: tuple[int, ...],
    strides: tuple[int, ...],
    unit_bytes: int,
) -> npt.NDArray[Any] | None:
    """Return strided runs of a flat array, None where they reach past it."""
    first = exact_div(offset_bytes, unit_bytes, "offset in units")
    shape = (*counts, exact_div(run_bytes, unit_bytes, "run in units"))
    steps = (*[exact_div(stride, unit_bytes, "stride in units") for stride in strides], 1)
    last = first + sum((count - 1) * step for count, step in zip(shape, steps, strict=True))
    if first < 0 or last >= array.size:
        return None
    width = array.itemsize
    return np.ndarray(shape, array.dtype, array.data, first * width, tuple([step * width for step in steps]))
