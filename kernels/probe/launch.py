"""Launching the probe kernels over tables of rows."""

from __future__ import annotations

import importlib
from typing import Any, Final

import msgspec
import numpy as np

from ..device import Device
from .rows import AXES, AXIS, COLUMNS, ITEM, Integers, RowClass, RowTable, tile_ends

KERNELS: Final = f"{__package__}.triton_kernels"


def _kernels() -> Any:
    """Return the module of kernels, which must not be imported before a device is opened."""
    return importlib.import_module(KERNELS)


class Uploaded(msgspec.Struct, frozen=True):
    """Rows of one class on a device, their tile ends and places, and the number of tiles."""

    kind: RowClass
    rows: Any
    ends: Any
    places: Any
    row_count: int
    tiles: int
    block_words: int

    @property
    def steps(self) -> int:
        """Steps that find one of the rows."""
        return self.row_count.bit_length()

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled for."""
        axes = self.kind.axes
        return {
            "COLUMNS": COLUMNS,
            "AXIS": AXIS,
            "AXES": axes,
            "SKIP": AXES - axes,
            "WORD": self.kind.word_bytes,
            "LONG": self.kind.long_items,
            "BLOCK": self.block_words,
        }


class Tally(msgspec.Struct, frozen=True):
    """What ``verify`` counts, per row: bytes that differ, and the lowest of them from the anchor."""

    counts: Any
    lowest: Any

    def read(self) -> tuple[Integers, Integers]:
        """Return both as NumPy arrays; the lowest is the largest int64 where the count is 0."""
        return self.counts.cpu().numpy(), self.lowest.cpu().numpy()


class Anchor:
    """A tensor from which addresses are counted; it lives as long as the replay."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.memory = device.allocate(256)
        self.address = self.memory.address
        self.by_width = {width: device.words(self.memory, width) for width in (1, 4)}

    def words(self, word_bytes: int) -> Any:
        """Return the tensor as words of 1 or 4 bytes."""
        return self.by_width[min(4, word_bytes)]


def upload(device: Device, table: RowTable) -> list[Uploaded]:
    """Return the classes of ``table`` on ``device``."""
    uploaded = []
    for kind, rows, places in table.classes:
        block = _block_words(device, kind, rows)
        ends = tile_ends(kind, rows, block)
        uploaded.append(
            Uploaded(
                kind, device.upload(rows), device.upload(ends), device.upload(places), len(rows), int(ends[-1]), block
            )
        )
    return uploaded


def _block_words(device: Device, kind: RowClass, rows: Integers) -> int:
    """Return the words of a tile. The interpreter compiles nothing, so there a tile is no larger than its rows."""
    block = device.block_words if kind.long_items else device.short_block_words
    if device.kind == "cuda":
        return block
    ends = tile_ends(kind, rows, 1)
    words = rows[:, ITEM] if kind.long_items else np.diff(ends, prepend=0)
    return max(16, min(block, 1 << int(words.max()).bit_length()))


def new_tally(device: Device, count: int) -> Tally:
    """Return a tally of ``count`` rows that has seen nothing."""
    return Tally(
        device.upload(np.zeros(count, dtype=np.int64)),
        device.upload(np.full(count, np.iinfo(np.int64).max, dtype=np.int64)),
    )


def stamp(anchor: Anchor, rows: list[Uploaded], digit: int) -> None:
    """Write digit ``digit`` (base 256) of their numbers through ``rows``."""
    for part in rows:
        if part.tiles:
            _kernels().stamp[(part.tiles,)](
                anchor.words(part.kind.word_bytes), part.rows, part.ends, part.row_count, part.steps, digit,
                **part.constants, num_warps=anchor.device.warps,
            )  # fmt: skip


def verify(anchor: Anchor, rows: list[Uploaded], digit: int, tally: Tally) -> None:
    """Add to ``tally`` what differs from digit ``digit`` of the numbers of ``rows``."""
    for part in rows:
        if part.tiles:
            _kernels().verify[(part.tiles,)](
                anchor.words(part.kind.word_bytes), part.rows, part.ends, part.places, tally.counts, tally.lowest,
                part.row_count, part.steps, digit, **part.constants, num_warps=anchor.device.warps,
            )  # fmt: skip


def verify_narrow(anchor: Anchor, rows: list[Uploaded], digit: int, tally: Tally) -> None:
    """``verify`` through byte offsets of 32 bits; ``rows`` must be bytewise."""
    for part in rows:
        constants = {name: part.constants[name] for name in ("COLUMNS", "AXIS", "AXES", "SKIP", "BLOCK")}
        _kernels().verify_narrow[(part.tiles,)](
            anchor.words(1), part.rows, part.ends, part.places, tally.counts, tally.lowest, part.row_count, part.steps,
            digit, **constants, num_warps=anchor.device.warps,
        )  # fmt: skip


class Folding(msgspec.Struct, frozen=True):
    """The pools to fold, uploaded: one row each."""

    rows: Any
    ends: Any
    places: Any
    row_count: int
    tiles: int

    @classmethod
    def upload(cls, device: Device, table: Integers) -> Folding:
        """Return ``table``, one contiguous row per pool whose offset is a multiple of 16."""
        tiles = -(-table[:, ITEM] // (4 * device.fold_block_words))  # floor: up
        ends = np.cumsum(tiles)
        places = np.arange(len(table), dtype=np.int64)
        total = int(ends[-1]) if len(table) else 0
        return cls(device.upload(table), device.upload(ends), device.upload(places), len(table), total)


def fold(anchor: Anchor, folding: Folding, folds: Any) -> None:
    """Add to ``folds`` (int64, one per pool) the folds of the pools' bytes."""
    if folding.tiles:
        _kernels().fold[(folding.tiles,)](
            anchor.words(4), folding.rows, folding.ends, folding.places, folds, folding.row_count,
            folding.row_count.bit_length(), COLUMNS=COLUMNS, AXIS=AXIS, BLOCK=anchor.device.fold_block_words,
            num_warps=anchor.device.warps,
        )  # fmt: skip


def copy_runs(anchor: Anchor, table: Integers) -> None:
    """Copy bytes: a row of ``table`` has the target, the bytes and, as its number, the source, both from the anchor.

    No row may write what another one reads, as the rows are copied in no particular order.
    """
    if not len(table):
        return
    device = anchor.device
    tiles = -(-table[:, ITEM] // device.short_block_words)  # floor: up
    ends = np.cumsum(tiles)
    _kernels().copy[(int(ends[-1]),)](
        anchor.words(1), device.upload(table), device.upload(ends), len(table), len(table).bit_length(),
        COLUMNS=COLUMNS, BLOCK=device.short_block_words, num_warps=device.warps,
    )  # fmt: skip
