"""``append_rows`` writes tokens into a paged cache, ``fetch_rows`` reads them back; both convert and quantise.

A program serves a tile of rows (one token and head each) and all their elements. Addresses are int64 throughout.
"""

# mypy: ignore-errors
# Triton evaluates the annotations of a kernel, so they are left out but for constants and 64-bit strides.

import triton
import triton.language as tl

from .triton_numbers import decode_fp8, encode_fp4, encode_fp8, load_rows, to_bf16, to_stored

_SIZES = ["row_count", "heads", "dim", "page_tokens", "table_row", "unit"]
_OUTSIDE = ["outside_token", "outside_head", "outside_dim"]
_CACHE = [f"cache_{name}" for name in ("start", "slot", "head", "token", "dim")]
_SCALES = [f"cache_scale_{name}" for name in ("start", "slot", "head", "token", "dim")]


@triton.jit
def _place(requests, positions, table, table_row, row_count, heads, page_tokens, ROWS: tl.constexpr):
    """Return (token, head, slot, token in page, which rows are meant) of this tile's rows.

    Rows whose request or position is negative are padding.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    meant = row < row_count
    token = row // heads  # floor: rows run over the heads of a token first
    head = row - token * heads
    request = tl.load(requests + token, mask=meant, other=-1)
    position = tl.load(positions + token, mask=meant, other=-1)
    meant = meant & (request >= 0) & (position >= 0)
    ordinal = position // page_tokens  # floor: its page among the request's pages
    entry = position - ordinal * page_tokens
    at = request.to(tl.int64) * table_row + ordinal
    slot = tl.load(table + at, mask=meant, other=0).to(tl.int64)
    return token, head, slot, entry.to(tl.int64), meant


@triton.jit(do_not_specialize=[*_SIZES, *_OUTSIDE, *_CACHE, *_SCALES])
def append_rows(cache, cache_scales, outside, requests, positions, table, row_count: tl.int64, heads: tl.int32,
                dim: tl.int32, page_tokens: tl.int32, table_row: tl.int64, unit, outside_token: tl.int64,
                outside_head: tl.int64, outside_dim: tl.int64, cache_start: tl.int64, cache_slot: tl.int64,
                cache_head: tl.int64, cache_token: tl.int64, cache_dim: tl.int64, cache_scale_start: tl.int64,
                cache_scale_slot: tl.int64, cache_scale_head: tl.int64, cache_scale_token: tl.int64,
                cache_scale_dim: tl.int64, FORMAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                WIDE: tl.constexpr):  # fmt: skip
    """Store row (token, head) of ``outside`` at its place in the cache, times ``unit``.

    ``WIDE`` says that rows on both sides are contiguous and multiples of 16 elements.
    """
    token, head, slot, entry, meant = _place(requests, positions, table, table_row, row_count, heads, page_tokens, ROWS)
    source = token * outside_token + head * outside_head
    rows = cache_start + slot * cache_slot + head * cache_head + entry * cache_token
    if WIDE:
        source = tl.multiple_of(source, 8)
        dim = dim // 16 * 16  # floor: no change, but now the compiler knows a factor
        rows = tl.multiple_of(rows, 16 if FORMAT >= 3 else (8 if FORMAT >= 1 else 4))
    for first in range(0, dim, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = meant[:, None] & (columns < dim)[None, :]
        if WIDE:
            values = tl.load(outside + source[:, None] + columns[None, :], mask=inside, other=0.0)
        else:
            at = source[:, None] + columns[None, :].to(tl.int64) * outside_dim
            values = tl.load(outside + at, mask=inside, other=0.0)
        values = values.to(tl.float32) * unit
        if FORMAT == 4:
            scale_rows = cache_scale_start + slot * cache_scale_slot + head * cache_scale_head
            scale_rows += entry * cache_scale_token
            _store_fp4(cache, cache_scales, values, rows, cache_dim, scale_rows, cache_scale_dim, first, dim, meant,
                       ROWS, COLUMNS, WIDE)  # fmt: skip
        elif WIDE:
            tl.store(cache + rows[:, None] + columns[None, :], to_stored(values, FORMAT), mask=inside)
        else:
            at = rows[:, None] + columns[None, :].to(tl.int64) * cache_dim
            tl.store(cache + at, to_stored(values, FORMAT), mask=inside)


@triton.jit
def _store_fp4(cache, cache_scales, values, rows, cache_dim, scale_rows, scale_dim, first, dim, meant,
               ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Store a tile of rows as NVFP4: per block of 16 the scale amax / 6 in e4m3, elements over it in e2m1."""
    BLOCKS: tl.constexpr = COLUMNS // 16  # floor: exact, a power of two from 16
    BYTES: tl.constexpr = COLUMNS // 2  # floor: exact
    grouped = tl.reshape(values, [ROWS, BLOCKS, 16])
    scale = encode_fp8(tl.div_rn(tl.max(tl.abs(grouped), axis=2), 6.0))
    codes = encode_fp4(grouped, decode_fp8(scale).to(tl.float32)[:, :, None])
    even, odd = tl.split(tl.reshape(codes, [ROWS, BYTES, 2]))
    packed = (even | (odd << 4)).to(tl.uint8)
    byte = first // 2 + tl.arange(0, BYTES)  # floor: exact, the tile starts at a multiple of 16
    inside = meant[:, None] & (byte < dim // 2)[None, :]  # floor: exact, dim is a multiple of 16
    if WIDE:
        tl.store(cache + rows[:, None] + byte[None, :], packed, mask=inside)
    else:
        tl.store(cache + rows[:, None] + byte[None, :].to(tl.int64) * cache_dim, packed, mask=inside)
    block = first // 16 + tl.arange(0, BLOCKS)  # floor: exact, as above
    at = scale_rows[:, None] + block[None, :].to(tl.int64) * scale_dim
    whole = meant[:, None] & (block < dim // 16)[None, :]  # floor: exact, as above
    tl.store(cache_scales + at, scale, mask=whole)


@triton.jit(do_not_specialize=[*_SIZES, *_OUTSIDE, *_CACHE, *_SCALES])
def fetch_rows(cache, cache_scales, outside, requests, positions, table, row_count: tl.int64, heads: tl.int32,
               dim: tl.int32, page_tokens: tl.int32, table_row: tl.int64, unit, outside_token: tl.int64,
               outside_head: tl.int64, outside_dim: tl.int64, cache_start: tl.int64, cache_slot: tl.int64,
               cache_head: tl.int64, cache_token: tl.int64, cache_dim: tl.int64, cache_scale_start: tl.int64,
               cache_scale_slot: tl.int64, cache_scale_head: tl.int64, cache_scale_token: tl.int64,
               cache_scale_dim: tl.int64, FORMAT: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    """Read row (token, head) of the cache, times ``unit``, into ``outside``; padding rows stay as they are."""
    token, head, slot, entry, meant = _place(requests, positions, table, table_row, row_count, heads, page_tokens, ROWS)
    rows = cache_start + slot * cache_slot + head * cache_head + entry * cache_token
    scale_rows = cache_scale_start + slot * cache_scale_slot + head * cache_scale_head + entry * cache_scale_token
    for first in range(0, dim, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = meant[:, None] & (columns < dim)[None, :]
        values = load_rows(cache, rows, cache_dim, cache_scales, scale_rows, cache_scale_dim, columns, inside, FORMAT)
        at = token[:, None] * outside_token + head[:, None] * outside_head + columns[None, :].to(tl.int64) * outside_dim
        values = values * unit
        if outside.dtype.element_ty == tl.bfloat16:
            tl.store(outside + at, to_bf16(values), mask=inside)
        else:
            tl.store(outside + at, values, mask=inside)
