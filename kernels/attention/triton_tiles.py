"""Attention over tiles of queries: prefill, decode, skip-softmax and multi-head latent attention.

A program serves 16 rows of one request and KV head; a row is a query token and one of the head's query heads. It walks
over tiles of ``TOKENS`` tokens in order, so that a maximum running over tiles has one meaning.

With ``SKIP`` a tile takes no part (no exponentials, V not read) when for all its rows the tile's largest score is so
far below the running one that their exponentials' ratio is less than ``threshold``; its scores still count for the
running maximum. Which tiles did not take part is stored, a row of flags per program.
"""

# mypy: ignore-errors
# Triton takes one branch of a constant condition, and must see both as branches.
# Triton evaluates the annotations of a kernel, so they are left out but for constants and 64-bit strides.

import triton
import triton.language as tl

from ..quantize.triton_numbers import for_dot, load_rows
from .triton_decode import product

_PLANE = ("start", "slot", "head", "token", "dim")
_SIZES = [
    "heads",
    "group",
    "dim",
    "value_dim",
    "page_tokens",
    "table_row",
    "window",
    "sinks",
    "query_count",
    "flag_row",
]
_QUERIES = ["query_request", "query_token", "query_head", "query_dim", "scale", "unit", "threshold"]
_OUT = ["out_request", "out_token", "out_head", "out_dim"]
_STRIDES = [f"{name}_{axis}" for name in ("key", "key_scale", "value", "value_scale") for axis in _PLANE]


@triton.jit
def _rows_of_program(lengths, heads, group, query_count):
    """Return (request, head, query token of each row, query head of each row, rows meant, position of each row).

    The queries of a request are its last ``query_count`` tokens.
    """
    tiles = (query_count * group + 15) // 16  # floor: up
    program = tl.program_id(0)
    request = program // (heads * tiles)  # floor: programs run over heads and tiles of a request first
    rest = program - request * heads * tiles
    head = rest // tiles  # floor: as above
    row = (rest - head * tiles) * 16 + tl.arange(0, 16)
    token = row // group  # floor: rows run over the query heads of a token first
    length = tl.load(lengths + request)
    position = length - query_count + token
    meant = (token < query_count) & (position >= 0)
    return request.to(tl.int64), head.to(tl.int64), token, row - token * group, meant, position, length


@triton.jit
def _places(table, request, table_row, page_tokens, token, length):
    """Return (slot, token in page, which are meant) of tokens."""
    meant = token < length
    ordinal = token // page_tokens  # floor: its page among the request's pages
    slot = tl.load(table + request * table_row + ordinal, mask=meant, other=0)
    return slot.to(tl.int64), (token - ordinal * page_tokens).to(tl.int64), meant


@triton.jit
def _seen(token, position, meant, window, sinks):
    """Return which of the tokens each row sees."""
    back = position[:, None] - token[None, :]
    near = (back < window) | (token < sinks)[None, :]
    return (back >= 0) & near & meant[None, :]


@triton.jit(do_not_specialize=[*_SIZES, *_QUERIES, *_OUT, *_STRIDES])
def tiles(queries, key, key_scales, value, value_scales, table, lengths, out, skipped, scale, unit, threshold,
          heads: tl.int32, group: tl.int32, dim: tl.int32, value_dim: tl.int32, page_tokens: tl.int32,
          table_row: tl.int64, window: tl.int32, sinks: tl.int32, query_count: tl.int32, flag_row: tl.int64,
          query_request: tl.int64, query_token: tl.int64, query_head: tl.int64, query_dim: tl.int64,
          out_request: tl.int64, out_token: tl.int64, out_head: tl.int64, out_dim: tl.int64,
          key_start: tl.int64, key_slot: tl.int64,
          key_head: tl.int64, key_token: tl.int64, key_dim: tl.int64, key_scale_start: tl.int64,
          key_scale_slot: tl.int64, key_scale_head: tl.int64, key_scale_token: tl.int64, key_scale_dim: tl.int64,
          value_start: tl.int64, value_slot: tl.int64, value_head: tl.int64, value_token: tl.int64,
          value_dim_stride: tl.int64, value_scale_start: tl.int64, value_scale_slot: tl.int64,
          value_scale_head: tl.int64, value_scale_token: tl.int64, value_scale_dim: tl.int64, FORMAT: tl.constexpr,
          COLUMNS: tl.constexpr, TOKENS: tl.constexpr, SKIP: tl.constexpr):  # fmt: skip
    """Store the attention of this program's rows."""
    request, head, query, lane, meant_row, position, length = _rows_of_program(lengths, heads, group, query_count)
    columns = tl.arange(0, COLUMNS)
    query_row = request * query_request + query * query_token + (head * group + lane) * query_head
    asked = meant_row[:, None] & (columns < dim)[None, :]
    operand = tl.load(queries + query_row[:, None] + columns[None, :] * query_dim, mask=asked, other=0.0)
    operand = for_dot(operand, FORMAT)
    largest = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    summed = tl.zeros([16, COLUMNS], tl.float32)
    tile = 0
    for start in range(0, length, TOKENS):
        token = start + tl.arange(0, TOKENS)
        slot, entry, meant = _places(table, request, table_row, page_tokens, token, length)
        rows = key_start + slot * key_slot + head * key_head + entry * key_token
        scale_rows = key_scale_start + slot * key_scale_slot + head * key_scale_head + entry * key_scale_token
        inside = meant[:, None] & (columns < dim)[None, :]
        keys = load_rows(key, rows, key_dim, key_scales, scale_rows, key_scale_dim, columns, inside, FORMAT)
        scores = product(operand, tl.trans(for_dot(keys, FORMAT)), FORMAT) * scale
        scores = tl.where(_seen(token, position, meant, window, sinks), scores, float("-inf"))
        peak = tl.max(scores, axis=1)
        higher = tl.maximum(largest, peak)
        taking_part = 1
        if SKIP:
            # rows that see nothing of the tile do not need it; NaN does
            needed = meant_row & (peak != float("-inf")) & ((tl.exp2(peak - higher) < threshold) == 0)
            taking_part = tl.max(needed.to(tl.int32), axis=0)
            tl.store(skipped + tl.program_id(0).to(tl.int64) * flag_row + tile, 1 - taking_part)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(largest - base)
        total = total * fade
        summed = summed * fade[:, None]
        if taking_part != 0:
            weights = tl.exp2(scores - base[:, None])
            total += tl.sum(weights, axis=1)
            rows = value_start + slot * value_slot + head * value_head + entry * value_token
            scale_rows = value_scale_start + slot * value_scale_slot + head * value_scale_head
            scale_rows += entry * value_scale_token
            inside = meant[:, None] & (columns < value_dim)[None, :]
            values = load_rows(
                value, rows, value_dim_stride, value_scales, scale_rows, value_scale_dim, columns, inside, FORMAT
            )
            summed += product(for_dot(weights, FORMAT), for_dot(values, FORMAT), FORMAT)
        largest = higher
        tile += 1
    result = tl.where(total[:, None] == 0.0, 0.0, tl.div_rn(summed * unit, tl.zeros_like(summed) + total[:, None]))
    out_row = request * out_request + query * out_token + (head * group + lane) * out_head
    written = meant_row[:, None] & (columns < value_dim)[None, :]
    tl.store(out + out_row[:, None] + columns[None, :] * out_dim, result, mask=written)


@triton.jit(do_not_specialize=["heads", "latent_dim", "rope_dim", *_SIZES[4:9], *_QUERIES[:6], *_OUT, *_STRIDES[:10]])
def latent_tiles(queries, key, key_scales, table, lengths, out, scale, unit, heads: tl.int32, latent_dim: tl.int32,
                 rope_dim: tl.int32, page_tokens: tl.int32, table_row: tl.int64, window: tl.int32, sinks: tl.int32,
                 query_count: tl.int32, query_request: tl.int64, query_token: tl.int64, query_head: tl.int64,
                 query_dim: tl.int64, out_request: tl.int64, out_token: tl.int64, out_head: tl.int64,
                 out_dim: tl.int64, key_start: tl.int64, key_slot: tl.int64, key_head: tl.int64, key_token: tl.int64,
                 key_dim: tl.int64, key_scale_start: tl.int64, key_scale_slot: tl.int64, key_scale_head: tl.int64,
                 key_scale_token: tl.int64, key_scale_dim: tl.int64, FORMAT: tl.constexpr, COLUMNS: tl.constexpr,
                 ROPE: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Store multi-head latent attention: scores from whole rows, values their first ``latent_dim`` elements."""
    request, _, query, lane, meant_row, position, length = _rows_of_program(lengths, 1, heads, query_count)
    latent = tl.arange(0, COLUMNS)
    rope = latent_dim + tl.arange(0, ROPE)
    row_dim = latent_dim + rope_dim
    query_row = queries + (request * query_request + query * query_token + lane * query_head)[:, None]
    asked = meant_row[:, None] & (latent < latent_dim)[None, :]
    left = for_dot(tl.load(query_row + latent[None, :] * query_dim, mask=asked, other=0.0), FORMAT)
    turned_asked = meant_row[:, None] & (rope < row_dim)[None, :]
    right = for_dot(tl.load(query_row + rope[None, :] * query_dim, mask=turned_asked, other=0.0), FORMAT)
    largest = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    summed = tl.zeros([16, COLUMNS], tl.float32)
    for start in range(0, length, TOKENS):
        token = start + tl.arange(0, TOKENS)
        slot, entry, meant = _places(table, request, table_row, page_tokens, token, length)
        rows = key_start + slot * key_slot + entry * key_token
        scale_rows = key_scale_start + slot * key_scale_slot + entry * key_scale_token
        shared_inside = meant[:, None] & (latent < latent_dim)[None, :]
        shared = load_rows(key, rows, key_dim, key_scales, scale_rows, key_scale_dim, latent, shared_inside, FORMAT)
        shared = for_dot(shared, FORMAT)
        inside = meant[:, None] & (rope < row_dim)[None, :]
        turned = load_rows(key, rows, key_dim, key_scales, scale_rows, key_scale_dim, rope, inside, FORMAT)
        scores = product(left, tl.trans(shared), FORMAT)
        scores = (scores + product(right, tl.trans(for_dot(turned, FORMAT)), FORMAT)) * scale
        scores = tl.where(_seen(token, position, meant, window, sinks), scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(largest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        summed = summed * fade[:, None] + product(for_dot(weights, FORMAT), shared, FORMAT)
        largest = higher
    result = tl.where(total[:, None] == 0.0, 0.0, tl.div_rn(summed * unit, tl.zeros_like(summed) + total[:, None]))
    out_row = out + (request * out_request + query * out_token + lane * out_head)[:, None]
    tl.store(out_row + latent[None, :] * out_dim, result, mask=meant_row[:, None] & (latent < latent_dim)[None, :])
