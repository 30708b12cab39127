"""``sparse_decode``: QSA-style attention of one query token per request, over the best blocks only.

Selection makes a shorter page table, and the dense kernel reads that: K and V of other pages are never touched. A
request of at most ``budget_tokens`` stays dense.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, Final

import msgspec
import numpy as np
import torch

from ...model.errors import SpecError
from ...model.formats import ElementFormat
from ..paged.views import CacheView
from .decode import decode
from .problem import PagedAttention

_KERNELS: Final = f"{__package__}.triton_sparse"
BUDGET_TOKENS: Final = 2048
"""The context up to which attention stays dense."""
ROTARY_BASE: Final = 10_000.0
MAX_INDEX_DIM: Final = 256
POSITION_AXES: Final = 3


class IndexPlanes(msgspec.Struct, frozen=True):
    """Index keys (axes token, head, dim) of one layer and the rank's positions (token, head, 3 coordinates)."""

    keys: CacheView
    places: CacheView

    def __post_init__(self) -> None:
        keys, places = self.keys, self.places
        if keys.format not in (ElementFormat.BF16, ElementFormat.FP16, ElementFormat.FP32):
            raise SpecError(keys.name, f"found format {keys.format.value}, index keys need bf16, fp16 or fp32")
        if places.format != ElementFormat.INT32 or places.size("dim") != POSITION_AXES:
            found = f"found {places.size('dim')} x {places.format.value}"
            raise SpecError(places.name, f"{found}, positions need {POSITION_AXES} x int32")
        if keys.size("head") != 1 or keys.dim % 2 or keys.dim > MAX_INDEX_DIM:
            found = f"found {keys.size('head')} heads x {keys.dim}"
            raise SpecError(keys.name, f"{found}, the kernel needs one head of an even dim up to {MAX_INDEX_DIM}")
        if keys.size("token") != places.size("token"):
            raise SpecError(places.name, f"found {places.size('token')} tokens per page, needs {keys.size('token')}")


class Selection(msgspec.Struct, frozen=True):
    """Scores (requests, blocks) in fp32, and the page table and lengths (tokens) of the blocks that were kept."""

    scores: Any
    table: Any
    lengths: Any


def select(
    planes: IndexPlanes, table: Any, lengths: Any, queries: Any, query_places: Any, kept_blocks: int,
    budget_tokens: int = BUDGET_TOKENS,
) -> Selection:  # fmt: skip
    """Score all blocks and keep the best ``kept_blocks``, the last one always.

    ``queries`` (requests, index heads, dim), fp32, and ``query_places`` (requests, 3), int32, are dense.
    """
    dim, page_tokens = planes.keys.dim, planes.keys.size("token")
    requests, blocks = table.shape
    if queries.dtype != torch.float32 or queries.shape[-1] != dim or not queries.is_contiguous():
        raise SpecError("index queries", f"found {queries.dtype} of {tuple(queries.shape)}, needs float32 of dim {dim}")
    if kept_blocks < 1:
        raise SpecError("kept_blocks", f"found {kept_blocks}, needs at least 1")
    scores = torch.full((requests, blocks), float("nan"), dtype=torch.float32, device=queries.device)
    kept = Selection(scores, torch.zeros_like(table), torch.zeros_like(lengths))
    if requests == 0:
        return kept
    interpreted = queries.device.type == "cpu"
    half, base_log2 = dim >> 1, float(np.divide(math.log2(ROTARY_BASE), dim >> 1))
    module = importlib.import_module(_KERNELS)
    strides: dict[str, Any] = {}
    for name, view in (("key", planes.keys), ("place", planes.places)):
        strides[f"{name}_start"], strides[f"{name}_slot"] = view.start, view.slot_stride
        strides[f"{name}_token"], strides[f"{name}_dim"] = view.stride("token"), view.stride("dim")
    module.block_scores[(requests, blocks)](
        queries=queries, query_places=query_places, keys=planes.keys.storage, places=planes.places.storage,
        table=table, lengths=lengths, scores=scores, base_log2=base_log2, heads=queries.shape[1], half=half,
        page_tokens=page_tokens, table_row=table.stride(0), **strides, PAIRS=MAX_INDEX_DIM >> 1,
        TOKENS=128 if interpreted else 16, num_warps=4,
    )  # fmt: skip
    module.keep_blocks[(requests,)](
        scores, table, lengths, kept.table, kept.lengths, blocks, page_tokens, table.stride(0), kept_blocks,
        budget_tokens, BLOCK=64, num_warps=4,
    )  # fmt: skip
    return kept


def sparse_decode(
    problem: PagedAttention, planes: IndexPlanes, queries: Any, index_queries: Any, query_places: Any, out: Any, *,
    kept_blocks: int, budget_tokens: int = BUDGET_TOKENS,
) -> Selection:  # fmt: skip
    """Write sparse attention of ``queries`` (requests, query heads, dim) to ``out``; return what was selected.

    Raises ``SpecError`` for a window, which a selection of blocks cannot honour.
    """
    if problem.window is not None:
        raise SpecError("window", f"found {problem.window}, sparse attention needs none: it selects among all blocks")
    if planes.keys.size("token") != problem.page_tokens:
        found = f"found {planes.keys.size('token')} tokens per page"
        raise SpecError(planes.keys.name, f"{found}, needs {problem.page_tokens} as in K and V")
    kept = select(planes, problem.table, problem.lengths, index_queries, query_places, kept_blocks, budget_tokens)
    decode(msgspec.structs.replace(problem, table=kept.table, lengths=kept.lengths), queries, out)
    return kept
