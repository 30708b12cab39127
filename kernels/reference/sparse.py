"""Index scores and selection of blocks in float64."""

from __future__ import annotations

import math

import torch


def turned(vectors: torch.Tensor, places: torch.Tensor, base: float) -> torch.Tensor:
    """Return vectors of shape (..., dim) turned by their positions (..., 3).

    Pair p is (element p, element p + dim / 2); it turns by coordinate ``p % 3`` times ``base ** (-p / (dim / 2))``.
    """
    half = vectors.shape[-1] >> 1
    pair = torch.arange(half, device=vectors.device)
    speed = torch.exp2(-torch.divide(pair.to(torch.float64) * math.log2(base), half))
    angle = places.to(torch.float64)[..., pair % 3] * speed
    real, imaginary = vectors.to(torch.float64)[..., :half], vectors.to(torch.float64)[..., half:]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)


def token_scores(
    queries: torch.Tensor, query_place: torch.Tensor, keys: torch.Tensor, places: torch.Tensor, base: float
) -> torch.Tensor:
    """Return the score of each token of one request: the index heads' products added up.

    ``queries`` are (index heads, dim), ``query_place`` (3,), ``keys`` (tokens, dim), ``places`` (tokens, 3).
    """
    left = turned(queries, query_place.expand(queries.shape[0], 3), base)
    return (turned(keys, places, base) @ left.T).sum(-1)


def block_scores(scores: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Return the best token's score of each block of one request."""
    return torch.stack([part.max() for part in scores.split(block_tokens)]) if len(scores) else scores


def kept_blocks(scores: torch.Tensor, kept: int) -> list[int]:
    """Return the blocks that are kept, in order: the last, and the best others; of equals the earlier."""
    last = len(scores) - 1
    best = sorted(range(last), key=lambda block: (-float(scores[block]), block))[: kept - 1]
    return sorted([*best, last])
