"""Trials of the recurrent kernels: a few tokens through states in their slots, padding rows among the requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from ...model.formats import ElementFormat
from ...sim.layout import CONV_STATE, SSM_STATE
from ..device import Device
from ..paged.views import CacheView, LayoutMemory
from ..reference import state as reference
from ..reference.bounds import STATE_BOUNDS
from ..state.steps import DeltaInputs, Mamba2Inputs, conv_step, delta_step, mamba2_step
from .attention import torch_device
from .filling import numbers
from .layouts import state_layout
from .outcome import Outcome, judge, poisoned
from .shape import Shape


class _States(msgspec.Struct, frozen=True):
    """A view, the slots of each row (-1: padding), the values held, and a source of numbers."""

    memory: LayoutMemory
    view: CacheView
    slots: Any
    rows: Any
    held: Any
    draw: Callable[..., Any]


def _prepare(device: Device, shape: Shape, role: str, channels: int) -> _States:
    """Fill the states of all requests; one more row at the end is padding, one more slot belongs to nobody."""
    where = torch_device(device)
    requests = len(shape.lengths)
    memory = LayoutMemory(device, state_layout(shape, requests + 1, channels))
    view = next(memory.of_buffer(buffer) for buffer in memory.layout.buffers if buffer.role == role)
    generator = torch.Generator().manual_seed(shape.seed)
    order = torch.randperm(requests + 1, generator=generator)[:requests]
    slots = torch.cat([order, torch.tensor([-1])]).to(torch.int32).to(where)
    held = numbers(generator, (requests, *view.shape), where)
    rows = slots[:requests].to(torch.int64)
    view.tensor()[rows] = held.to(view.storage.dtype)

    def draw(*sizes: int, scale: float = 1.0) -> Any:
        return numbers(generator, sizes, where, scale)

    return _States(memory, view, slots, rows, view.tensor()[rows].to(torch.float64), draw)


def _kept(state: Any, format: ElementFormat) -> Any:
    """Return a float64 state as its slot keeps it between two tokens."""
    types = {ElementFormat.FP32: torch.float32, ElementFormat.FP16: torch.float16, ElementFormat.BF16: torch.bfloat16}
    return state.to(torch.float32).to(types[format]).to(torch.float64)


def trial_conv(device: Device, shape: Shape) -> Outcome:
    """Try the convolution step over ``heads * head_dim`` channels and ``taps`` kept taps."""
    channels = shape.heads * shape.head_dim
    ready = _prepare(device, shape, CONV_STATE, channels)
    weights, bias = ready.draw(channels, shape.taps + 1), ready.draw(channels)
    held, results = ready.held, []
    bound = STATE_BOUNDS[shape.conv_format]
    for token in range(shape.query_tokens):
        inputs = ready.draw(len(ready.slots), channels)
        out = poisoned((len(ready.slots), channels), inputs.device)
        conv_step(ready.view, ready.slots, inputs, weights, bias, out)
        wide = [part.to(torch.float64) for part in (inputs[:-1], weights, bias)]
        wanted, held = reference.conv_step(held, *wide)
        held = _kept(held, shape.conv_format)
        results.append((f"token {token}", out[:-1], wanted, bound))
        results.append(
            (f"padding row of token {token}", torch.isnan(out[-1]).to(out.dtype), torch.ones_like(wide[2]), bound)
        )
    device.synchronize()
    return judge([*results, ("conv state", ready.view.tensor()[ready.rows], held, bound)])


def trial_mamba2(device: Device, shape: Shape) -> Outcome:
    """Try the Mamba-2 step."""
    ready = _prepare(device, shape, SSM_STATE, shape.heads)
    rows, heads = len(ready.slots), shape.heads
    groups = heads // shape.group  # floor: exact, drawn as groups times heads per group
    a, d = -ready.draw(heads).abs(), ready.draw(heads)

    def token() -> Mamba2Inputs:
        x, b, c = (ready.draw(rows, *sizes) for sizes in ((heads, shape.head_dim), *((groups, shape.value_dim),) * 2))
        return Mamba2Inputs(x, b, c, ready.draw(rows, heads), a, d)

    return _tokens(device, shape, ready, token, mamba2_step, reference.mamba2_step)


def trial_delta(device: Device, shape: Shape) -> Outcome:
    """Try the gated delta rule."""
    ready = _prepare(device, shape, SSM_STATE, shape.heads)
    rows, heads = len(ready.slots), shape.heads
    groups = heads // shape.group  # floor: exact, drawn as groups times heads per group
    a, dt_bias = ready.draw(heads, scale=0.5), ready.draw(heads)

    def token() -> DeltaInputs:
        q, k = ready.draw(rows, groups, shape.value_dim), ready.draw(rows, groups, shape.value_dim)
        v = ready.draw(rows, heads, shape.head_dim)
        return DeltaInputs(q, k, v, ready.draw(rows, heads), ready.draw(rows, heads), a, dt_bias)

    return _tokens(device, shape, ready, token, delta_step, reference.delta_step)


def _tokens(
    device: Device, shape: Shape, ready: _States, token: Callable[[], Any], kernel: Callable[..., None],
    wanted_of: Callable[..., tuple[Any, Any]],
) -> Outcome:  # fmt: skip
    """Run a few tokens through a kernel and its reference, which takes the fields of the inputs in order."""
    held, results, bound = ready.held, [], STATE_BOUNDS[shape.format]
    for number in range(shape.query_tokens):
        inputs = token()
        out = poisoned((len(ready.slots), shape.heads, shape.head_dim), ready.slots.device)
        kernel(ready.view, ready.slots, inputs, out)
        fields = [getattr(inputs, name).to(torch.float64) for name in inputs.__struct_fields__]
        # the last two fields belong to heads, all others have a row for padding at their end
        by_row = len(fields) - 2
        wanted, held = wanted_of(held, *[each[:-1] for each in fields[:by_row]], *fields[by_row:])
        held = _kept(held, shape.format)
        results.append((f"token {number}", out[:-1], wanted, bound))
        untouched = torch.isnan(out[-1]).to(out.dtype)
        results.append((f"padding row of token {number}", untouched, torch.ones_like(untouched), bound))
    device.synchronize()
    return judge([*results, ("state", ready.view.tensor()[ready.rows], held, bound)])
