"""Attention of one token in float64, dense or with skip-softmax, over whatever a cache gave back."""

from __future__ import annotations

import math

import msgspec
import torch


class SkipSoftmax(msgspec.Struct, frozen=True):
    """Blocks of ``block_tokens`` tokens whose largest score is far below the running one take no part.

    Far below: the exponential of the difference is less than ``threshold_scale_factor`` over the tokens of the context;
    0 skips nothing.
    """

    threshold_scale_factor: float
    block_tokens: int = 4


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor,
    skip: SkipSoftmax | None = None,
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """Return (answers (heads, value dim), blocks skipped over all heads).

    ``queries`` are (heads, dim), ``keys`` (tokens, heads, dim), ``values`` (tokens, heads, value dim); ``positions``
    (tokens,) are those of the tokens, ascending, the query's own the last.
    """
    scale = float(torch.rsqrt(torch.tensor(float(queries.shape[-1]), dtype=torch.float64)))
    scores = torch.einsum("hd,thd->ht", queries, keys) * scale
    skipped = 0
    if skip is not None:
        factor = skip.threshold_scale_factor
        threshold = math.log(factor) - math.log(int(positions[-1]) + 1) if factor > 0 else -math.inf
        blocks = positions // skip.block_tokens  # floor: the block of a position
        running = torch.full((len(queries),), -math.inf, dtype=torch.float64)
        for block in blocks.unique():
            inside = blocks == block
            peak = scores[:, inside].amax(-1)
            running = torch.maximum(running, peak)
            left_out = peak - running < threshold
            skipped += int(left_out.sum())
            scores = torch.where(left_out[:, None] & inside[None], -math.inf, scores)
    return torch.einsum("ht,thd->hd", torch.softmax(scores, dim=-1), values), skipped
