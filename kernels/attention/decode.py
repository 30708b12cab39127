"""``decode``: attention of one query token per request over a paged cache, split over the context."""

from __future__ import annotations

import importlib
from typing import Any, Final

import msgspec
import torch

from ...model.arithmetic import div_up, exact_div, round_up
from ...model.formats import ElementFormat
from ..paged.views import CacheView, PagedPlane
from ..tensors import integers_of
from .problem import LOG2_E, MAX_HEAD_DIM, NO_WINDOW, PagedAttention

_ANY: Final = f"{__package__}.triton_decode"
_WIDE: Final = f"{__package__}.triton_wide"
ROWS: Final = 16
"""Query heads that a program serves."""
PIECES: Final = (32, 16)
"""Tokens that a tile may take from one page, where pages are a multiple of them."""
INT32: Final = 1 << 31
QUERY_STEP: Final = 4
"""Elements in which a wide kernel counts the strides of queries."""


class Tiling(msgspec.Struct, frozen=True):
    """How a decode is cut and compiled.

    ``tokens`` of a tile, pipeline ``stages``, ``warps`` of a program, and the programs with rows of 256 elements that
    are ``resident`` on a multiprocessor at a time.
    """

    tokens: int
    stages: int
    warps: int
    resident: int = 8


WIDE_TILINGS: Final = {
    ElementFormat.FP32: Tiling(32, 2, 4, 2),
    ElementFormat.FP16: Tiling(64, 5, 4, 1),
    ElementFormat.BF16: Tiling(64, 5, 4, 1),
    ElementFormat.FP8: Tiling(64, 5, 4, 2),
    ElementFormat.NVFP4: Tiling(64, 1, 4, 2),
}
"""Tilings for rows that can be read in pieces of 16 bytes, the best of a sweep on an H200 (docs/measurements.md)."""
SCATTERED: Final = Tiling(16, 1, 4)
"""For rows that cannot: every element has an address of its own."""
INTERPRETED: Final = Tiling(32, 1, 1)


def decode(
    problem: PagedAttention,
    queries: Any,
    out: Any,
    *,
    split_tokens: int | None = None,
    tiling: Tiling | None = None,
    wide: bool | None = None,
) -> None:
    """Write the attention of ``queries`` (requests, query heads, dim) to ``out`` (the same, value dim), fp32.

    The query of a request stands at its last token. ``split_tokens`` is what one program reads; None lets the number of
    requests and heads decide. ``wide`` picks the kernels that read rows in pieces of 16 bytes; None: on a GPU, where
    they can. Raises ``SpecError`` for what the kernels do not compute.
    """
    group = problem.check(queries, out)
    requests, query_heads, _ = queries.shape
    if requests == 0:
        return
    interpreted = out.device.type == "cpu"
    format = problem.key.data.format
    if wide is None:
        wide = reads_wide(problem) and not interpreted
    cut = tiling or (WIDE_TILINGS[format] if wide else INTERPRETED if interpreted else SCATTERED)
    longest = problem.table.shape[1] * problem.page_tokens
    programs = requests * problem.heads * div_up(group, ROWS)
    if split_tokens is None:
        at_once = cut.resident * exact_div(MAX_HEAD_DIM, problem.columns, "columns") * _multiprocessors(out)
        wanted = max(1, at_once // programs)  # floor: one program more would wait for all others
        split_tokens = max(256, div_up(longest, wanted))
    split_tokens = round_up(split_tokens, cut.tokens)
    if problem.window is not None:
        # a wide kernel reads whole tiles: up to one more on either side of the gap
        longest = min(longest, problem.window + problem.sinks + 2 * cut.tokens)
    splits = div_up(max(1, longest), split_tokens)
    value_dim = problem.value.data.dim
    scratch = {"dtype": torch.float32, "device": out.device}
    partial = torch.empty((requests, query_heads, splits, value_dim), **scratch)
    extremes = torch.empty((requests, query_heads, splits, 2), **scratch)
    step = QUERY_STEP if wide else 1
    if queries.stride(2) != 1 or queries.stride(1) % step or queries.stride(0) % step or queries.data_ptr() % 16:
        queries = queries.contiguous()
    arguments: dict[str, Any] = {
        "queries": queries, "table": problem.table, "lengths": problem.lengths, "partial": partial,
        "extremes": extremes, "scale": problem.score_scale * problem.key.unit * LOG2_E, "heads": problem.heads,
        "group": group, "dim": problem.key.data.dim, "value_dim": value_dim, "page_tokens": problem.page_tokens,
        "table_row": problem.table.stride(0), "split_tokens": split_tokens, "window": problem.window or NO_WINDOW,
        "sinks": problem.sinks, "query_request": exact_div(queries.stride(0), step, "elements from request to request"),
        "query_head": exact_div(queries.stride(1), step, "elements from head to head"),
        "COLUMNS": problem.columns, "TOKENS": cut.tokens,
    }  # fmt: skip
    if wide:
        kernel, more = _wide_kernel(problem, cut)
        more.update(out=out, unit=float(problem.value.unit))
        more.update(out_request=out.stride(0), out_head=out.stride(1), out_dim=out.stride(2))
    else:
        kernel, more = _any_kernel(problem)
    kernel[(programs, splits)](**arguments, **more, num_warps=cut.warps)
    if wide and splits == 1:
        return
    importlib.import_module(_ANY).combine[(requests * query_heads,)](
        partial, extremes, out, float(problem.value.unit), splits, query_heads, value_dim, out.stride(0),
        out.stride(1), out.stride(2), COLUMNS=problem.columns, num_warps=exact_div(problem.columns, 64, "warps"),
    )  # fmt: skip


def _multiprocessors(out: Any) -> int:
    """Return the multiprocessors of the GPU that ``out`` is on; 1 for a host."""
    if out.device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(out.device).multi_processor_count)


def reads_wide(problem: PagedAttention) -> bool:
    """Whether rows of K and V can be read in pieces of 16 bytes, block scales in pieces of 4, and pages in pieces of
    tokens, with strides that 32 bits can count in such pieces."""
    planes = (problem.key, problem.value)
    if problem.page_tokens % PIECES[-1] or not all(plane.wide for plane in planes):
        return False
    strides = [each for plane in planes for each in _in_pieces(plane, "").items()]
    return all(value < INT32 for name, value in strides if not name.endswith("start"))


def _any_kernel(problem: PagedAttention) -> tuple[Any, dict[str, Any]]:
    """Return the kernel for any strides, and the arguments that it alone takes."""
    arguments = {**problem.key.arguments("key"), **problem.value.arguments("value"), "query_dim": 1}
    arguments["value_dim_stride"] = arguments.pop("value_dim")
    arguments["FORMAT"] = problem.key.code
    return importlib.import_module(_ANY).decode, arguments


def _wide_kernel(problem: PagedAttention, cut: Tiling) -> tuple[Any, dict[str, Any]]:
    """Return the kernel of the format that reads rows in pieces, and the arguments that it alone takes."""
    module = importlib.import_module(_WIDE)
    planes = (("key", problem.key), ("value", problem.value))
    piece = next(size for size in PIECES if size <= cut.tokens and problem.page_tokens % size == 0)
    full = problem.key.data.dim == problem.value.data.dim == problem.columns
    arguments: dict[str, Any] = {"PIECE": piece, "FULL": full}
    for name, plane in planes:
        arguments.update(_in_pieces(plane, name))
        arguments[name] = plane.data.storage
    format = problem.key.data.format
    if format == ElementFormat.NVFP4:
        for name, plane in planes:
            arguments[name] = integers_of(plane.data.storage, 2)
            arguments[f"{name}_scales"] = plane.scales.storage if plane.scales is not None else None
        return module.wide_fp4, arguments
    arguments["STAGES"] = cut.stages
    if format == ElementFormat.FP8:
        for name, plane in planes:
            arguments[name] = integers_of(plane.data.storage, 2)
        return module.wide_fp8, arguments
    return module.wide, {**arguments, "FORMAT": problem.key.code}


def _in_pieces(plane: PagedPlane, name: str) -> dict[str, int]:
    """Return start and strides as keyword arguments ``{name}_...``: of data in units of 16 bytes, of scales of 4."""
    strides: dict[str, int] = {}
    views: list[tuple[str, CacheView, int]] = [(name, plane.data, 16)]
    if plane.scales is not None:
        views.append((f"{name}_scale", plane.scales, 4))
    for prefix, view, piece_bytes in views:
        unit = exact_div(piece_bytes, view.format.container_bytes, "bytes of a piece in containers")
        for axis, value in (("start", view.start), ("slot", view.slot_stride)):
            strides[f"{prefix}_{axis}"] = exact_div(value, unit, f"{prefix} {axis} in pieces")
        for axis in ("head", "token"):
            strides[f"{prefix}_{axis}"] = exact_div(view.stride(axis), unit, f"{prefix} {axis} in pieces")
    return strides
