"""Trials of appending, fetching, quantising and moving pages."""

from __future__ import annotations

from typing import Any

import torch

from ...model.formats import ElementFormat
from ...sim.layout import KEY, KEY_SCALE, VALUE
from ..device import Device
from ..paged.views import POISON_BYTE, CacheView, LayoutMemory, PagedPlane
from ..pages.copying import fork_pages, gather_pages, scatter_pages
from ..quantize.rows import append, dequantize_pages, fetch, quantize_pages
from ..reference.bounds import STORED_BOUNDS, Bound
from ..reference.numbers import as_stored
from .attention import torch_device
from .filling import hold_pages, numbers, write_tokens
from .layouts import kv_layout
from .outcome import Outcome, judge, poisoned
from .shape import Shape

_EXACT = Bound(0.0, 0.0)


def _plane(memory: LayoutMemory, unit: float) -> PagedPlane:
    views = {buffer.role: memory.of_buffer(buffer) for buffer in memory.layout.buffers}
    return PagedPlane(views[KEY], views.get(KEY_SCALE), unit)


def _strangers(memory: LayoutMemory, view: CacheView, device: Any) -> tuple[Any, Any]:
    """Return the bytes of all pools that are no part of ``view`` or its scales, and what they must be: poison."""
    others = [memory.of_buffer(buffer) for buffer in memory.layout.buffers if buffer.role.startswith(VALUE)]
    bytes_ = torch.cat([other.tensor().contiguous().view(torch.uint8).flatten() for other in others])
    return bytes_, torch.full(bytes_.shape, POISON_BYTE, dtype=torch.float64, device=device)


def trial_append(device: Device, shape: Shape) -> Outcome:
    """Append in no order, with padding; what torch then reads must be the reference's rounding, the rest untouched."""
    where = torch_device(device)
    held = hold_pages(shape.lengths, shape.page_tokens, shape.seed, where)
    memory = LayoutMemory(device, kv_layout(shape, held.slots))
    plane = _plane(memory, shape.unit)
    generator = torch.Generator().manual_seed(shape.seed)
    pairs = [(request, at) for request, length in enumerate(shape.lengths) for at in range(length)]
    order = torch.randperm(len(pairs), generator=generator).tolist()
    places = [pairs[index] for index in order] + [(-1, 0), (0, -1)]
    requests, positions = (torch.tensor(each, dtype=torch.int32, device=where) for each in zip(*places, strict=True))
    values = numbers(generator, (len(places), shape.heads, shape.head_dim + shape.row_gap), where)
    values = values[..., : shape.head_dim]
    given = values.to(torch.bfloat16) if shape.seed % 2 and shape.format in _FROM_BF16 else values
    append(plane, given, requests, positions, held.table)
    out = poisoned((len(places), shape.heads, shape.head_dim), where)
    fetch(plane, out, requests, positions, held.table)
    device.synchronize()
    wanted = as_stored(values[:-2], shape.format, shape.unit)
    others, poison = _strangers(memory, plane.data, where)
    padding = torch.isnan(out[-2:]).to(torch.float32)
    return judge(
        [
            ("tokens", out[:-2], wanted, STORED_BOUNDS[shape.format]),
            ("padding tokens", padding, torch.ones_like(padding), _EXACT),
            ("bytes of V", others, poison, _EXACT),
        ]
    )


_FROM_BF16 = (ElementFormat.BF16, ElementFormat.FP8, ElementFormat.NVFP4)


def trial_fetch(device: Device, shape: Shape) -> Outcome:
    """Fetch what torch wrote: dequantisation is exact but for the last digit of fp32."""
    where = torch_device(device)
    held = hold_pages(shape.lengths, shape.page_tokens, shape.seed, where)
    memory = LayoutMemory(device, kv_layout(shape, held.slots))
    plane = _plane(memory, shape.unit)
    generator = torch.Generator().manual_seed(shape.seed)
    results = []
    for request, length in enumerate(shape.lengths):
        values = numbers(generator, (length, shape.heads, shape.head_dim), where)
        wanted = write_tokens(plane, request, values, held)
        out = poisoned(tuple(values.shape), where)
        positions = torch.arange(length, dtype=torch.int32, device=where)
        fetch(plane, out, torch.full_like(positions, request), positions, held.table)
        results.append((f"request {request}", out, wanted, Bound(1e-6, 1e-6)))
    device.synchronize()
    return judge(results)


def trial_quantize(device: Device, shape: Shape) -> Outcome:
    """Quantise whole pages and dequantise them again."""
    where = torch_device(device)
    slots = 5
    memory = LayoutMemory(device, kv_layout(shape, slots))
    plane = _plane(memory, shape.unit)
    generator = torch.Generator().manual_seed(shape.seed)
    chosen = torch.randperm(slots, generator=generator)[:3].to(torch.int32).to(where)
    by_token = numbers(generator, (3, shape.page_tokens, shape.heads, shape.head_dim), where)
    quantize_pages(plane, by_token.transpose(1, 2), chosen)
    out = poisoned(tuple(by_token.shape), where)
    dequantize_pages(plane, out.transpose(1, 2), chosen)
    device.synchronize()
    return judge([("pages", out, as_stored(by_token, shape.format, shape.unit), STORED_BOUNDS[shape.format])])


def trial_copy(device: Device, shape: Shape) -> Outcome:
    """Gather pages, scatter them to other slots and fork them: bytes must arrive, and nowhere else."""
    where = torch_device(device)
    slots = 7
    memory = LayoutMemory(device, kv_layout(shape, slots))
    view = _plane(memory, shape.unit).data
    generator = torch.Generator().manual_seed(shape.seed)
    as_bytes = torch.randint(0, 256, (slots, *view.shape, view.format.container_bytes), generator=generator)
    before = as_bytes.to(torch.uint8).to(where).view(view.storage.dtype).reshape(slots, *view.shape)
    view.tensor().copy_(before)
    order = torch.randperm(slots, generator=generator).to(torch.int32).to(where)
    sources, targets, forks = order[:3].contiguous(), order[3:6].contiguous(), order[6:].contiguous()
    gathered = torch.empty((3, *view.shape), dtype=view.storage.dtype, device=where)
    gather_pages(view, sources, gathered)
    scatter_pages(view, targets, gathered)
    fork_pages(view, sources[:1].contiguous(), forks)
    device.synchronize()
    wanted = before.clone()
    wanted[targets.to(torch.int64)] = before[sources.to(torch.int64)]
    wanted[forks.to(torch.int64)] = before[sources[:1].to(torch.int64)]
    others, poison = _strangers(memory, view, where)
    return judge(
        [
            ("gathered bytes", _as_bytes(gathered), _as_bytes(before[sources.to(torch.int64)]), _EXACT),
            ("bytes", _as_bytes(view.tensor().contiguous()), _as_bytes(wanted), _EXACT),
            ("bytes of V", others, poison, _EXACT),
        ]
    )


def _as_bytes(values: Any) -> Any:
    return values.view(torch.uint8).flatten().to(torch.float64)
