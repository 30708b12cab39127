"""``conv_step``, ``mamba2_step`` and ``delta_step``: one token of a recurrent layer, its states updated in place."""

from __future__ import annotations

import importlib
from typing import Any, Final

import msgspec
import torch

from ...model.arithmetic import div_up
from ...model.errors import SpecError
from ...model.formats import STATE_FORMATS
from ..paged.views import FORMAT_CODES, CacheView

_KERNELS: Final = f"{__package__}.triton_steps"
MAX_STATES: Final = 256
MAX_TAPS: Final = 8


class Mamba2Inputs(msgspec.Struct, frozen=True):
    """One token of Mamba-2, dense fp32.

    ``x`` (requests, heads, dims), ``b`` and ``c`` (requests, groups, states), ``dt`` (requests, heads) before its
    softplus and with its bias, ``a`` and ``d`` (heads,); ``a`` is negative.
    """

    x: Any
    b: Any
    c: Any
    dt: Any
    a: Any
    d: Any


class DeltaInputs(msgspec.Struct, frozen=True):
    """One token of the gated delta rule, dense fp32.

    ``q`` and ``k`` (requests, groups, states), ``v`` (requests, heads, dims), ``gate`` and ``beta`` (requests, heads)
    before softplus and sigmoid, ``a`` (the logarithm of the decay) and ``dt_bias`` (heads,).
    """

    q: Any
    k: Any
    v: Any
    gate: Any
    beta: Any
    a: Any
    dt_bias: Any


def conv_step(state: CacheView, slots: Any, inputs: Any, weights: Any, bias: Any, outputs: Any) -> None:
    """Convolve one token: ``inputs`` and ``outputs`` (requests, channels), ``weights`` (channels, taps + 1), fp32.

    ``state`` has axes (channel, tap); ``slots`` (requests,), int32, negative for padding rows, each other slot once.
    """
    channels, taps = state.size("channel"), state.size("tap")
    if taps > MAX_TAPS:
        raise SpecError(state.name, f"found {taps} taps, the kernel needs at most {MAX_TAPS}")
    requests = _check(state, slots)
    for name, given, needed in (
        ("inputs", inputs, (requests, channels)),
        ("outputs", outputs, (requests, channels)),
        ("weights", weights, (channels, taps + 1)),
        ("bias", bias, (channels,)),
    ):
        _check_dense(name, given, needed)
    if requests == 0:
        return
    block = 256 if inputs.device.type == "cpu" else 128
    importlib.import_module(_KERNELS).conv_step[(requests, div_up(channels, block))](
        state.storage, inputs, weights, bias, outputs, slots, channels, taps, state.start, state.slot_stride,
        state.stride("channel"), state.stride("tap"), FORMAT=FORMAT_CODES[state.format], TAPS=MAX_TAPS, BLOCK=block,
        num_warps=4,
    )  # fmt: skip


def mamba2_step(state: CacheView, slots: Any, inputs: Mamba2Inputs, outputs: Any) -> None:
    """Update ``state`` with axes (head, dim, state) by one token, and write ``outputs`` (requests, heads, dims)."""
    _step("mamba2_step", state, slots, inputs, inputs.b.shape[1], outputs)


def delta_step(state: CacheView, slots: Any, inputs: DeltaInputs, outputs: Any) -> None:
    """Update ``state`` with axes (head, dim, state) by one token, and write ``outputs`` (requests, heads, dims)."""
    _step("delta_step", state, slots, inputs, inputs.k.shape[1], outputs)


def _step(
    kernel: str, state: CacheView, slots: Any, inputs: Mamba2Inputs | DeltaInputs, groups: int, outputs: Any
) -> None:
    requests = _check(state, slots)
    heads, dims, states = state.size("head"), state.size("dim"), state.size("state")
    if states > MAX_STATES:
        raise SpecError(state.name, f"found a state dim of {states}, the kernel needs at most {MAX_STATES}")
    if groups == 0 or heads % groups:
        raise SpecError("inputs", f"found {groups} groups, needs a divisor of {heads} heads")
    by_head, by_group = (requests, heads), (requests, groups, states)
    shapes = {
        "x": (*by_head, dims), "v": (*by_head, dims), "b": by_group, "c": by_group, "q": by_group, "k": by_group,
        "dt": by_head, "gate": by_head, "beta": by_head, "a": (heads,), "d": (heads,), "dt_bias": (heads,),
    }  # fmt: skip
    tensors = {name: getattr(inputs, name) for name in inputs.__struct_fields__}
    for name, given in (*tensors.items(), ("outputs", outputs)):
        _check_dense(name, given, shapes.get(name, (*by_head, dims)))
    if requests == 0:
        return
    columns = 64 if states <= 64 else 256
    rows = 128 if outputs.device.type == "cpu" else 16
    module = importlib.import_module(_KERNELS)
    getattr(module, kernel)[(requests, heads, div_up(dims, rows))](
        state=state.storage, **tensors, outputs=outputs, slots=slots, heads=heads, dims=dims, states=states,
        groups=groups, start=state.start, slot_stride=state.slot_stride, head_stride=state.stride("head"),
        dim_stride=state.stride("dim"), state_stride=state.stride("state"), FORMAT=FORMAT_CODES[state.format],
        ROWS=rows, STATES=columns, num_warps=4,
    )  # fmt: skip


def _check(state: CacheView, slots: Any) -> int:
    if state.format not in STATE_FORMATS:
        known = ", ".join(format.value for format in STATE_FORMATS)
        raise SpecError(state.name, f"found format {state.format.value}, recurrent states need one of {known}")
    if slots.dtype != torch.int32 or not slots.is_contiguous() or slots.dim() != 1:
        raise SpecError("slots", f"found a tensor of {slots.dtype}, needs a contiguous one of int32 with 1 axis")
    return int(slots.shape[0])


def _check_dense(name: str, given: Any, needed: tuple[int, ...]) -> None:
    if given.dtype != torch.float32 or tuple(given.shape) != needed or not given.is_contiguous():
        found = f"found {given.dtype} of {tuple(given.shape)}"
        raise SpecError(name, f"{found}, needs contiguous float32 of {needed}")
