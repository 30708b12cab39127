"""Trials of the attention kernels; each takes the kernel to try, ours where none is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from ...model.arithmetic import div_up
from ...sim.layout import KEY, KEY_SCALE, VALUE, VALUE_SCALE
from ..attention.decode import decode
from ..attention.problem import QUERY_TYPES, PagedAttention
from ..attention.tiles import ROWS, Skipped, latent, prefill, skip_softmax
from ..device import Device
from ..paged.views import LayoutMemory, PagedPlane
from ..reference import attention as reference
from ..reference.bounds import ATTENTION_BOUNDS, Bound
from .filling import Held, hold_pages, numbers, write_tokens
from .layouts import kv_layout
from .outcome import Outcome, judge, poisoned
from .shape import Shape

AttentionKernel = Callable[[PagedAttention, Any, Any], None]
"""Writes attention of (problem, queries) to an output; see ``kernels.attention`` for shapes."""


class Prepared(msgspec.Struct, frozen=True):
    """A filled cache, the problem over it, the queries, and K and V of each request in float64."""

    memory: LayoutMemory
    problem: PagedAttention
    held: Held
    queries: Any
    contents: list[tuple[Any, Any]]


def torch_device(device: Device) -> Any:
    """Return torch's name of the device."""
    return torch.device(device.kind)


def prepare(device: Device, shape: Shape, query_tokens: int) -> Prepared:
    """Return a cache with ``shape``'s layout and contents; queries are (requests, tokens, query heads, dim)."""
    where = torch_device(device)
    held = hold_pages(shape.lengths, shape.page_tokens, shape.seed, where)
    memory = LayoutMemory(device, kv_layout(shape, held.slots))
    views = {buffer.role: memory.of_buffer(buffer) for buffer in memory.layout.buffers}
    key = PagedPlane(views[KEY], views.get(KEY_SCALE), shape.unit)
    value = PagedPlane(views[VALUE], views.get(VALUE_SCALE), shape.unit)
    generator = torch.Generator().manual_seed(shape.seed)
    contents = []
    for request, length in enumerate(shape.lengths):
        keys, values = (
            numbers(generator, (length, shape.heads, dim), where) for dim in (shape.head_dim, shape.value_dim)
        )
        contents.append((write_tokens(key, request, keys, held), write_tokens(value, request, values, held)))
    asked = (len(shape.lengths), query_tokens, shape.heads * shape.group, shape.head_dim)
    queries = numbers(generator, asked, where, 2.0).to(QUERY_TYPES[shape.format])
    problem = PagedAttention(key, value, held.table, held.lengths, shape.window, shape.sinks)
    return Prepared(memory, problem, held, queries, contents)


def positions(length: int, query_tokens: int, where: Any) -> Any:
    """Return the positions of a request's queries; negative ones are before its first token."""
    return torch.arange(length - query_tokens, length, device=where)


def trial_decode(device: Device, shape: Shape, kernel: AttentionKernel = decode) -> Outcome:
    """Try a kernel on one query token per request: queries (requests, query heads, dim)."""
    ready = prepare(device, shape, 1)
    queries = ready.queries[:, 0]
    out = poisoned((*queries.shape[:-1], shape.value_dim), queries.device)
    kernel(ready.problem, queries, out)
    device.synchronize()
    return judge([("out", out, _wanted(ready, shape, 1)[:, 0], ATTENTION_BOUNDS[shape.format])])


def trial_prefill(device: Device, shape: Shape, kernel: AttentionKernel = prefill) -> Outcome:
    """Try a kernel on several query tokens per request: queries (requests, tokens, query heads, dim)."""
    ready = prepare(device, shape, shape.query_tokens)
    out = _before_the_start(poisoned((*ready.queries.shape[:-1], shape.value_dim), ready.queries.device), shape)
    kernel(ready.problem, ready.queries, out)
    device.synchronize()
    return judge([("out", out, _wanted(ready, shape, shape.query_tokens), ATTENTION_BOUNDS[shape.format])])


def _before_the_start(out: Any, shape: Shape) -> Any:
    """Set the rows of queries before a request's first token to 0: a kernel leaves them as they are."""
    for request, length in enumerate(shape.lengths):
        out[request, : max(0, out.shape[1] - length)] = 0.0
    return out


def _wanted(ready: Prepared, shape: Shape, query_tokens: int) -> Any:
    wanted = []
    for request, (keys, values) in enumerate(ready.contents):
        at = positions(keys.shape[0], query_tokens, keys.device)
        seen = reference.visible(at, keys.shape[0], shape.window, shape.sinks)
        wanted.append(reference.attention(ready.queries[request], keys, values, seen, ready.problem.score_scale))
    return torch.stack(wanted)


def trial_skip_softmax(device: Device, shape: Shape) -> Outcome:
    """Try skip-softmax: its choices must follow from the scores, and its output from its choices.

    Each choice is checked against the float64 scores with a margin of the scores' rounding; then the reference leaves
    out the same blocks. At a factor of 0 nothing may be skipped.
    """
    ready = prepare(device, shape, shape.query_tokens)
    out = _before_the_start(poisoned((*ready.queries.shape[:-1], shape.value_dim), ready.queries.device), shape)
    longest = ready.held.table.shape[1] * shape.page_tokens
    factor = 0.0 if shape.seed % 5 == 0 else min(longest * (0.9 if shape.seed % 2 else 0.2), longest - 0.5)
    skipped = skip_softmax(ready.problem, ready.queries, out, factor)
    device.synchronize()
    wanted, consistent = _wanted_skipping(ready, shape, skipped, float(np.divide(factor, longest)))
    # half of what a block may add is within the bound only where its weight is small, so the reference skips it too
    results = [("skip flags", consistent, torch.zeros_like(consistent), Bound(0.0, 0.0))]
    results.append(("out", out, wanted, ATTENTION_BOUNDS[shape.format]))
    return judge(results)


def _wanted_skipping(ready: Prepared, shape: Shape, skipped: Skipped, threshold: float) -> tuple[Any, Any]:
    """Return the output that leaves out the skipped blocks, and 1 for each flag that the scores contradict."""
    heads, group, block = shape.heads, shape.group, skipped.block_tokens
    wrong = torch.zeros_like(skipped.flags)
    wanted = []
    for request, (keys, values) in enumerate(ready.contents):
        tokens, count = keys.shape[0], shape.query_tokens
        seen = reference.visible(positions(tokens, count, keys.device), tokens, shape.window, shape.sinks)
        queries = ready.queries[request].to(torch.float64)
        scores = torch.einsum("qhd,thd->hqt", queries, keys.repeat_interleave(group, 1)) * ready.problem.score_scale
        scores = scores.masked_fill(~seen, -torch.inf)
        rows = scores.unflatten(0, (heads, group)).transpose(1, 2).flatten(1, 2)  # (KV head, token x lane, keys)
        flags = skipped.flags[request].repeat_interleave(ROWS, dim=1)[:, : rows.shape[1]]
        wrong[request] = _contradicted(rows, skipped.flags[request], block, threshold)
        by_row = flags.unflatten(1, (count, group)).transpose(1, 2).flatten(0, 1).to(torch.bool)
        wanted.append(
            reference.skip_softmax(ready.queries[request], keys, values, seen, ready.problem.score_scale, by_row, block)
        )
    return torch.stack(wanted), wrong


def _contradicted(rows: Any, flags: Any, block: int, threshold: float, margin: float = 1e-2) -> Any:
    """Return 1 where a flag contradicts float64 scores ``rows`` (KV head, row, keys), by more than ``margin``."""
    wrong = torch.zeros_like(flags)
    running = torch.full(rows.shape[:2], -torch.inf, dtype=torch.float64, device=rows.device)
    for number, start in enumerate(range(0, rows.shape[2], block)):
        peak = rows[:, :, start : start + block].amax(-1)
        running = torch.maximum(running, peak)
        gap = torch.where(torch.isfinite(peak), peak - running, -torch.inf)
        for tile in range(flags.shape[1]):
            best = gap[:, tile * ROWS : (tile + 1) * ROWS].amax(-1).exp()
            surely, never = best < threshold - margin * threshold, best > threshold + margin * threshold
            none = torch.isneginf(peak[:, tile * ROWS : (tile + 1) * ROWS]).all(-1)  # nothing seen: free to skip
            flag = flags[:, tile, number] != 0
            wrong[:, tile, number] = ((surely & ~flag & ~none) | (never & flag)).to(wrong.dtype)
    past_the_end = div_up(rows.shape[2], block)
    wrong[:, :, past_the_end:] = flags[:, :, past_the_end:]
    return wrong


def trial_latent(device: Device, shape: Shape) -> Outcome:
    """Try latent attention: ``head_dim`` is the row's dim, ``value_dim`` the latent part, ``group`` the heads."""
    where = torch_device(device)
    held = hold_pages(shape.lengths, shape.page_tokens, shape.seed, where)
    memory = LayoutMemory(device, kv_layout(shape, held.slots, latent=True))
    views = {buffer.role: memory.of_buffer(buffer) for buffer in memory.layout.buffers}
    rows = PagedPlane(views[KEY], views.get(KEY_SCALE), shape.unit)
    generator = torch.Generator().manual_seed(shape.seed)
    contents = [
        write_tokens(rows, request, numbers(generator, (length, 1, shape.head_dim), where), held)
        for request, length in enumerate(shape.lengths)
    ]
    asked = (len(shape.lengths), shape.query_tokens, shape.group, shape.head_dim)
    queries = numbers(generator, asked, where).to(QUERY_TYPES[shape.format])
    out = _before_the_start(poisoned((*asked[:-1], shape.value_dim), where), shape)
    scale = 0.1  # float: any will do
    latent(
        rows, held.table, held.lengths, queries, out, latent_dim=shape.value_dim, scale=scale, window=shape.window,
        sinks=shape.sinks,
    )  # fmt: skip
    device.synchronize()
    wanted = []
    for request, kept in enumerate(contents):
        at = positions(kept.shape[0], shape.query_tokens, where)
        seen = reference.visible(at, kept.shape[0], shape.window, shape.sinks)
        wanted.append(reference.latent_attention(queries[request], kept[:, 0], seen, scale, shape.value_dim))
    return judge([("out", out, torch.stack(wanted), ATTENTION_BOUNDS[shape.format])])
