"""One step of a recurrent layer, in place: the convolution with its taps, Mamba-2, and the gated delta rule.

States are read and written where their slot says, in their own format; sums are fp32. A negative slot is padding.
"""

# mypy: ignore-errors
# Triton evaluates the annotations of a kernel, so they are left out but for constants and 64-bit strides.

import triton
import triton.language as tl

from ..quantize.triton_numbers import to_stored

_CONV = ["channels", "taps", "start", "slot_stride", "channel_stride", "tap_stride"]
_STATE = ["start", "slot_stride", "head_stride", "dim_stride", "state_stride"]


@triton.jit
def _softplus(value):
    """Return log(1 + e^value); the value itself where that is the same in fp32."""
    return tl.where(value > 20.0, value, tl.log(1.0 + tl.exp(tl.minimum(value, 20.0))))


@triton.jit
def _sigmoid(value):
    """Return 1 / (1 + e^-value)."""
    return tl.div_rn(tl.full(value.shape, 1.0, tl.float32), 1.0 + tl.exp(-value))


@triton.jit(do_not_specialize=_CONV)
def conv_step(state, inputs, weights, bias, outputs, slots, channels: tl.int32, taps: tl.int32, start: tl.int64,
              slot_stride: tl.int64, channel_stride: tl.int64, tap_stride: tl.int64, FORMAT: tl.constexpr,
              TAPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Convolve the kept taps and the new input, apply SiLU, and move the taps on by one.

    ``inputs`` and ``outputs`` are dense (requests, channels) fp32, ``weights`` (channels, taps + 1), the newest last.
    """
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.arange(0, TAPS)
    meant = channel < tl.where(slot >= 0, channels, 0)
    row = start + slot * slot_stride + channel.to(tl.int64) * channel_stride
    kept_at = row[:, None] + tap[None, :].to(tl.int64) * tap_stride
    inside = meant[:, None] & (tap < taps)[None, :]
    kept = tl.load(state + kept_at, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(inputs + request * channels + channel, mask=meant, other=0.0)
    weight_row = weights + channel * (taps + 1)
    weight = tl.load(weight_row[:, None] + tap[None, :], mask=inside, other=0.0)
    summed = tl.sum(kept * weight, axis=1) + new * tl.load(weight_row + taps, mask=meant, other=0.0)
    summed += tl.load(bias + channel, mask=meant, other=0.0)
    tl.store(outputs + request * channels + channel, summed * _sigmoid(summed), mask=meant)
    moved = inside & (tap >= 1)[None, :]
    # every tap is read before any is written, and no other program has these channels
    tl.store(state + kept_at - tap_stride, to_stored(kept, FORMAT), mask=moved)
    last = row + (taps - 1).to(tl.int64) * tap_stride
    tl.store(state + last, to_stored(new, FORMAT), mask=meant)


@triton.jit
def _place(slots, start, slot_stride, head_stride, dim_stride, state_stride, dims, states, ROWS: tl.constexpr,
           STATES: tl.constexpr):  # fmt: skip
    """Return (request, head, rows, columns, places, which are meant, which rows are meant) of this program."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, STATES)
    at = start + slot * slot_stride + head * head_stride + row.to(tl.int64)[:, None] * dim_stride
    at += column.to(tl.int64)[None, :] * state_stride
    rows = row < tl.where(slot >= 0, dims, 0)
    return request, head, row, column, at, rows[:, None] & (column < states)[None, :], rows


@triton.jit(do_not_specialize=["heads", "dims", "states", "groups", *_STATE])
def mamba2_step(state, x, b, c, dt, a, d, outputs, slots, heads: tl.int32, dims: tl.int32, states: tl.int32,
                groups: tl.int32, start: tl.int64, slot_stride: tl.int64, head_stride: tl.int64, dim_stride: tl.int64,
                state_stride: tl.int64, FORMAT: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr):  # fmt: skip
    """``h = exp(dt a) h + dt x b``, ``y = h c + d x`` with ``dt`` after its softplus.

    Dense fp32: ``x`` and ``outputs`` (requests, heads, dims), ``b`` and ``c`` (requests, groups, states), ``dt``
    (requests, heads), ``a`` and ``d`` (heads,).
    """
    request, head, row, column, at, inside, rows = _place(
        slots, start, slot_stride, head_stride, dim_stride, state_stride, dims, states, ROWS, STATES
    )
    group = head // (heads // groups)  # floor: heads come in groups
    held = tl.load(state + at, mask=inside, other=0.0).to(tl.float32)
    step = _softplus(tl.load(dt + request * heads + head))
    value = tl.load(x + (request * heads + head) * dims + row, mask=rows, other=0.0)
    grouped = (request * groups + group) * states + column
    into = tl.load(b + grouped, mask=column < states, other=0.0)
    out_of = tl.load(c + grouped, mask=column < states, other=0.0)
    held = held * tl.exp(step * tl.load(a + head)) + (step * value)[:, None] * into[None, :]
    tl.store(state + at, to_stored(held, FORMAT), mask=inside)
    result = tl.sum(held * out_of[None, :], axis=1) + tl.load(d + head) * value
    tl.store(outputs + (request * heads + head) * dims + row, result, mask=rows)


@triton.jit(do_not_specialize=["heads", "dims", "states", "groups", *_STATE])
def delta_step(state, q, k, v, gate, beta, a, dt_bias, outputs, slots, heads: tl.int32, dims: tl.int32,
               states: tl.int32, groups: tl.int32, start: tl.int64, slot_stride: tl.int64, head_stride: tl.int64,
               dim_stride: tl.int64, state_stride: tl.int64, FORMAT: tl.constexpr, ROWS: tl.constexpr,
               STATES: tl.constexpr):  # fmt: skip
    """Gated delta rule: ``S = e^g S; S = S + beta (v - S k) k^T; o = S q``, with q and k of unit length.

    ``g = -exp(a) softplus(gate + dt_bias)``, ``beta`` through a sigmoid, q over sqrt(states). Dense fp32: ``q`` and
    ``k`` (requests, groups, states), ``v`` and ``outputs`` (requests, heads, dims), ``gate`` and ``beta`` (requests,
    heads), ``a`` and ``dt_bias`` (heads,).
    """
    request, head, row, column, at, inside, rows = _place(
        slots, start, slot_stride, head_stride, dim_stride, state_stride, dims, states, ROWS, STATES
    )
    group = head // (heads // groups)  # floor: value heads come in groups
    held = tl.load(state + at, mask=inside, other=0.0).to(tl.float32)
    grouped = (request * groups + group) * states + column
    query = tl.load(q + grouped, mask=column < states, other=0.0)
    key = tl.load(k + grouped, mask=column < states, other=0.0)
    query = tl.div_rn(query, tl.zeros_like(query) + tl.sqrt(tl.sum(query * query, axis=0) + 1e-6))
    query = tl.div_rn(query, tl.zeros_like(query) + tl.sqrt(states.to(tl.float32)))
    key = tl.div_rn(key, tl.zeros_like(key) + tl.sqrt(tl.sum(key * key, axis=0) + 1e-6))
    value = tl.load(v + (request * heads + head) * dims + row, mask=rows, other=0.0)
    rate = _softplus(tl.load(gate + request * heads + head) + tl.load(dt_bias + head))
    held = held * tl.exp(-tl.exp(tl.load(a + head)) * rate)
    strength = tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(beta + request * heads + head)))
    change = strength * (value - tl.sum(held * key[None, :], axis=1))
    held += change[:, None] * key[None, :]
    tl.store(state + at, to_stored(held, FORMAT), mask=inside)
    result = tl.sum(held * query[None, :], axis=1)
    tl.store(outputs + (request * heads + head) * dims + row, result, mask=rows)
