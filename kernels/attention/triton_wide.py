"""Decode attention where rows can be read in pieces of 16 bytes: one query token per request, the context in splits.

A program serves up to 16 query heads of one KV head, and one split of one request's visible tokens, a tile at a time.
Visible are the first ``sinks`` tokens and the last ``window``; whole tiles between them are left out. A tile consists
of pieces of ``PIECE`` tokens that each lie in one page, so a page table entry is read once for a piece, and
what is left to compute for each row is one product. Rows past the request's last token repeat that token's, and do not
count.

Strides and starts of K and V are in units of 16 bytes, those of block scales of 4 bytes, those of queries of 4
elements. What is stored in ``partial`` and ``extremes`` is what ``triton_decode.combine`` joins.

fp8 and NVFP4 are read as words of 16 bits, because tensor cores take their operands in such. The two or four elements
of a word go through products of their own and meet again only where they are stored: nothing is ever interleaved.
"""

# mypy: ignore-errors
# Triton takes one branch of a constant condition, and must see both as branches.
# Triton evaluates the annotations of a kernel, so they are left out but for constants and 64-bit strides.

import triton
import triton.language as tl

from ..quantize.triton_numbers import INTERPRETED, decode_fp4, decode_fp8, for_dot
from .triton_decode import product

_SIZES = ["heads", "group", "dim", "value_dim", "page_tokens", "table_row", "split_tokens", "window", "sinks"]
_QUERIES = ["query_request", "query_head", "out_request", "out_head", "out_dim", "scale", "unit"]
_PLANE = ("start", "slot", "head", "token")
_STRIDES = [f"{name}_{axis}" for name in ("key", "key_scale", "value", "value_scale") for axis in _PLANE]
_UNSPECIALIZED = [*_SIZES, *_QUERIES, *_STRIDES]
HIDDEN = float("-inf")


@triton.jit
def _program(lengths, heads, group, split_tokens, window, sinks, TOKENS: tl.constexpr):
    """Return a program's (request, head, first query head, first and last virtual token, length, sinks kept, begin of
    the window, virtual tokens before the gap, tokens of the gap).

    Virtual tokens are those of all tiles that hold a visible one, counted without the gap. The gap is whole tiles.
    """
    groups = (group + 15) // 16  # floor: up
    program = tl.program_id(0)
    request = program // (heads * groups)  # floor: programs run over the heads of a request first
    rest = program - request * heads * groups
    head = rest // groups  # floor: as above
    length = tl.load(lengths + request)
    begin = tl.maximum(length - window, 0)
    kept = tl.minimum(sinks, begin)
    before = (kept + TOKENS - 1) // TOKENS * TOKENS  # floor: up
    gap = tl.maximum(begin // TOKENS * TOKENS - before, 0)  # floor: the window's first tile is read whole
    first = tl.program_id(1) * split_tokens
    last = tl.minimum(first + split_tokens, length - gap)
    head_row = (rest - head * groups) * 16
    return request.to(tl.int64), head.to(tl.int64), head_row, first, last, length, kept, begin, before, gap


@triton.jit
def _pieces(start, length, table, page_tokens, TOKENS: tl.constexpr, PIECE: tl.constexpr):
    """Return (slot, token in its page) of each token of the tile that begins at ``start``."""
    here = tl.arange(0, TOKENS)
    slots = tl.zeros([TOKENS], tl.int32)
    entries = tl.zeros([TOKENS], tl.int32)
    last_piece = (length - 1) // PIECE * PIECE  # floor: the piece of the last token
    for piece in tl.static_range(TOKENS // PIECE):  # floor: exact
        begin = tl.minimum(start + piece * PIECE, last_piece)
        ordinal = begin // page_tokens  # floor: its page among the request's pages
        slot = tl.load(table + ordinal)
        entry = begin - ordinal * page_tokens + tl.minimum(here - piece * PIECE, length - 1 - begin)
        mine = here >= piece * PIECE
        slots = tl.where(mine, slot, slots)
        entries = tl.where(mine, entry, entries)
    return slots, entries


@triton.jit
def _rows(slots, entries, slot_stride, token_stride, UNIT: tl.constexpr):
    """Return where rows begin, in elements of which ``UNIT`` make a stride's unit."""
    return (slots.to(tl.int64) * slot_stride + entries * token_stride) * UNIT


@triton.jit
def _tile(plane, rows, columns, count, FULL: tl.constexpr):
    """Return ``columns`` of rows that start at ``rows``; 0 from column ``count`` on, which none is where ``FULL``.

    Nothing is read twice, so it may leave the cache at once.
    """
    at = plane + rows[:, None] + columns[None, :]
    if FULL:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=(columns < count)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _weights(scores, largest, start, length, kept, begin, TOKENS: tl.constexpr):
    """Return (weights, what earlier sums are multiplied with, the new maxima) of a tile's scores (base 2)."""
    token = start + tl.arange(0, TOKENS)
    seen = (token < length) & ((token < kept) | (token >= begin))
    scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(largest, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp2(scores - base[:, None]), tl.exp2(largest - base), higher


@triton.jit
def _place(partial, extremes, out, unit, request, head, head_row, heads, group, weights, largest, columns, meant,
           value_dim, out_request, out_head, out_dim):  # fmt: skip
    """Return (where this split's sums go, which are meant, what multiplies them, what divides them).

    A program that saw the whole context writes to ``out``. One of several splits stores its maxima and its sums of
    weights for ``combine``, and writes to ``partial``. ``weights`` are (16, TOKENS) and not yet added up.
    """
    row = head_row + tl.arange(0, 16)
    inside = row < group
    query_head = head * group + row
    total = tl.sum(weights, axis=1)
    splits = tl.num_programs(1)
    if splits == 1:
        at = out + (request * out_request + query_head * out_head)[:, None] + (columns * out_dim)[None, :]
        factor = unit
        divisor = tl.where(total == 0.0, 1.0, total)
    else:
        split = (request * heads * group + query_head) * splits + tl.program_id(1)
        tl.store(extremes + 2 * split, largest, mask=inside)
        tl.store(extremes + 2 * split + 1, total, mask=inside)
        at = partial + (split * value_dim)[:, None] + columns[None, :]
        factor = 1.0
        divisor = tl.full([16], 1.0, tl.float32)
    return at, inside[:, None] & meant[None, :], factor, divisor


@triton.jit
def _store(at, written, summed, factor, divisor):
    """Store sums."""
    tl.store(at, tl.div_rn(summed * factor, tl.zeros_like(summed) + divisor[:, None]), mask=written)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def wide(queries, key, value, table, lengths, partial, extremes, out, scale, unit, heads: tl.int32, group: tl.int32,
         dim: tl.int32, value_dim: tl.int32, page_tokens: tl.int32, table_row: tl.int64, split_tokens: tl.int32,
         window: tl.int32, sinks: tl.int32, query_request: tl.int64, query_head: tl.int64, out_request: tl.int64,
         out_head: tl.int64, out_dim: tl.int64, key_start: tl.int64, key_slot: tl.int32, key_head: tl.int32,
         key_token: tl.int32, value_start: tl.int64, value_slot: tl.int32, value_head: tl.int32,
         value_token: tl.int32, FORMAT: tl.constexpr, COLUMNS: tl.constexpr,
         TOKENS: tl.constexpr, PIECE: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Store one split of fp32, fp16 or bf16."""
    request, head, head_row, first, last, length, kept, begin, before, gap = _program(
        lengths, heads, group, split_tokens, window, sinks, TOKENS
    )
    UNIT: tl.constexpr = 4 if FORMAT == 0 else 8
    dim = dim // UNIT * UNIT  # floor: no change, but now the compiler knows a factor
    value_dim = value_dim // UNIT * UNIT  # floor: as above
    columns = tl.arange(0, COLUMNS)
    row = head_row + tl.arange(0, 16)
    at = (request * query_request + (head * group + row)[:, None] * query_head) * 4 + columns[None, :]
    query = tl.load(queries + at, mask=(row < group)[:, None] & (columns < dim)[None, :], other=0.0)
    query = for_dot(query, FORMAT)
    key += (key_start + head * key_head) * UNIT
    value += (value_start + head * value_head) * UNIT
    table += request * table_row
    largest = tl.full([16], float("-inf"), tl.float32)
    added = tl.zeros([16, TOKENS], tl.float32)
    summed = tl.zeros([16, COLUMNS], tl.float32)
    for virtual in tl.range(first, last, TOKENS, num_stages=STAGES):
        start = tl.where(virtual < before, virtual, virtual + gap)
        slots, entries = _pieces(start, length, table, page_tokens, TOKENS, PIECE)
        keys = _tile(key, _rows(slots, entries, key_slot, key_token, UNIT), columns, dim, FULL)
        scores = product(query, tl.trans(for_dot(keys, FORMAT)), FORMAT) * scale
        weights, fade, largest = _weights(scores, largest, start, length, kept, begin, TOKENS)
        added = added * fade[:, None] + weights
        values = _tile(value, _rows(slots, entries, value_slot, value_token, UNIT), columns, value_dim, FULL)
        summed = summed * fade[:, None] + product(for_dot(weights, FORMAT), for_dot(values, FORMAT), FORMAT)
    at, written, factor, divisor = _place(
        partial, extremes, out, unit, request, head, head_row, heads, group, added, largest, columns,
        columns < value_dim, value_dim, out_request, out_head, out_dim,
    )  # fmt: skip
    _store(at, written, summed, factor, divisor)


@triton.jit
def _fp8_pairs(words):
    """Return the low and the high e4m3 byte of 16-bit words as fp16 (fp32 under the interpreter), exactly.

    Two words are taken at a time, their low bytes first.
    """
    if INTERPRETED:
        return decode_fp8(words & 255), decode_fp8((words >> 8) & 255)
    else:
        return tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b16 first, second;
            .reg .b32 sorted;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {first, second}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }
            """,
            constraints="=&r,=&r,r",
            args=[words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def wide_fp8(queries, key, value, table, lengths, partial, extremes, out, scale, unit, heads: tl.int32, group: tl.int32,
             dim: tl.int32, value_dim: tl.int32, page_tokens: tl.int32, table_row: tl.int64, split_tokens: tl.int32,
             window: tl.int32, sinks: tl.int32, query_request: tl.int64, query_head: tl.int64,
             out_request: tl.int64, out_head: tl.int64, out_dim: tl.int64, key_start: tl.int64,
             key_slot: tl.int32, key_head: tl.int32, key_token: tl.int32, value_start: tl.int64,
             value_slot: tl.int32, value_head: tl.int32, value_token: tl.int32, COLUMNS: tl.constexpr,
             TOKENS: tl.constexpr, PIECE: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Store one split of fp8; ``key`` and ``value`` point to words of two elements."""
    request, head, head_row, first, last, length, kept, begin, before, gap = _program(
        lengths, heads, group, split_tokens, window, sinks, TOKENS
    )
    WORDS: tl.constexpr = COLUMNS // 2  # floor: exact
    key_words, value_words = dim // 16 * 8, value_dim // 16 * 8  # floor: exact, and now the compiler knows a factor
    words = tl.arange(0, WORDS)
    row = head_row + tl.arange(0, 16)
    at = (request * query_request + (head * group + row)[:, None] * query_head) * 4 + (2 * words)[None, :]
    asked = (row < group)[:, None] & (words < key_words)[None, :]
    even = for_dot(tl.load(queries + at, mask=asked, other=0.0), 3)
    odd = for_dot(tl.load(queries + at + 1, mask=asked, other=0.0), 3)
    key += (key_start + head * key_head) * 8
    value += (value_start + head * value_head) * 8
    table += request * table_row
    largest = tl.full([16], float("-inf"), tl.float32)
    added = tl.zeros([16, TOKENS], tl.float32)
    summed_even = tl.zeros([16, WORDS], tl.float32)
    summed_odd = tl.zeros([16, WORDS], tl.float32)
    for virtual in tl.range(first, last, TOKENS, num_stages=STAGES):
        start = tl.where(virtual < before, virtual, virtual + gap)
        slots, entries = _pieces(start, length, table, page_tokens, TOKENS, PIECE)
        low, high = _fp8_pairs(_tile(key, _rows(slots, entries, key_slot, key_token, 8), words, key_words, FULL))
        scores = tl.dot(even, tl.trans(low))
        scores = tl.dot(odd, tl.trans(high), acc=scores) * scale
        weights, fade, largest = _weights(scores, largest, start, length, kept, begin, TOKENS)
        added = added * fade[:, None] + weights
        weights = for_dot(weights, 3)
        low, high = _fp8_pairs(
            _tile(value, _rows(slots, entries, value_slot, value_token, 8), words, value_words, FULL)
        )
        summed_even = tl.dot(weights, low, acc=summed_even * fade[:, None])
        summed_odd = tl.dot(weights, high, acc=summed_odd * fade[:, None])
    at, written, factor, divisor = _place(
        partial, extremes, out, unit, request, head, head_row, heads, group, added, largest, 2 * words,
        words < value_words, value_dim, out_request, out_head, out_dim,
    )  # fmt: skip
    step = tl.where(tl.num_programs(1) == 1, out_dim, 1)
    _store(at, written, summed_even, factor, divisor)
    _store(at + step, written, summed_odd, factor, divisor)


@triton.jit
def _fp4_quarters(words):
    """Return the four e2m1 nibbles of 16-bit words over 64, lowest first, as fp16 (fp32 under the interpreter).

    A nibble becomes the e4m3 byte that is its number over 64, for small ones too, because e2m1 and e4m3 are made
    alike; GPUs turn such bytes into fp16. Two words are taken at a time.
    """
    if INTERPRETED:
        first, second = decode_fp4(words & 15) * 0.015625, decode_fp4((words >> 4) & 15) * 0.015625
        third, fourth = decode_fp4((words >> 8) & 15) * 0.015625, decode_fp4((words >> 12) & 15) * 0.015625
        return first, second, third, fourth
    else:
        return tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 a, b, even, odd;
            .reg .b16 x, y;
            shl.b32 a, $4, 4;
            and.b32 a, a, 0x80808080;
            shl.b32 b, $4, 2;
            lop3.b32 even, b, 0x1C1C1C1C, a, 0xEA;
            prmt.b32 even, even, 0, 0x3120;
            and.b32 a, $4, 0x80808080;
            shr.u32 b, $4, 2;
            lop3.b32 odd, b, 0x1C1C1C1C, a, 0xEA;
            prmt.b32 odd, odd, 0, 0x3120;
            mov.b32 {x, y}, even;
            cvt.rn.f16x2.e4m3x2 $0, x;
            cvt.rn.f16x2.e4m3x2 $2, y;
            mov.b32 {x, y}, odd;
            cvt.rn.f16x2.e4m3x2 $1, x;
            cvt.rn.f16x2.e4m3x2 $3, y;
            }
            """,
            constraints="=&r,=&r,=&r,=&r,r",
            args=[words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _scaled(part, factor, TOKENS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return every fourth element of rows over 64, times its block's scale; a block of 16 has four of them.

    Exact in fp16: numbers over 64 are multiples of 2^-7 with 2 significant bits, scales of 2^-9 with 4.
    """
    return tl.reshape(tl.reshape(part, [TOKENS, BLOCKS, 4]) * factor, [TOKENS, BLOCKS * 4])


@triton.jit
def _fp4_operands(words, scales, TOKENS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the four elements of each word over 64, times their block scales."""
    factor = decode_fp8(scales)[:, :, None]
    first, second, third, fourth = _fp4_quarters(words)
    first, second = _scaled(first, factor, TOKENS, BLOCKS), _scaled(second, factor, TOKENS, BLOCKS)
    return first, second, _scaled(third, factor, TOKENS, BLOCKS), _scaled(fourth, factor, TOKENS, BLOCKS)


@triton.jit
def _fp4_tiles(key, key_scales, value, value_scales, start, length, table, page_tokens, key_slot, key_token,
               key_scale_slot, key_scale_token, value_slot, value_token, value_scale_slot, value_scale_token, dim,
               value_dim, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, PIECE: tl.constexpr,
               FULL: tl.constexpr):  # fmt: skip
    """Return (words of K, its block scales, words of V, its block scales) of the tile that begins at ``start``."""
    words, blocks = tl.arange(0, COLUMNS // 4), tl.arange(0, COLUMNS // 16)  # floor: exact
    slots, entries = _pieces(start, length, table, page_tokens, TOKENS, PIECE)
    keys = _tile(key, _rows(slots, entries, key_slot, key_token, 8), words, dim // 32 * 8, FULL)  # floor: exact
    rows = _rows(slots, entries, key_scale_slot, key_scale_token, 4)
    key_factors = _tile(key_scales, rows, blocks, dim // 64 * 4, FULL)  # floor: exact, and the compiler knows a factor
    rows = _rows(slots, entries, value_slot, value_token, 8)
    values = _tile(value, rows, words, value_dim // 32 * 8, FULL)  # floor: exact
    rows = _rows(slots, entries, value_scale_slot, value_scale_token, 4)
    return keys, key_factors, values, _tile(value_scales, rows, blocks, value_dim // 64 * 4, FULL)  # floor: as above


@triton.jit
def _fp4_queries(queries, asked):
    """Return each fourth element of the query rows as matrix operands."""
    first, second = tl.load(queries, mask=asked, other=0.0), tl.load(queries + 1, mask=asked, other=0.0)
    third, fourth = tl.load(queries + 2, mask=asked, other=0.0), tl.load(queries + 3, mask=asked, other=0.0)
    return for_dot(first, 4), for_dot(second, 4), for_dot(third, 4), for_dot(fourth, 4)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def wide_fp4(queries, key, key_scales, value, value_scales, table, lengths, partial, extremes, out, scale,
             unit, heads: tl.int32, group: tl.int32, dim: tl.int32, value_dim: tl.int32, page_tokens: tl.int32,
             table_row: tl.int64, split_tokens: tl.int32, window: tl.int32, sinks: tl.int32,
             query_request: tl.int64, query_head: tl.int64, out_request: tl.int64, out_head: tl.int64,
             out_dim: tl.int64, key_start: tl.int64, key_slot: tl.int32,
             key_head: tl.int32, key_token: tl.int32, key_scale_start: tl.int64, key_scale_slot: tl.int32,
             key_scale_head: tl.int32, key_scale_token: tl.int32, value_start: tl.int64, value_slot: tl.int32,
             value_head: tl.int32, value_token: tl.int32, value_scale_start: tl.int64, value_scale_slot: tl.int32,
             value_scale_head: tl.int32, value_scale_token: tl.int32, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
             PIECE: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Store one split of NVFP4; ``key`` and ``value`` point to words of four elements.

    A tile is asked for while the one before is computed with, and K and V stay over 64 until the end.
    """
    request, head, head_row, first, last, length, kept, begin, before, gap = _program(
        lengths, heads, group, split_tokens, window, sinks, TOKENS
    )
    WORDS: tl.constexpr = COLUMNS // 4  # floor: exact
    BLOCKS: tl.constexpr = COLUMNS // 16  # floor: exact
    words = tl.arange(0, WORDS)
    row = head_row + tl.arange(0, 16)
    at = queries + (request * query_request + (head * group + row)[:, None] * query_head) * 4 + (4 * words)[None, :]
    query0, query1, query2, query3 = _fp4_queries(at, (row < group)[:, None] & (4 * words < dim)[None, :])
    key += (key_start + head * key_head) * 8
    value += (value_start + head * value_head) * 8
    key_scales += (key_scale_start + head * key_scale_head) * 4
    value_scales += (value_scale_start + head * value_scale_head) * 4
    table += request * table_row
    largest = tl.full([16], float("-inf"), tl.float32)
    added = tl.zeros([16, TOKENS], tl.float32)
    summed0, summed1 = tl.zeros([16, WORDS], tl.float32), tl.zeros([16, WORDS], tl.float32)
    summed2, summed3 = tl.zeros([16, WORDS], tl.float32), tl.zeros([16, WORDS], tl.float32)
    if first < last:
        start = tl.where(first < before, first, first + gap)
        keys, key_factors, values, value_factors = _fp4_tiles(
            key, key_scales, value, value_scales, start, length, table, page_tokens, key_slot, key_token,
            key_scale_slot, key_scale_token, value_slot, value_token, value_scale_slot, value_scale_token, dim,
            value_dim, COLUMNS, TOKENS, PIECE, FULL,
        )  # fmt: skip
        for virtual in tl.range(first, last, TOKENS, num_stages=1):
            next_start = virtual + TOKENS
            next_start = tl.where(next_start < before, next_start, next_start + gap)
            next_keys, next_key_factors, next_values, next_value_factors = _fp4_tiles(
                key, key_scales, value, value_scales, next_start, length, table, page_tokens, key_slot, key_token,
                key_scale_slot, key_scale_token, value_slot, value_token, value_scale_slot, value_scale_token, dim,
                value_dim, COLUMNS, TOKENS, PIECE, FULL,
            )  # fmt: skip
            key0, key1, key2, key3 = _fp4_operands(keys, key_factors, TOKENS, BLOCKS)
            scores = tl.dot(query1, tl.trans(key1), acc=tl.dot(query0, tl.trans(key0)))
            scores = tl.dot(query3, tl.trans(key3), acc=tl.dot(query2, tl.trans(key2), acc=scores))
            weights, fade, largest = _weights(scores * (64.0 * scale), largest, start, length, kept, begin, TOKENS)
            added = added * fade[:, None] + weights
            weights = for_dot(weights, 4)
            value0, value1, value2, value3 = _fp4_operands(values, value_factors, TOKENS, BLOCKS)
            summed0 = tl.dot(weights, value0, acc=summed0 * fade[:, None])
            summed1 = tl.dot(weights, value1, acc=summed1 * fade[:, None])
            summed2 = tl.dot(weights, value2, acc=summed2 * fade[:, None])
            summed3 = tl.dot(weights, value3, acc=summed3 * fade[:, None])
            keys, key_factors, values, value_factors = next_keys, next_key_factors, next_values, next_value_factors
            start = next_start
    at, written, factor, divisor = _place(
        partial, extremes, out, unit, request, head, head_row, heads, group, added, largest, 4 * words,
        4 * words < value_dim, value_dim, out_request, out_head, out_dim,
    )  # fmt: skip
    factor *= 64.0
    step = tl.where(tl.num_programs(1) == 1, out_dim, 1)
    _store(at, written, summed0, factor, divisor)
    _store(at + step, written, summed1, factor, divisor)
    _store(at + 2 * step, written, summed2, factor, divisor)
    _store(at + 3 * step, written, summed3, factor, divisor)
