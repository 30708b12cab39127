"""``Runs``: copies as stretches of bytes, worked out once, and carried out by a launch for each word size.

A plan's copies are strided; laid out as runs they are three columns of numbers, which a GPU reads as quickly as what
they say. Where two runs write to one byte their order counts (a faulty plan has such), and runs have none: then there
is nothing to launch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ...model.arithmetic import div_up, exact_div
from ...sim.transfer.plan import ByteCopy
from ..tensors import integers_of

Integers = NDArray[np.int64]

_KERNELS: Final = f"{__package__}.triton_runs"
LONG_WORDS: Final = 1024
"""Words from which a run has a program of its own; shorter ones share one."""
PART_WORDS: Final = 8192
"""Words of a run that one program copies at most."""


class Runs(msgspec.Struct, frozen=True):
    """Stretches of ``lengths`` bytes from the addresses ``sources`` to ``targets``, all int64 of shape (runs,)."""

    sources: Integers
    targets: Integers
    lengths: Integers

    @property
    def size_bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.lengths.sum())

    @property
    def disjoint(self) -> bool:
        """Whether no byte is written twice, so that the order of the runs does not count."""
        order = np.argsort(self.targets, kind="stable")
        starts, ends = self.targets[order], self.targets[order] + self.lengths[order]
        return bool(np.all(starts[1:] >= ends[:-1]))

    def part(self, chosen: NDArray[np.bool_]) -> Runs:
        """Return some of the runs."""
        return Runs(self.sources[chosen], self.targets[chosen], self.lengths[chosen])


def runs_of(moves: Iterable[tuple[ByteCopy, int, int]]) -> Runs:
    """Return the runs of copies, each with the addresses of byte 0 of the source's pool and of the destination's."""
    columns: list[tuple[Integers, Integers, Integers]] = []
    for copy, source, target in moves:
        places = []
        for start, strides in ((source + copy.source_offset, copy.source_strides),
                               (target + copy.destination_offset, copy.destination_strides)):  # fmt: skip
            offsets = np.array([start], dtype=np.int64)
            for count, stride in zip(copy.counts, strides, strict=True):
                offsets = (offsets[:, None] + stride * np.arange(count, dtype=np.int64)).ravel()
            places.append(offsets)
        columns.append((places[0], places[1], np.full(len(places[0]), copy.run_bytes, dtype=np.int64)))
    if not columns:
        empty = np.empty(0, dtype=np.int64)
        return Runs(empty, empty, empty)
    sources, targets, lengths = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Runs(sources, targets, lengths)


def in_parts(runs: Runs, part_bytes: int) -> Runs:
    """Return the same runs, cut so that none is longer than ``part_bytes``."""
    if not runs.lengths.size or int(runs.lengths.max()) <= part_bytes:
        return runs
    parts = -(-runs.lengths // part_bytes)  # floor: up
    run = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)
    done = number * part_bytes
    lengths = np.minimum(runs.lengths[run] - done, part_bytes)
    return Runs(runs.sources[run] + done, runs.targets[run] + done, lengths)


class Launch(msgspec.Struct, frozen=True):
    """One launch: the anchor as words, three columns on the device, and how the kernel is compiled."""

    anchor: Any
    columns: tuple[Any, Any, Any]
    count: int
    rows: int
    words: int
    wide: bool

    def run(self) -> None:
        """Copy all runs."""
        importlib.import_module(_KERNELS).copy_runs[(div_up(self.count, self.rows),)](
            self.anchor, *self.columns, self.count, ROWS=self.rows, WORDS=self.words, WIDE=self.wide, num_warps=4
        )


def launches_of(runs: Runs, anchor: Any) -> list[Launch]:
    """Return what carries out ``runs``, counted from ``anchor``: a tensor of bytes that starts at a multiple of 16.

    At most one launch for each word size (16, 4, 2 and 1 bytes, the largest that divides source, target and length)
    and each of long and short runs. Raises ``ValueError`` where the order of the runs counts.
    """
    if not runs.disjoint:
        raise ValueError("found two runs that write to one byte, and launches have no order: carry them out one by one")
    address = anchor.data_ptr()
    numbers = (runs.sources - address) | (runs.targets - address) | runs.lengths
    left = np.ones(len(numbers), dtype=bool)
    launches = []
    for width, wide in ((16, True), (4, False), (2, False), (1, False)):
        fits = left & (numbers % width == 0)
        left &= ~fits
        word = min(width, 4)
        some = in_parts(runs.part(fits), PART_WORDS * word)
        long = some.lengths >= LONG_WORDS * word
        for chosen, rows, words in ((long, 1, 2048), (~long, 16, 128)):
            if not chosen.any():
                continue
            held = some.part(chosen)
            columns = [(held.sources - address), (held.targets - address), held.lengths]
            tensors = [torch.from_numpy(_exactly(column, word)).to(anchor.device) for column in columns]
            launches.append(
                Launch(
                    integers_of(anchor, word),
                    (tensors[0], tensors[1], tensors[2]),
                    len(held.lengths),
                    rows,
                    words,
                    wide,
                )
            )
    return launches


def _exactly(column: Integers, width: int) -> Integers:
    """Return bytes as words; every one was found to divide."""
    exact_div(int(np.bitwise_or.reduce(column)), width, "bytes of runs in words")
    return column // width  # floor: exact, as just seen
