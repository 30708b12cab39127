"""``PagedAttention``: what every attention kernel is asked, checked once, with the reasons for what is refused."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np
import torch

from ...model.errors import SpecError
from ...model.formats import ElementFormat
from ..paged.views import PagedPlane

MAX_HEAD_DIM: Final = 256
NO_WINDOW: Final = (1 << 31) - 1
LOG2_E: Final = 1.4426950408889634

QUERY_TYPES: Final = {
    ElementFormat.FP32: torch.float32,
    ElementFormat.FP16: torch.float16,
    ElementFormat.BF16: torch.bfloat16,
    ElementFormat.FP8: torch.bfloat16,
    ElementFormat.NVFP4: torch.bfloat16,
}
"""The type of queries that each KV format takes."""


class PagedAttention(msgspec.Struct, frozen=True):
    """K and V of one layer, who holds which pages, and what may be seen.

    ``table`` of shape (requests, pages), int32, holds slot ids; ``lengths`` (requests,), int32, count the tokens in the
    cache, the queries' own included. ``window`` is the sliding window in tokens (None: all), ``sinks`` the tokens kept
    before it. ``scale`` multiplies the scores; None stands for 1 / sqrt(head dim).
    """

    key: PagedPlane
    value: PagedPlane
    table: Any
    lengths: Any
    window: int | None = None
    sinks: int = 0
    scale: float | None = None

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.key.data.size("head")

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.key.data.size("token")

    @property
    def score_scale(self) -> float:
        """What multiplies the product of query and key."""
        return self.scale if self.scale is not None else float(np.divide(1.0, math.sqrt(self.key.data.dim)))

    @property
    def columns(self) -> int:
        """The compiled row length: 64, 128 or 256 elements."""
        dim = max(self.key.data.dim, self.value.data.dim)
        return 64 if dim <= 64 else 128 if dim <= 128 else 256

    def check(self, queries: Any, out: Any) -> int:
        """Return the query heads per KV head; raise ``SpecError`` for what the kernels do not compute.

        ``queries`` and ``out`` are (..., query heads, dim).
        """
        key, value = self.key.data, self.value.data
        for view in (key, value):
            if view.dim > MAX_HEAD_DIM:
                raise SpecError(view.name, f"found a head dim of {view.dim}, the kernels need at most {MAX_HEAD_DIM}")
        for what, one, other in (
            ("format", key.format.value, value.format.value),
            ("tokens per page", key.size("token"), value.size("token")),
            ("heads", key.size("head"), value.size("head")),
        ):
            if one != other:
                raise SpecError(value.name, f"found {other} as {what}, needs {one} as in {key.name}")
        check_queries(key.name, key.format, key.dim, queries)
        check_tables(self.table, self.lengths)
        if self.window is not None and self.window < 1:
            raise SpecError("window", f"found {self.window}, needs at least 1 token, or None")
        if self.sinks and self.window is None:
            raise SpecError("sinks", f"found {self.sinks} without a window, needs a window")
        group, rest = divmod(queries.shape[-2], self.heads)
        if rest or group == 0:
            raise SpecError("queries", f"found {queries.shape[-2]} heads, needs a multiple of {self.heads} KV heads")
        if out.dtype != torch.float32 or out.shape != (*queries.shape[:-1], value.dim):
            found = f"found {out.dtype} of {tuple(out.shape)}"
            raise SpecError("out", f"{found}, needs float32 of {(*queries.shape[:-1], value.dim)}")
        return int(group)


def check_queries(name: str, format: ElementFormat, dim: int, queries: Any) -> None:
    """Raise ``SpecError`` unless ``queries`` are (..., dim) of the type that ``format`` takes."""
    needed = QUERY_TYPES[format]
    if queries.dtype != needed:
        raise SpecError("queries", f"found {queries.dtype}, {name} of {format.value} needs {needed}")
    if queries.shape[-1] != dim:
        raise SpecError("queries", f"found a head dim of {queries.shape[-1]}, {name} needs {dim}")


def check_tables(table: Any, lengths: Any) -> None:
    """Raise ``SpecError`` unless the page table and the lengths are contiguous int32 of one batch."""
    for name, given, axes in (("table", table, 2), ("lengths", lengths, 1)):
        if given.dtype != torch.int32 or not given.is_contiguous() or given.dim() != axes:
            text = f"found a tensor of {given.dtype} with {given.dim()} axes"
            raise SpecError(name, f"{text}, needs a contiguous one of int32 with {axes}")
    if table.shape[0] != lengths.shape[0]:
        raise SpecError("table", f"found {table.shape[0]} requests, needs {lengths.shape[0]} as in lengths")
