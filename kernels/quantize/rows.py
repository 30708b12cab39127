"""``append`` and ``fetch``: tokens into a paged plane and back, with conversion to and from every format.

fp8 and NVFP4 are quantised on the way in and dequantised on the way out. ``quantize_pages`` and ``dequantize_pages`` do
that to whole pages by slot.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, Final

import numpy as np
import torch

from ...model.arithmetic import div_up
from ...model.errors import SpecError
from ...model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ..paged.views import PagedPlane

_KERNELS: Final = f"{__package__}.triton_rows"
_SOURCES: Final = {
    ElementFormat.FP32: (torch.float32,),
    ElementFormat.FP16: (torch.float32, torch.float16),
    ElementFormat.BF16: (torch.float32, torch.bfloat16),
    ElementFormat.FP8: (torch.float32, torch.bfloat16),
    ElementFormat.NVFP4: (torch.float32, torch.bfloat16),
}
"""What may be appended to a plane of each format."""
MAX_WORD_ROW: Final = 256
"""Elements of a row that the kernel for words of two bf16 holds at once."""
MAX_ROWS: Final = 1 << 31
"""The kernels count rows in 32 bits."""


def append(plane: PagedPlane, values: Any, requests: Any, positions: Any, table: Any) -> None:
    """Write ``values`` of shape (tokens, heads, dim), any strides, into ``plane``.

    Token i belongs to position ``positions[i]`` of request ``requests[i]`` (int32; negative: padding, skipped);
    ``table`` of shape (requests, pages), int32, holds slot ids. Raises ``SpecError`` for shapes and types that do not
    fit.
    """
    data = plane.data
    if values.dtype not in _SOURCES[data.format]:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SOURCES[data.format])
        raise SpecError(data.name, f"found values of {values.dtype}, a {data.format.value} plane takes {names}")
    narrow = SCALE_BLOCK_ELEMENTS if data.format.block_scaled else 8
    strides = values.stride()
    contiguous = strides[2] == 1 and strides[0] % 8 == 0 and strides[1] % 8 == 0 and values.data_ptr() % 16 == 0
    wide = plane.wide and contiguous and data.dim % max(16, narrow) == 0
    columns = 256 if data.dim > 64 else 64
    inverse = float(np.divide(1.0, plane.unit))
    if wide and _fits_words(plane, values):
        words = values.view(torch.int32)
        _launch(plane, "append_fp4_words", words, requests, positions, table, inverse, {"COLUMNS": columns})
        return
    _launch(plane, "append_rows", values, requests, positions, table, inverse, {"WIDE": wide, "COLUMNS": columns})


def _fits_words(plane: PagedPlane, values: Any) -> bool:
    """Whether the kernel for words of two bf16 may quantise ``values``."""
    exact = math.frexp(plane.unit)[0] == 0.5 and 1e-9 < plane.unit < 1e9  # float: a power of two of moderate size
    nvfp4 = plane.data.format == ElementFormat.NVFP4
    return nvfp4 and exact and values.dtype == torch.bfloat16 and plane.data.dim <= MAX_WORD_ROW


def fetch(plane: PagedPlane, out: Any, requests: Any, positions: Any, table: Any) -> None:
    """Read tokens of ``plane`` into ``out`` of shape (tokens, heads, dim), fp32 or bf16; the arguments of ``append``.

    Rows of padding tokens stay as they are.
    """
    if out.dtype not in (torch.float32, torch.bfloat16):
        raise SpecError(plane.data.name, f"found an output of {out.dtype}, needs float32 or bfloat16")
    columns = 256 if plane.data.dim > 64 else 64
    _launch(plane, "fetch_rows", out, requests, positions, table, plane.unit, {"COLUMNS": columns})


def quantize_pages(plane: PagedPlane, values: Any, slots: Any) -> None:
    """Store ``values`` of shape (pages, heads, tokens, dim) in the pages ``slots`` (int32) of ``plane``."""
    append(plane, *_by_page(plane, values, slots))


def dequantize_pages(plane: PagedPlane, out: Any, slots: Any) -> None:
    """Read the pages ``slots`` (int32) of ``plane`` into ``out`` of shape (pages, heads, tokens, dim)."""
    fetch(plane, *_by_page(plane, out, slots))


def _by_page(plane: PagedPlane, values: Any, slots: Any) -> tuple[Any, Any, Any, Any]:
    """Return pages as tokens: (values by token, requests, positions, table with one page per request).

    Only a tensor whose pages and tokens form one axis of even steps can be told by token.
    """
    pages, heads, tokens, dim = values.shape
    if tokens != plane.data.size("token"):
        raise SpecError(plane.data.name, f"found pages of {tokens} tokens, needs {plane.data.size('token')}")
    by_token = values.transpose(1, 2)
    if pages > 1 and by_token.stride(0) != tokens * by_token.stride(1):
        text = f"found pages {by_token.stride(0)} elements apart, needs {tokens} tokens of {by_token.stride(1)}"
        raise SpecError(plane.data.name, f"{text}: allocate the pages as (pages, tokens, heads, dim)")
    flat = by_token.as_strided((pages * tokens, heads, dim), by_token.stride()[1:], by_token.storage_offset())
    number = torch.arange(pages * tokens, dtype=torch.int32, device=values.device)
    requests = torch.div(number, tokens, rounding_mode="floor")
    return flat, requests, number - requests * tokens, slots.reshape(-1, 1)


def _launch(
    plane: PagedPlane, kernel: str, outside: Any, requests: Any, positions: Any, table: Any, unit: float,
    constants: dict[str, Any],
) -> None:  # fmt: skip
    data = plane.data
    tokens, heads, words = outside.shape
    dim = words * 2 if kernel == "append_fp4_words" else words
    if tokens * heads >= MAX_ROWS:
        found = f"found {tokens} tokens of {heads} heads"
        raise SpecError(data.name, f"{found}, needs fewer than {MAX_ROWS} rows: give the tokens in parts")
    if (heads, dim) != (data.size("head"), data.dim):
        found = f"found tokens of {heads} heads x {dim}"
        raise SpecError(data.name, f"{found}, needs {data.size('head')} heads x {data.dim}")
    for name, given in (("requests", requests), ("positions", positions), ("table", table)):
        if given.dtype != torch.int32 or not given.is_contiguous():
            raise SpecError(name, f"found a tensor of {given.dtype}, needs a contiguous one of int32")
    if tokens * heads == 0:
        return
    interpreted = outside.device.type == "cpu"
    # the interpreter pays for every program, a GPU for every register
    rows, warps = (16, 4) if constants["COLUMNS"] == 256 else (32, 4)
    if kernel == "append_fp4_words":
        rows, warps = 8, 1
    if interpreted:
        rows = 64 if tokens * heads <= 1024 else 1024
    arguments = {
        "outside": outside, "requests": requests, "positions": positions, "table": table, "row_count": tokens * heads,
        "heads": heads, "dim": dim, "page_tokens": data.size("token"), "table_row": table.stride(0), "unit": unit,
        "outside_token": outside.stride(0), "outside_head": outside.stride(1), **plane.arguments("cache"),
    }  # fmt: skip
    if kernel == "append_fp4_words":
        arguments.pop("cache_dim")
    else:
        arguments.update(outside_dim=outside.stride(2), FORMAT=plane.code)
    module = importlib.import_module(_KERNELS)
    getattr(module, kernel)[(div_up(tokens * heads, rows),)](**arguments, ROWS=rows, **constants, num_warps=warps)
