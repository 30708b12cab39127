"""The probe kernels in Triton: ``stamp`` writes digits of numbers, ``verify`` counts the bytes that hold others.

A program serves one tile. Which row it belongs to is looked up among the rows' tile ends; a tile of a long item is a
run of consecutive words of one item, a tile of short items a run of words of the whole row. All addresses are int64,
and come to a 4-byte or 1-byte word counted from an anchor tensor, which need not be near: 16-byte accesses are four
4-byte words of one thread whose place is a known multiple of four.

``fold`` reduces a pool to 64 bits, see ``kvsan.sim.arena.fold``. ``verify_narrow`` is what a consumer with 32-bit byte
offsets would read.

Whether Triton compiles these or interprets them is settled when this module is imported; see ``kernels.device``.
"""

# mypy: ignore-errors
# Triton evaluates the annotations of a kernel, so they are left out but for constants.

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether these kernels run through the interpreter."""


@triton.jit
def _row_of_tile(ends, row_count, tile, search_steps):
    """Return the first row whose tiles end past ``tile``."""
    low = tile * 0
    high = low + row_count
    for _ in range(search_steps):
        middle = (low + high) // 2  # floor: any row between
        open_end = low < high
        past = tl.load(ends + middle, mask=open_end, other=0) > tile
        high = tl.where(open_end & past, middle, high)
        low = tl.where(open_end & (past == 0), middle + 1, low)
    return low


@triton.jit
def _tile(rows, ends, row_count, search_steps, COLUMNS: tl.constexpr, AXIS: tl.constexpr, AXES: tl.constexpr,
          SKIP: tl.constexpr, WORD: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Return (row, its columns, first word, words from there on, numbers, which words are meant) of this tile.

    The first word counts from the anchor. ``AXES`` axes are used of those that a row has room for; the ``SKIP`` outer
    ones have size 1. A tile of a long item has one number and 32-bit distances, so that little is left to compute.
    """
    tile = tl.program_id(0).to(tl.int64)
    row = _row_of_tile(ends, row_count, tile, search_steps)
    before = tl.load(ends + row - 1, mask=row > 0, other=0)
    columns = rows + row * COLUMNS
    place = tl.load(columns)
    cells = tl.load(columns + 1)
    pitch = tl.load(columns + 2)
    UNIT: tl.constexpr = 4 if WORD == 16 else WORD
    words = tl.load(columns + 3) // UNIT  # floor: exact, the class divides it
    first_number = tl.load(columns + 4)
    step = tl.load(columns + 5)
    lane = tl.arange(0, BLOCK)
    if LONG:
        tiles = (words + (BLOCK - 1)) // BLOCK  # floor: up
        rest = (tile - before) // tiles  # floor: items before this one
        first = (tile - before - rest * tiles) * BLOCK
        place += first * UNIT
        for back in tl.static_range(AXES):
            size = tl.load(columns + (AXIS + 2 * (SKIP + AXES - 1 - back)))
            stride = tl.load(columns + (AXIS + 2 * (SKIP + AXES - 1 - back) + 1))
            outer = rest // size  # floor: the digit of this axis is the rest
            place += (rest - outer * size) * stride
            rest = outer
        place += rest * pitch
        start = place // UNIT  # floor: exact, the class divides it
        left = tl.minimum(words - first, BLOCK).to(tl.int32)
        if WORD == 16:
            # the compiler joins four words to one access only where it knows that all four or none are meant
            start = tl.multiple_of(start, 4)
            left = tl.multiple_of(left, 4)
        distances = lane
        numbers = first_number + rest * step
        meant = lane < left
    else:
        index = (tile - before) * BLOCK + lane
        rest = index // words  # floor: items before this one
        places = (index - rest * words) * UNIT
        for back in tl.static_range(AXES):
            size = tl.load(columns + (AXIS + 2 * (SKIP + AXES - 1 - back)))
            stride = tl.load(columns + (AXIS + 2 * (SKIP + AXES - 1 - back) + 1))
            outer = rest // size  # floor: the digit of this axis is the rest
            places += (rest - outer * size) * stride
            rest = outer
        places += rest * pitch
        start = place // UNIT  # floor: exact, the class divides it
        distances = places // UNIT  # floor: exact, the class divides it
        numbers = first_number + rest * step
        meant = rest < cells
    return row, columns, start, distances, numbers, meant


@triton.jit
def _digit_words(numbers, digit, WORD: tl.constexpr):
    """Return digit ``digit`` (base 256) of each number in every byte of a word."""
    value = (numbers >> (8 * digit)) & 255
    return value.to(tl.int8) if WORD == 1 else (value * 0x01010101).to(tl.int32)


@triton.jit(do_not_specialize=["row_count", "search_steps", "digit"])
def stamp(anchor, rows, ends, row_count, search_steps, digit, COLUMNS: tl.constexpr, AXIS: tl.constexpr,
          AXES: tl.constexpr, SKIP: tl.constexpr, WORD: tl.constexpr, LONG: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Write digit ``digit`` of each cell's number to every byte that the rows reach."""
    _, _, start, distances, numbers, meant = _tile(
        rows, ends, row_count, search_steps, COLUMNS, AXIS, AXES, SKIP, WORD, LONG, BLOCK
    )
    values = _digit_words(numbers, digit, WORD)
    tl.store(anchor + start + distances, tl.zeros([BLOCK], values.dtype) + values, mask=meant)


@triton.jit
def _report(counts, lowest, places, row, unlike, at, UNIT: tl.constexpr):
    """Add the bytes of ``unlike`` that are not zero to the row's count, and keep the lowest's place in bytes."""
    total = tl.zeros((), tl.int32)
    least = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for byte in tl.static_range(UNIT):
        wrong = ((unlike >> (8 * byte)) & 255) != 0
        total += tl.sum(wrong.to(tl.int32), axis=0)
        least = tl.minimum(least, tl.min(tl.where(wrong, at * UNIT + byte, 0x7FFFFFFFFFFFFFFF), axis=0))
    place = tl.load(places + row)
    tl.atomic_add(counts + place, total.to(tl.int64), sem="relaxed")
    tl.atomic_min(lowest + place, least, sem="relaxed")


@triton.jit(do_not_specialize=["row_count", "search_steps", "digit"])
def verify(anchor, rows, ends, places, counts, lowest, row_count, search_steps, digit, COLUMNS: tl.constexpr,
           AXIS: tl.constexpr, AXES: tl.constexpr, SKIP: tl.constexpr, WORD: tl.constexpr, LONG: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Count into ``counts`` the bytes that differ from digit ``digit`` of their cell's number, and keep the lowest.

    ``places`` is the entry of ``counts`` and ``lowest`` (bytes from the anchor) of each row.
    """
    row, _, start, distances, numbers, meant = _tile(
        rows, ends, row_count, search_steps, COLUMNS, AXIS, AXES, SKIP, WORD, LONG, BLOCK
    )
    expected = _digit_words(numbers, digit, WORD)
    seen = tl.load(anchor + start + distances, mask=meant, other=0)
    unlike = tl.where(meant, (seen ^ expected).to(tl.int32), 0)
    if tl.max((unlike != 0).to(tl.int32), axis=0) != 0:
        at = start + distances.to(tl.int64)
        _report(counts, lowest, places, row, unlike, at, 4 if WORD == 16 else WORD)


@triton.jit(do_not_specialize=["row_count", "search_steps", "digit"])
def verify_narrow(anchor, rows, ends, places, counts, lowest, row_count, search_steps, digit, COLUMNS: tl.constexpr,
                  AXIS: tl.constexpr, AXES: tl.constexpr, SKIP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """``verify`` by a consumer whose byte offsets from the pool's base are signed 32-bit integers.

    Offsets that wrap out of the pool count as wrong and are not read. ``lowest`` is the place that was meant.
    """
    row, columns, start, distances, numbers, meant = _tile(
        rows, ends, row_count, search_steps, COLUMNS, AXIS, AXES, SKIP, 1, False, BLOCK
    )
    at = start + distances
    base = tl.load(columns + 6)
    narrow = (at - base).to(tl.int32).to(tl.int64)
    inside = (narrow >= 0) & (narrow < tl.load(columns + 7))
    seen = tl.load(anchor + (base + narrow), mask=meant & inside, other=0)
    unlike = (seen ^ _digit_words(numbers, digit, 1)).to(tl.int32) & 255
    unlike = tl.where(meant, tl.where(inside, unlike, 255), 0)
    if tl.max((unlike != 0).to(tl.int32), axis=0) != 0:
        _report(counts, lowest, places, row, unlike, at, 1)


@triton.jit(do_not_specialize=["row_count", "search_steps"])
def fold(anchor, rows, ends, places, folds, row_count, search_steps, COLUMNS: tl.constexpr, AXIS: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    """Add to ``folds`` the fold of each row, a run of bytes that begins at a multiple of 16 from the anchor.

    Words of 4 bytes, little end first, the last one filled up with zeros: see ``kvsan.sim.arena.fold``.
    """
    tile = tl.program_id(0).to(tl.int64)
    row = _row_of_tile(ends, row_count, tile, search_steps)
    before = tl.load(ends + row - 1, mask=row > 0, other=0)
    columns = rows + row * COLUMNS
    start = tl.multiple_of(tl.load(columns) // 4, 4)  # floor: exact, pools begin at multiples of 16
    size = tl.load(columns + 3)
    index = (tile - before) * BLOCK + tl.arange(0, BLOCK)
    left = size - index * 4
    words = tl.load(anchor + (start + index), mask=left > 0, other=0).to(tl.int64) & 0xFFFFFFFF
    words = tl.where((left > 0) & (left < 4), words & ((1 << (8 * (left & 3))) - 1), words)
    mixed = index + 1
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
    terms = tl.where(left > 0, (words + 1) * (mixed | 1), 0)
    tl.atomic_add(folds + tl.load(places + row), tl.sum(terms, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["row_count", "search_steps"])
def copy(anchor, rows, ends, row_count, search_steps, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Copy runs of bytes: a row is a target from the anchor, its bytes, and in the number's column the source."""
    tile = tl.program_id(0).to(tl.int64)
    row = _row_of_tile(ends, row_count, tile, search_steps)
    before = tl.load(ends + row - 1, mask=row > 0, other=0)
    columns = rows + row * COLUMNS
    index = (tile - before) * BLOCK + tl.arange(0, BLOCK)
    meant = index < tl.load(columns + 3)
    held = tl.load(anchor + tl.load(columns + 4) + index, mask=meant, other=0)
    tl.store(anchor + tl.load(columns) + index, held, mask=meant)
