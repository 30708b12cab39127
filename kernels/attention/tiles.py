"""``prefill``, ``skip_softmax`` and ``latent``: attention over tiles of queries."""

from __future__ import annotations

import importlib
from typing import Any, Final

import msgspec
import numpy as np
import torch

from ...model.arithmetic import div_up, exact_div
from ...model.errors import SpecError
from ...model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ..paged.views import PagedPlane
from .problem import LOG2_E, NO_WINDOW, PagedAttention, check_queries, check_tables

_KERNELS: Final = f"{__package__}.triton_tiles"
ROWS: Final = 16
"""Rows of a tile: query tokens times query heads of one KV head."""
TILE_TOKENS: Final = 16
"""Tokens of a tile: the block that skip-softmax skips."""
MAX_LATENT_DIM: Final = 512
MAX_ROPE_DIM: Final = 64


class Skipped(msgspec.Struct, frozen=True):
    """Which blocks of ``block_tokens`` tokens skip-softmax left out.

    ``flags`` of shape (requests, KV heads, row tiles, blocks), int32; a row tile is 16 rows, and row r of a request and
    KV head is query token ``r // group`` of query head ``r % group``. Blocks past a request's end are 0.
    """

    flags: Any
    block_tokens: int

    @property
    def count(self) -> int:
        """How many blocks were left out, over all requests, heads and tiles of rows."""
        return int(self.flags.sum())


def prefill(problem: PagedAttention, queries: Any, out: Any) -> None:
    """Write the attention of ``queries`` (requests, tokens, query heads, dim) to ``out`` (the same, value dim), fp32.

    The queries of a request are its last tokens; a query before a request's first token is skipped. Raises
    ``SpecError`` for what the kernels do not compute.
    """
    _launch(problem, queries, out, 0.0, skip=False)


def skip_softmax(problem: PagedAttention, queries: Any, out: Any, threshold_scale_factor: float) -> Skipped:
    """``prefill`` with skip-softmax; returns what was skipped.

    A block is skipped when the exponential of its largest score over the running one is below
    ``threshold_scale_factor`` over the longest length that the page table has room for; 0 skips nothing.
    """
    longest = problem.table.shape[1] * problem.page_tokens
    if not 0.0 <= threshold_scale_factor < longest:
        found = f"found {threshold_scale_factor}"
        raise SpecError("threshold_scale_factor", f"{found}, needs 0 to less than the {longest} tokens of the table")
    threshold = float(np.divide(threshold_scale_factor, longest))
    flags = _launch(problem, queries, out, threshold, skip=True)
    return Skipped(flags, TILE_TOKENS)


def _launch(problem: PagedAttention, queries: Any, out: Any, threshold: float, *, skip: bool) -> Any:
    group = problem.check(queries, out)
    requests, count, _, _ = queries.shape
    row_tiles = div_up(count * group, ROWS)
    blocks = div_up(problem.table.shape[1] * problem.page_tokens, TILE_TOKENS)
    flags = torch.zeros((requests, problem.heads, row_tiles, blocks), dtype=torch.int32, device=out.device)
    if requests * count == 0:
        return flags
    strides = {**problem.key.arguments("key"), **problem.value.arguments("value")}
    strides["value_dim_stride"] = strides.pop("value_dim")
    module = importlib.import_module(_KERNELS)
    module.tiles[(requests * problem.heads * row_tiles,)](
        queries=queries, table=problem.table, lengths=problem.lengths, out=out, skipped=flags,
        scale=problem.score_scale * problem.key.unit * LOG2_E, unit=float(problem.value.unit), threshold=threshold,
        heads=problem.heads, group=group, dim=problem.key.data.dim, value_dim=problem.value.data.dim,
        page_tokens=problem.page_tokens, table_row=problem.table.stride(0), window=problem.window or NO_WINDOW,
        sinks=problem.sinks, query_count=count, flag_row=blocks, **_outside(queries, out), **strides,
        FORMAT=problem.key.code, COLUMNS=64 if problem.columns == 64 else 256, TOKENS=TILE_TOKENS, SKIP=skip,
        num_warps=4,
    )  # fmt: skip
    return flags


def _outside(queries: Any, out: Any) -> dict[str, int]:
    axes = ("request", "token", "head", "dim")
    return {
        f"{name}_{axis}": tensor.stride(place)
        for name, tensor in (("query", queries), ("out", out))
        for place, axis in enumerate(axes)
    }


def latent(
    rows: PagedPlane, table: Any, lengths: Any, queries: Any, out: Any, *, latent_dim: int, scale: float,
    window: int | None = None, sinks: int = 0,
) -> None:  # fmt: skip
    """Write multi-head latent attention of ``queries`` (requests, tokens, heads, latent + rope dim) to ``out``.

    ``rows`` hold one head per token: ``latent_dim`` elements that are K and V alike, then the rotated part. ``out`` is
    (requests, tokens, heads, latent_dim), fp32. Arguments otherwise as in ``PagedAttention``.
    """
    data = rows.data
    rope_dim = data.dim - latent_dim
    if data.size("head") != 1:
        raise SpecError(data.name, f"found {data.size('head')} heads, latent attention needs one row per token")
    if not (1 <= latent_dim <= MAX_LATENT_DIM and 0 <= rope_dim <= MAX_ROPE_DIM):
        found = f"found {latent_dim} + {rope_dim} elements"
        raise SpecError(data.name, f"{found}, the kernel needs at most {MAX_LATENT_DIM} + {MAX_ROPE_DIM}")
    if data.format == ElementFormat.NVFP4 and latent_dim % SCALE_BLOCK_ELEMENTS:
        raise SpecError(data.name, f"found a latent dim of {latent_dim}, nvfp4 needs whole blocks of 16")
    check_queries(data.name, data.format, data.dim, queries)
    check_tables(table, lengths)
    requests, count, heads, _ = queries.shape
    if out.dtype != torch.float32 or out.shape != (requests, count, heads, latent_dim):
        needed = (requests, count, heads, latent_dim)
        raise SpecError("out", f"found {out.dtype} of {tuple(out.shape)}, needs float32 of {needed}")
    if requests * count == 0:
        return
    wide = latent_dim > 128
    importlib.import_module(_KERNELS).latent_tiles[(requests * div_up(count * heads, ROWS),)](
        queries=queries, table=table, lengths=lengths, out=out, scale=scale * rows.unit * LOG2_E,
        unit=float(rows.unit), heads=heads, latent_dim=latent_dim, rope_dim=rope_dim,
        page_tokens=data.size("token"), table_row=table.stride(0), window=window or NO_WINDOW, sinks=sinks,
        query_count=count, **_outside(queries, out), **rows.arguments("key"), FORMAT=rows.code,
        COLUMNS=exact_div(MAX_LATENT_DIM, 1 if wide else 4, "latent columns"), ROPE=MAX_ROPE_DIM,
        TOKENS=TILE_TOKENS,
        num_warps=8 if wide else 4,
    )  # fmt: skip
