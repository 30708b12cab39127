"""Recurrent layers in float64, one token at a time; states come in and go out as values, not in place."""

from __future__ import annotations

import math

import torch
from torch.nn import functional


def conv_step(
    kept: torch.Tensor, inputs: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (outputs, taps kept next) of a causal depthwise convolution with SiLU.

    ``kept`` are (requests, channels, taps), the oldest first, ``inputs`` (requests, channels), ``weights`` (channels,
    taps + 1).
    """
    window = torch.cat([kept, inputs[..., None]], dim=-1)
    summed = (window * weights).sum(-1) + bias
    return summed * torch.sigmoid(summed), window[..., 1:]


def mamba2_step(
    state: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dt: torch.Tensor, a: torch.Tensor,
    d: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (outputs, next state) of one token; ``state`` is (requests, heads, dims, states), ``b`` by group."""
    share = x.shape[1] // b.shape[1]  # floor: exact, heads come in groups
    into, out_of = b.repeat_interleave(share, 1), c.repeat_interleave(share, 1)
    step = functional.softplus(dt)
    decay = torch.exp(step * a)[..., None, None]
    state = state * decay + (step[..., None] * x)[..., None] * into[:, :, None, :]
    return torch.einsum("bhds,bhs->bhd", state, out_of) + d[:, None] * x, state


def delta_step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor,
    a: torch.Tensor, dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (outputs, next state) of one token of the gated delta rule; ``state`` is (requests, heads, dims, states).

    The state forgets, then moves its answer to the key towards the value.
    """
    share = v.shape[1] // k.shape[1]  # floor: exact, value heads come in groups
    query, key = _unit(q).repeat_interleave(share, 1), _unit(k).repeat_interleave(share, 1)
    query = torch.divide(query, math.sqrt(q.shape[-1]))
    state = state * torch.exp(-torch.exp(a) * functional.softplus(gate + dt_bias))[..., None, None]
    answer = torch.einsum("bhds,bhs->bhd", state, key)
    change = torch.sigmoid(beta)[..., None] * (v - answer)
    state = state + change[..., None] * key[:, :, None, :]
    return torch.einsum("bhds,bhs->bhd", state, query), state


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors of the last axis at unit length, the length kept from zero by 1e-6 under the root."""
    return torch.divide(vectors, torch.sqrt((vectors * vectors).sum(-1, keepdim=True) + 1e-6))
