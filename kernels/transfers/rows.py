"""The rows of logical bytes that a rank holds, for the probe kernels: a head's row, with its address for number.

A second witness beside the bytes of ``contents``: the source's rows are stamped with their addresses and the
destination's are verified by kernels, in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from ...sim.transfer.proof import StagedRank, Staging
from ...sim.transfer.truth import Plane
from ..probe.rows import Row

MAX_ROWS: Final = 1 << 16
"""Rows of one rank at most; a layout that is told in more has no second witness."""


def rows_of_rank(staging: Staging, rank: StagedRank, first_pool: int) -> list[Row] | None:
    """Return the rows of all planes of a rank, its pools numbered from ``first_pool``; None where there are too many.

    Rows along the longest axis are told by one for each run of even steps.
    """
    rows: list[Row] = []
    for planes in rank.planes.values():
        for plane in planes:
            start = staging.addresses.start_of[plane.name] + plane.first_byte
            for block, slot in enumerate(rank.slots[plane.life_cycle]):
                offset = plane.offset_bytes + slot * plane.slot_stride_bytes
                address = start + block * plane.block_positions * plane.position_bytes
                rows.extend(_rows(plane, offset, address, first_pool))
                if len(rows) > MAX_ROWS:
                    return None
    return rows


def _rows(plane: Plane, offset: int, address: int, first_pool: int) -> Iterator[Row]:
    axes = list(zip(plane.steps, plane.page.stride_bytes[:-1], strict=True)) or [((0,), 0)]
    longest = max(range(len(axes)), key=lambda index: len(axes[index][0]))
    steps, stride = axes.pop(longest)
    pool = first_pool + plane.pool
    for choice in itertools.product(*[range(len(each)) for each, _ in axes]):
        logical = address + sum(each[index] for index, (each, _) in zip(choice, axes, strict=True))
        place = offset + sum(index * pitch for index, (_, pitch) in zip(choice, axes, strict=True))
        for first, count in _even_runs(steps):
            step = steps[first + 1] - steps[first] if count > 1 else 0
            start = place + first * stride
            yield (start, count, stride, plane.row_bytes, logical + steps[first], step, pool, 0)


def _even_runs(steps: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of runs of ``steps`` whose members are equally far apart."""
    first = 0
    while first < len(steps):
        end = first + 1
        while end < len(steps) and (end == first + 1 or steps[end] - steps[end - 1] == steps[first + 1] - steps[first]):
            end += 1
        yield first, end - first
        first = end
