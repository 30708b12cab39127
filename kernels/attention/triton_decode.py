"""Decode attention, one query token per request: the context is cut into splits, and ``combine`` joins them.

``decode`` takes any strides and formats and computes every element's address; ``triton_wide`` has kernels for rows that
can be read in pieces of 16 bytes. A program serves up to 16 query heads of one KV head, and one split of one
request's visible tokens. Visible are the first ``sinks`` tokens and the last ``window``; programs count them
without the gap between, so no tile is read in vain. Addresses are int64.
"""

# mypy: ignore-errors
# Triton takes one branch of a constant condition, and must see both as branches.
# Triton evaluates the annotations of a kernel, so they are left out but for constants and 64-bit strides.

import triton
import triton.language as tl

from ..quantize.triton_numbers import for_dot, load_rows

_PLANE = ("start", "slot", "head", "token", "dim")
_SIZES = ["heads", "group", "dim", "value_dim", "page_tokens", "table_row", "split_tokens", "window", "sinks"]
_QUERIES = ["query_request", "query_head", "query_dim", "scale"]
_STRIDES = [f"{name}_{axis}" for name in ("key", "key_scale", "value", "value_scale") for axis in _PLANE]


@triton.jit
def _split(lengths, heads, group, split_tokens, window, sinks):
    """Return (request, head, first query head, first and last virtual token, sinks, tokens left out) of a program."""
    groups = (group + 15) // 16  # floor: up
    program = tl.program_id(0)
    request = program // (heads * groups)  # floor: programs run over the heads of a request first
    rest = program - request * heads * groups
    head = rest // groups  # floor: as above
    length = tl.load(lengths + request)
    kept = tl.minimum(sinks, tl.maximum(length - window, 0))
    left_out = tl.maximum(length - window - kept, 0)
    first = tl.program_id(1) * split_tokens
    last = tl.minimum(first + split_tokens, length - left_out)
    return request.to(tl.int64), head.to(tl.int64), (rest - head * groups) * 16, first, last, kept, left_out


@triton.jit
def _page_of(table, request, table_row, page_tokens, virtual, last, kept, left_out):
    """Return (slot, token in page, which are meant) of virtual tokens."""
    meant = virtual < last
    token = tl.where(virtual < kept, virtual, virtual + left_out)
    ordinal = token // page_tokens  # floor: its page among the request's pages
    entry = token - ordinal * page_tokens
    slot = tl.load(table + request * table_row + ordinal, mask=meant, other=0)
    return slot.to(tl.int64), entry.to(tl.int64), meant


@triton.jit
def product(left, right, FORMAT: tl.constexpr):
    """Return a matrix product in fp32; that of fp32 operands in three passes of tf32."""
    if FORMAT == 0:
        return tl.dot(left, right, input_precision="tf32x3")
    else:
        return tl.dot(left, right)


@triton.jit
def _store_split(partial, extremes, request, head, first_head, heads, group, total, largest, columns, meant,
                 value_dim):  # fmt: skip
    """Return where this split's rows begin in ``partial``, and store its sums and maxima."""
    row = first_head + tl.arange(0, 16)
    splits = tl.num_programs(1)
    at = ((request * heads + head) * group + row) * splits + tl.program_id(1)
    inside = row < group
    tl.store(extremes + 2 * at, largest, mask=inside)
    tl.store(extremes + 2 * at + 1, total, mask=inside)
    return (at * value_dim)[:, None] + columns[None, :], inside[:, None] & meant[None, :]


@triton.jit(do_not_specialize=[*_SIZES, *_QUERIES, *_STRIDES])
def decode(queries, key, key_scales, value, value_scales, table, lengths, partial, extremes, scale, heads: tl.int32,
           group: tl.int32, dim: tl.int32, value_dim: tl.int32, page_tokens: tl.int32, table_row: tl.int64,
           split_tokens: tl.int32, window: tl.int32, sinks: tl.int32, query_request: tl.int64, query_head: tl.int64,
           query_dim: tl.int64, key_start: tl.int64, key_slot: tl.int64, key_head: tl.int64, key_token: tl.int64,
           key_dim: tl.int64, key_scale_start: tl.int64, key_scale_slot: tl.int64, key_scale_head: tl.int64,
           key_scale_token: tl.int64, key_scale_dim: tl.int64, value_start: tl.int64, value_slot: tl.int64,
           value_head: tl.int64, value_token: tl.int64, value_dim_stride: tl.int64, value_scale_start: tl.int64,
           value_scale_slot: tl.int64, value_scale_head: tl.int64, value_scale_token: tl.int64,
           value_scale_dim: tl.int64, FORMAT: tl.constexpr, COLUMNS: tl.constexpr,
           TOKENS: tl.constexpr):  # fmt: skip
    """Store one split's sum of values, sum of weights and largest score (base 2) for each of its query heads."""
    request, head, first_head, first, last, kept, left_out = _split(lengths, heads, group, split_tokens, window, sinks)
    columns = tl.arange(0, COLUMNS)
    row = first_head + tl.arange(0, 16)
    at = request * query_request + (head * group + row)[:, None] * query_head + columns[None, :] * query_dim
    query = tl.load(queries + at, mask=(row < group)[:, None] & (columns < dim)[None, :], other=0.0)
    query = for_dot(query, FORMAT)
    largest = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    summed = tl.zeros([16, COLUMNS], tl.float32)
    for start in range(first, last, TOKENS):
        slot, entry, meant = _page_of(
            table, request, table_row, page_tokens, start + tl.arange(0, TOKENS), last, kept, left_out
        )
        rows = key_start + slot * key_slot + head * key_head + entry * key_token
        scale_rows = key_scale_start + slot * key_scale_slot + head * key_scale_head + entry * key_scale_token
        inside = meant[:, None] & (columns < dim)[None, :]
        keys = load_rows(key, rows, key_dim, key_scales, scale_rows, key_scale_dim, columns, inside, FORMAT)
        scores = product(query, tl.trans(for_dot(keys, FORMAT)), FORMAT) * scale
        scores = tl.where(meant[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(largest - higher)
        total = total * fade + tl.sum(weights, axis=1)
        rows = value_start + slot * value_slot + head * value_head + entry * value_token
        scale_rows = value_scale_start + slot * value_scale_slot + head * value_scale_head + entry * value_scale_token
        inside = meant[:, None] & (columns < value_dim)[None, :]
        values = load_rows(
            value, rows, value_dim_stride, value_scales, scale_rows, value_scale_dim, columns, inside, FORMAT
        )
        summed = summed * fade[:, None] + product(for_dot(weights, FORMAT), for_dot(values, FORMAT), FORMAT)
        largest = higher
    place, written = _store_split(
        partial, extremes, request, head, first_head, heads, group, total, largest, columns, columns < value_dim,
        value_dim,
    )  # fmt: skip
    tl.store(partial + place, summed, mask=written)


@triton.jit(do_not_specialize=["splits", "query_heads", "value_dim", "unit", "out_request", "out_head", "out_dim"])
def combine(partial, extremes, out, unit, splits: tl.int32, query_heads: tl.int32, value_dim: tl.int32,
            out_request: tl.int64, out_head: tl.int64, out_dim: tl.int64, COLUMNS: tl.constexpr):  # fmt: skip
    """Join the splits of one request and query head; zeros where it saw no token."""
    program = tl.program_id(0).to(tl.int64)
    request = program // query_heads  # floor: programs run over the query heads of a request first
    head = program - request * query_heads
    columns = tl.arange(0, COLUMNS)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    summed = tl.zeros([COLUMNS], tl.float32)
    for split in range(splits):
        at = program * splits + split
        peak = tl.load(extremes + 2 * at)
        weight = tl.load(extremes + 2 * at + 1)
        # not "> 0": a weight that is NaN must not pass for "saw nothing"
        if weight != 0.0:
            higher = tl.maximum(largest, peak)
            fade, gain = tl.exp2(largest - higher), tl.exp2(peak - higher)
            part = tl.load(partial + at * value_dim + columns, mask=columns < value_dim, other=0.0)
            summed = summed * fade + part * gain
            total = total * fade + weight * gain
            largest = higher
    result = tl.where(total == 0.0, 0.0, tl.div_rn(summed * unit, tl.zeros([COLUMNS], tl.float32) + total))
    tl.store(out + request * out_request + head * out_head + columns * out_dim, result, mask=columns < value_dim)
