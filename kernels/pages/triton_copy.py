"""``copy_pages``: pages from one strided place to another, word by word.

A page is ``outer x middle x inner`` words on either side, with strides of its own there. A program serves a tile of
(outer, middle) rows and walks along their words. Addresses are int64.
"""

# mypy: ignore-errors
# Triton evaluates the annotations of a kernel, so they are left out but for constants and 64-bit strides.

import triton
import triton.language as tl

_STRIDES = [f"{side}_{axis}" for side in ("source", "target") for axis in ("start", "slot", "outer", "middle", "inner")]


@triton.jit(do_not_specialize=["source_slots", "target_slots", "rows", "middle", "inner", "chunk", *_STRIDES])
def copy_pages(source, target, source_slots, target_slots, rows: tl.int32, middle: tl.int32, inner: tl.int32,
               chunk: tl.int32, source_start: tl.int64, source_slot: tl.int64, source_outer: tl.int64,
               source_middle: tl.int64, source_inner: tl.int64, target_start: tl.int64, target_slot: tl.int64,
               target_outer: tl.int64, target_middle: tl.int64, target_inner: tl.int64, ROWS: tl.constexpr,
               WORDS: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Copy page ``source_slots[i]`` to page ``target_slots[i]``; negative slots on either side are skipped.

    ``WIDE`` says that words lie next to each other on both sides and rows start at, and are, multiples of four words.
    A program copies ``chunk`` words of each of its rows.
    """
    page = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    from_slot = tl.load(source_slots + page).to(tl.int64)
    to_slot = tl.load(target_slots + page).to(tl.int64)
    meant = row < tl.where(tl.minimum(from_slot, to_slot) >= 0, rows, 0)
    outer = (row // middle).to(tl.int64)  # floor: rows run over the middle axis first
    within = (row % middle).to(tl.int64)
    read = source_start + from_slot * source_slot + outer * source_outer + within * source_middle
    write = target_start + to_slot * target_slot + outer * target_outer + within * target_middle
    first = tl.program_id(2) * chunk
    last = tl.minimum(first + chunk, inner)
    if WIDE:
        read, write = tl.multiple_of(read, 4), tl.multiple_of(write, 4)
        first = first // 4 * 4  # floor: no change, but now the compiler knows a factor
        last = last // 4 * 4  # floor: as above
    for start in range(first, last, WORDS):
        word = start + tl.arange(0, WORDS)
        inside = meant[:, None] & (word < last)[None, :]
        if WIDE:
            held = tl.load(source + read[:, None] + word[None, :], mask=inside, other=0)
            tl.store(target + write[:, None] + word[None, :], held, mask=inside)
        else:
            held = tl.load(source + read[:, None] + word[None, :] * source_inner, mask=inside, other=0)
            tl.store(target + write[:, None] + word[None, :] * target_inner, held, mask=inside)
