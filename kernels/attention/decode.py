"""``decode``: attention of one query token per request over a paged cache, split over the context."""

from __future__ import annotations

import importlib
from typing import Any, Final

import msgspec
import torch

from ...model.arithmetic import div_up, exact_div, round_up
from ...model.formats import ElementFormat
from .problem import LOG2_E, NO_WINDOW, PagedAttention

_KERNELS: Final = f"{__package__}.triton_decode"
ROWS: Final = 16
"""Query heads that a program serves."""
TARGET_PROGRAMS: Final = 1024
"""Programs that keep a large GPU busy for several rounds."""


class Tiling(msgspec.Struct, frozen=True):
    """How a decode is cut: ``tokens`` of a tile, the compiler's pipeline ``stages`` and ``warps`` of a program."""

    tokens: int
    stages: int
    warps: int


def tiling_of(format: ElementFormat, columns: int) -> Tiling:
    """Return a tiling whose stages fit into the shared memory of a recent GPU."""
    if format == ElementFormat.NVFP4:
        return Tiling(64, 2, 4)
    if format == ElementFormat.FP32:
        return Tiling(32, 2, 4)
    if format == ElementFormat.FP8:
        return Tiling(64, 4, 8)
    return Tiling(64 if columns < 256 else 32, 4, 4)


SCATTERED: Final = Tiling(16, 1, 4)
"""For rows that cannot be read in pieces of 16 bytes: every element has an address of its own."""
INTERPRETED_TILING: Final = Tiling(32, 1, 1)


def decode(
    problem: PagedAttention, queries: Any, out: Any, *, split_tokens: int | None = None, tiling: Tiling | None = None
) -> None:
    """Write the attention of ``queries`` (requests, query heads, dim) to ``out`` (the same, value dim), fp32.

    The query of a request stands at its last token. ``split_tokens`` is what one program reads; None lets the number of
    requests and heads decide. Raises ``SpecError`` for what the kernels do not compute.
    """
    group = problem.check(queries, out)
    requests, query_heads, _ = queries.shape
    if requests == 0:
        return
    longest = problem.table.shape[1] * problem.page_tokens
    programs = requests * problem.heads * div_up(group, ROWS)
    if split_tokens is None:
        wanted = max(1, div_up(TARGET_PROGRAMS, programs))
        split_tokens = max(256, round_up(div_up(longest, wanted), 128))
    if problem.window is not None:
        longest = min(longest, problem.window + problem.sinks)
    splits = div_up(max(1, longest), split_tokens)
    value_dim = problem.value.data.dim
    scratch = {"dtype": torch.float32, "device": out.device}
    partial = torch.empty((requests, query_heads, splits, value_dim), **scratch)
    extremes = torch.full((requests, query_heads, splits, 2), float("nan"), **scratch)
    module = importlib.import_module(_KERNELS)
    format = problem.key.data.format
    interpreted = out.device.type == "cpu"
    wide = problem.key.wide and problem.value.wide and not interpreted
    cut = tiling or (INTERPRETED_TILING if interpreted else tiling_of(format, problem.columns) if wide else SCATTERED)
    strides = {**problem.key.arguments("key"), **problem.value.arguments("value")}
    strides["value_dim_stride"] = strides.pop("value_dim")
    constants: dict[str, Any] = {"COLUMNS": problem.columns, "TOKENS": cut.tokens, "STAGES": cut.stages}
    constants["WIDE"] = wide
    kernel = module.decode
    if format == ElementFormat.NVFP4:
        kernel = module.decode_fp4_rows
    else:
        constants["FORMAT"] = problem.key.code
    kernel[(programs, splits)](
        queries=queries, table=problem.table, lengths=problem.lengths, partial=partial, extremes=extremes,
        scale=problem.score_scale * problem.key.unit * LOG2_E, heads=problem.heads, group=group,
        dim=problem.key.data.dim, value_dim=value_dim, page_tokens=problem.page_tokens,
        table_row=problem.table.stride(0), split_tokens=split_tokens, window=problem.window or NO_WINDOW,
        sinks=problem.sinks, query_request=queries.stride(0), query_head=queries.stride(1),
        query_dim=queries.stride(2), **strides, **constants, num_warps=cut.warps,
    )  # fmt: skip
    module.combine[(requests * query_heads,)](
        partial, extremes, out, float(problem.value.unit), splits, query_heads, value_dim, out.stride(0),
        out.stride(1), out.stride(2), COLUMNS=problem.columns, num_warps=exact_div(problem.columns, 64, "warps"),
    )  # fmt: skip
