"""A decode kernel as its author might have written it: one program per request and query head, page by page.

It takes every stride from the view that it is given. It knows bf16, fp16 and fp32, and no sliding window.
"""

import triton
import triton.language as tl

from kvsan.model.errors import SpecError


@triton.jit
def attend(q, k, v, table, lengths, out, scale, query_heads, group, dim, value_dim, page_tokens, table_row, q_request,
           q_head, q_dim, k_start, k_slot, k_head, k_token, k_dim, v_start, v_slot, v_head, v_token, v_dim,
           TOKENS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Store the attention of one request and query head."""
    program = tl.program_id(0)
    request = program // query_heads
    query_head = program % query_heads
    head = (query_head // group).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    entry = tl.arange(0, TOKENS)
    query = tl.load(q + request * q_request + query_head * q_head + columns * q_dim, mask=columns < dim, other=0.0)
    query = query.to(tl.float32)
    length = tl.load(lengths + request)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    summed = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, length, page_tokens):
        slot = tl.load(table + request * table_row + first // page_tokens).to(tl.int64)
        meant = (entry < page_tokens) & (first + entry < length)
        k_row = k_start + slot * k_slot + head * k_head + entry * k_token.to(tl.int64)
        inside = meant[:, None] & (columns < dim)[None, :]
        keys = tl.load(k + k_row[:, None] + columns[None, :] * k_dim, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(meant, tl.sum(keys * query[None, :], axis=1) * scale, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=0))
        weights = tl.exp(scores - higher)
        fade = tl.exp(largest - higher)
        v_row = v_start + slot * v_slot + head * v_head + entry * v_token.to(tl.int64)
        inside = meant[:, None] & (columns < value_dim)[None, :]
        values = tl.load(v + v_row[:, None] + columns[None, :] * v_dim, mask=inside, other=0.0).to(tl.float32)
        summed = summed * fade + tl.sum(values * weights[:, None], axis=0)
        total = total * fade + tl.sum(weights, axis=0)
        largest = higher
    result = tl.where(total == 0.0, 0.0, tl.div_rn(summed, tl.where(total == 0.0, 1.0, total) + tl.zeros_like(summed)))
    tl.store(out + program * value_dim + columns, result, mask=columns < value_dim)


def decode(problem, queries, out):
    """Launch ``attend`` over a ``kvsan.kernels.attention.problem.PagedAttention``."""
    key, value = problem.key.data, problem.value.data
    if key.format.value not in ("bf16", "fp16", "fp32"):
        raise SpecError("kernel", f"found {key.format.value}, this kernel knows bf16, fp16 and fp32")
    if problem.window is not None:
        raise SpecError("kernel", "found a sliding window, this kernel has none")
    strides = {}
    for name, view in (("k", key), ("v", value)):
        strides[f"{name}_start"], strides[f"{name}_slot"] = view.start, view.slot_stride
        for axis in ("head", "token", "dim"):
            strides[f"{name}_{axis}"] = view.stride(axis)
    launch(problem, queries, out, strides)


def launch(problem, queries, out, strides):
    """Launch ``attend`` with the strides given."""
    requests, query_heads, dim = queries.shape
    value_dim = problem.value.data.dim
    attend[(requests * query_heads,)](
        queries, problem.key.data.storage, problem.value.data.storage, problem.table, problem.lengths, out,
        problem.score_scale, query_heads, query_heads // problem.heads, dim, value_dim, problem.page_tokens,
        problem.table.stride(0), *queries.stride(), **strides,
        TOKENS=triton.next_power_of_2(problem.page_tokens), COLUMNS=triton.next_power_of_2(max(dim, value_dim)),
    )  # fmt: skip
