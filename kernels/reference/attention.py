"""Attention in float64, one request at a time."""

from __future__ import annotations

import math

import torch


def visible(query_positions: torch.Tensor, tokens: int, window: int | None, sinks: int) -> torch.Tensor:
    """Return a mask of shape (queries, tokens): the keys that each query may see.

    Those up to its own position; with a window the last ``window`` of them and the first ``sinks`` tokens.
    """
    keys = torch.arange(tokens, device=query_positions.device)[None, :]
    at = query_positions[:, None]
    seen = keys <= at
    if window is not None:
        seen &= (keys > at - window) | (keys < sinks)
    return seen


def attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the attention of one request, of shape (queries, query heads, value dim).

    ``queries`` are (queries, query heads, dim), ``keys`` and ``values`` (tokens, KV heads, dim); query heads share KV
    heads in equal groups. ``seen`` is (queries, tokens), or (query heads, queries, tokens). A query that sees nothing
    gets zeros.
    """
    group = queries.shape[1] // keys.shape[1]  # floor: exact, heads come in groups
    keys64 = keys.to(torch.float64).repeat_interleave(group, dim=1)
    values64 = values.to(torch.float64).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,thd->hqt", queries.to(torch.float64), keys64) * scale
    scores = scores.masked_fill(~seen, -math.inf)
    weights = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)
    return torch.einsum("hqt,thd->qhd", weights, values64)


def skip_softmax(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float,
    skipped: torch.Tensor, block_tokens: int,
) -> torch.Tensor:  # fmt: skip
    """Return attention in which some blocks of keys take no part, though their scores count for the maximum.

    ``skipped`` of shape (query heads, queries, blocks) says which. Leaving a block out of numerator and denominator
    alike is what skipping its exponentials and its product with V does.
    """
    tokens = keys.shape[0]
    out = skipped.repeat_interleave(block_tokens, dim=-1)[..., :tokens]
    return attention(queries, keys, values, seen & ~out, scale)


def latent_attention(
    queries: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, scale: float, latent_dim: int
) -> torch.Tensor:
    """Return multi-head latent attention of one request: all heads share ``rows`` (tokens, latent + rope dim).

    Scores use the whole row, and the values are its first ``latent_dim`` elements.
    """
    keys = rows[:, None, :]
    return attention(queries, keys, keys[..., :latent_dim], seen, scale)
