"""Cache contents and page tables of a trial, written with torch's own indexing, so that no kernel here is trusted."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import torch

from ...model.arithmetic import div_up
from ...model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ..paged.views import PagedPlane
from ..reference.numbers import as_stored, fp4_scales, round_fp4

_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Held(msgspec.Struct, frozen=True):
    """Who holds which pages: ``table`` (requests, pages) and ``lengths`` on the device, ``slots`` in the pool."""

    table: Any
    lengths: Any
    slots: int


def hold_pages(lengths: tuple[int, ...], page_tokens: int, seed: int, device: Any) -> Held:
    """Give every request its pages, in no order, out of a pool with some to spare.

    Entries past a request's pages name slots that exist and belong to nobody.
    """
    counts = [div_up(length, page_tokens) for length in lengths]
    most = max(1, *counts)
    slots = sum(counts) + 2
    order = list(range(slots))
    random.Random(seed).shuffle(order)
    spare = order.pop()
    rows = []
    for count in counts:
        rows.append([order.pop() for _ in range(count)] + [spare] * (most - count))
    return Held(_int32(rows, device), _int32(list(lengths), device), slots)


def _int32(values: Any, device: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32, device=device)


def numbers(generator: torch.Generator, shape: tuple[int, ...], device: Any, scale: float = 1.0) -> Any:
    """Return normal numbers that bf16 holds exactly, in float32."""
    drawn = torch.randn(shape, generator=generator) * scale
    return drawn.to(torch.bfloat16).to(torch.float32).to(device)


def write_tokens(plane: PagedPlane, request: int, values: Any, held: Held) -> Any:
    """Write ``values`` (tokens, heads, dim) as the tokens of a request; return what the plane now holds, in float64."""
    tokens, scaled = values.shape[0], torch.divide(values.to(torch.float64), plane.unit)
    size = plane.data.size("token")
    number = torch.arange(tokens, device=values.device)
    ordinal = torch.div(number, size, rounding_mode="floor")
    slots, entries = held.table[request].to(torch.int64)[ordinal], number - ordinal * size
    if plane.scales is not None:
        scales = fp4_scales(scaled)
        _put(plane.scales, slots, entries, scales.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8))
        blocks = torch.divide(scaled.unflatten(-1, (-1, SCALE_BLOCK_ELEMENTS)), scales[..., None])
        rounded = round_fp4(torch.nan_to_num(blocks, nan=0.0, posinf=0.0, neginf=0.0)).flatten(-2)
        code = torch.searchsorted(torch.tensor(_CODES, device=values.device, dtype=torch.float64), rounded.abs())
        code = (code | torch.where(torch.signbit(scaled), 8, 0)).to(torch.uint8)
        stored = code[..., 0::2] | (code[..., 1::2] << 4)
    elif plane.data.format == ElementFormat.FP8:
        stored = scaled.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        stored = scaled.to(plane.data.storage.dtype)
    _put(plane.data, slots, entries, stored)
    return as_stored(values, plane.data.format, plane.unit)


def _put(view: Any, slots: Any, entries: Any, values: Any) -> None:
    """Store (tokens, heads, containers) at (slots, entries)."""
    tensor = view.tensor()
    if view.axes[0] == "head":
        tensor.transpose(1, 2)[slots, entries] = values
    else:
        tensor[slots, entries] = values
