"""``append_rows`` writes tokens into a paged cache, ``fetch_rows`` reads them back; both convert and quantise.

A program serves a tile of rows (one token and head each) and all their elements. Rows are counted in 32 bits, addresses
are int64 throughout.
"""

# mypy: ignore-errors
# Triton takes one branch of a constant condition, and must see both as branches.
# Triton evaluates the annotations of a kernel, so they are left out but for constants and 64-bit strides.

import triton
import triton.language as tl

from .triton_numbers import INTERPRETED, decode_fp8, encode_fp4, encode_fp8, load_rows, to_bf16, to_stored

_SIZES = ["row_count", "heads", "dim", "page_tokens", "table_row", "unit"]
_OUTSIDE = ["outside_token", "outside_head", "outside_dim"]
_CACHE = [f"cache_{name}" for name in ("start", "slot", "head", "token", "dim")]
_SCALES = [f"cache_scale_{name}" for name in ("start", "slot", "head", "token", "dim")]


@triton.jit
def _place(requests, positions, table, table_row, row_count, heads, page_tokens, ROWS: tl.constexpr):
    """Return (token, head, slot, token in page, which rows are meant) of this tile's rows.

    Rows whose request or position is negative are padding.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    meant = row < row_count
    token = row // heads  # floor: rows run over the heads of a token first
    head = (row - token * heads).to(tl.int64)
    request = tl.load(requests + token, mask=meant, other=-1)
    position = tl.load(positions + token, mask=meant, other=-1)
    meant = meant & (request >= 0) & (position >= 0)
    ordinal = position // page_tokens  # floor: its page among the request's pages
    entry = position - ordinal * page_tokens
    at = request.to(tl.int64) * table_row + ordinal
    slot = tl.load(table + at, mask=meant, other=0).to(tl.int64)
    return token.to(tl.int64), head, slot, entry.to(tl.int64), meant


@triton.jit(do_not_specialize=[*_SIZES, *_OUTSIDE, *_CACHE, *_SCALES])
def append_rows(cache, cache_scales, outside, requests, positions, table, row_count: tl.int32, heads: tl.int32,
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


@triton.jit
def _larger(one, other):
    """Return, of each bf16 half of two words without signs, the larger; NaN is larger than all."""
    if INTERPRETED:
        low = tl.maximum(one & 0xFFFF, other & 0xFFFF)
        return low | (tl.maximum((one >> 16) & 0xFFFF, (other >> 16) & 0xFFFF) << 16)
    else:
        return tl.inline_asm_elementwise(
            asm="max.NaN.bf16x2 $0, $1, $2;",
            constraints="=r,r,r",
            args=[one, other],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _low_half(word):
    """Return the bf16 in the low half of a word as fp32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high_half(word):
    """Return the bf16 in the high half of a word as fp32."""
    return (word & -65536).to(tl.float32, bitcast=True)


_WORD_TO_CODES = """
    shl.b32 low, ${word}, 16;
    and.b32 high, ${word}, 0xFFFF0000;
    mov.b32 a, low;
    mov.b32 b, high;
    abs.f32 a, a;
    abs.f32 b, b;
    mul.f32 a, a, ${inverse};
    mul.f32 b, b, ${inverse};
    cvt.rn.f16x2.f32 code, b, a;
    min.f16x2 code, code, most;
    shr.u32 carry, code, 9;
    and.b32 carry, carry, 0x00010001;
    add.u32 code, code, 0x00FF00FF;
    add.u32 code, code, carry;
    and.b32 code, code, 0x0E000E00;
    shr.u32 sign, ${word}, 3;
    lop3.b32 code{number}, sign, 0x10001000, code, 0xEA;
"""
"""Two codes of a word with their signs, in bits 9 to 12 of either half."""
_WORDS_TO_BYTES = tl.constexpr(
    """
    {
    .reg .b32 low, high, code, carry, sign, most, code0, code1, code2, code3;
    .reg .f32 a, b;
    mov.b32 most, 0x0E000E00;
    """
    + "".join([_WORD_TO_CODES.format(number=index, word=index + 1, inverse=index + 5) for index in range(4)])
    + """
    shr.u32 code0, code0, 9;
    shr.u32 code1, code1, 1;
    or.b32 code0, code0, code1;
    shr.u32 code2, code2, 9;
    shr.u32 code3, code3, 1;
    or.b32 code2, code2, code3;
    prmt.b32 low, code0, code2, 0x5410;
    prmt.b32 high, code0, code2, 0x7632;
    mad.lo.u32 $0, high, 16, low;
    }
    """
)
"""Four words to four bytes of two codes; ``most`` is 6 / 2^14 twice."""


@triton.jit
def _fp4_bytes(words, unit, scale, inverse):
    """Return words of two bf16 times ``unit`` over ``scale`` as bytes of two e2m1 codes.

    ``inverse`` is unit / scale / 2^14, ``unit`` a power of two.

    fp16 and e2m1 are made alike, with numbers below their first exponent evenly spaced, and the smallest exponent of
    fp16 is 2^-14. So an fp16 number that is x / 2^14 has the code of x in its upper bits, and to round it away its nine
    lower bits is to round x to e2m1, to nearest, ties to even. To make such a number is harmless: a bf16 has 8
    significant bits and a scale 4, so a quotient is as far as 2^-8 of it from a midpoint between two codes, or on it;
    and there fp16 keeps it, in spite of the roundings of ``inverse`` and of the product, which are some 2^-23.
    """
    if INTERPRETED:
        codes = encode_fp4(_low_half(words) * unit, scale) | (encode_fp4(_high_half(words) * unit, scale) << 4)
        return codes.to(tl.uint8)
    else:
        return tl.inline_asm_elementwise(
            asm=_WORDS_TO_BYTES,
            constraints="=r,r,r,r,r,f,f,f,f",
            args=[words, inverse],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )


@triton.jit(do_not_specialize=["row_count", *_SIZES[1:-1], "unit", *_OUTSIDE[:2], *_CACHE[:4], *_SCALES])
def append_fp4_words(cache, cache_scales, outside, requests, positions, table, row_count: tl.int32, heads: tl.int32,
                     dim: tl.int32, page_tokens: tl.int32, table_row: tl.int64, unit, outside_token: tl.int64,
                     outside_head: tl.int64, cache_start: tl.int64, cache_slot: tl.int64, cache_head: tl.int64,
                     cache_token: tl.int64, cache_scale_start: tl.int64, cache_scale_slot: tl.int64,
                     cache_scale_head: tl.int64, cache_scale_token: tl.int64, cache_scale_dim: tl.int64,
                     ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """``append_rows`` of NVFP4 from bf16, where rows are contiguous and ``unit`` is a power of two.

    ``outside`` points to words of two elements and its strides count them; the row fits into ``COLUMNS``. The bytes are
    those of ``append_rows``.
    """
    token, head, slot, entry, meant = _place(requests, positions, table, table_row, row_count, heads, page_tokens, ROWS)
    WORDS: tl.constexpr = COLUMNS // 2  # floor: exact
    BLOCKS: tl.constexpr = COLUMNS // 16  # floor: exact
    source = tl.multiple_of(token * outside_token + head * outside_head, 4)
    count = dim // 16 * 8  # floor: exact, and now the compiler knows a factor
    word = tl.arange(0, WORDS)
    inside = meant[:, None] & (word < count)[None, :]
    words = tl.load(outside + source[:, None] + word[None, :], mask=inside, other=0)
    grouped = tl.reshape(words, [ROWS, BLOCKS, 8])
    peaks = tl.reduce(grouped & 0x7FFF7FFF, 2, _larger)
    peak = tl.maximum(_low_half(peaks), _high_half(peaks), propagate_nan=tl.PropagateNan.ALL)
    # a sixth of a bf16 is far from the midpoints of e4m3 or on one, and there fp16 puts right what the product is off
    code = encode_fp8((peak * unit * 0.16666667163372040).to(tl.float16).to(tl.float32))
    scale = decode_fp8(code).to(tl.float32)
    inverse = tl.where(scale == 0.0, 0.0, tl.fdiv(unit * 0.00006103515625, scale))
    packed = _fp4_bytes(grouped, unit, scale[:, :, None], inverse[:, :, None])
    rows = tl.multiple_of(cache_start + slot * cache_slot + head * cache_head + entry * cache_token, 16)
    tl.store(cache + rows[:, None] + word[None, :], tl.reshape(packed, [ROWS, WORDS]), mask=inside)
    block = tl.arange(0, BLOCKS)
    scale_rows = cache_scale_start + slot * cache_scale_slot + head * cache_scale_head + entry * cache_scale_token
    at = scale_rows[:, None] + block[None, :].to(tl.int64) * cache_scale_dim
    tl.store(cache_scales + at, code, mask=meant[:, None] & (block < dim // 16)[None, :])  # floor: exact


@triton.jit(do_not_specialize=[*_SIZES, *_OUTSIDE, *_CACHE, *_SCALES])
def fetch_rows(cache, cache_scales, outside, requests, positions, table, row_count: tl.int32, heads: tl.int32,
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
