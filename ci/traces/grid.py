"""The grid of simple specs and operations that traces are reduced to, and minima are enumerated over.

Layers: one latent layer (dim 128) with full attention, in bf16 or nvfp4, or with a window of 1 to 3 tokens; one
attention layer (1 head of 128); one short convolution over 2 or 4 tokens; a latent layer beside another, beside one
with a window of 1 or 2 tokens, or beside a short convolution over 4 tokens. Each with 1, 2 or 3 tokens per block and 1
to 4 slots.

Operations: requests 0 and 1 (and both in a step), 1 to 3 tokens, texts 0, 1 and 8, all waiting tokens of a request or
1, with or without a padding row, 2 beams with any parents, one page.

The narrow grid, for longer traces: one latent layer (no window, or one of 2 tokens, or nvfp4) or one short convolution,
with 1 to 3 slots, or a latent layer beside one with a window of 1 token; requests 0 and 1 one at a time, 1 or 2 tokens,
texts 0 and 8, all waiting tokens in a step, no padding, forks without changes of parents.
"""

from __future__ import annotations

import functools
import itertools
from typing import Final

from ...model.formats import ElementFormat
from ...model.layers import AttentionLayer, LatentLayer, Layer, RecurrentLayer
from ...model.spec import CacheSpec
from ...sim.cache.trace import Operation
from ..simplicity import simplicity_key
from .simplicity import operation_key

_LATENT: Final = LatentLayer(latent_dim=128)
_WINDOWS: Final = tuple([LatentLayer(latent_dim=128, window=tokens) for tokens in (1, 2, 3)])
_SHORT: Final = tuple([RecurrentLayer(algorithm="short_conv", heads=1, conv_kernel=taps) for taps in (2, 4)])
_BF16: Final = ElementFormat.BF16
_SCALED: Final = ElementFormat.NVFP4

LAYERS: Final[tuple[tuple[tuple[Layer, ...], ElementFormat], ...]] = (
    ((_LATENT,), _BF16),
    *(((layer,), _BF16) for layer in _WINDOWS),
    *(((layer,), _BF16) for layer in _SHORT),
    ((AttentionLayer(kv_heads=1, head_dim=128),), _BF16),
    ((_LATENT,), _SCALED),
    ((_LATENT, _LATENT), _BF16),
    ((_LATENT, _WINDOWS[0]), _BF16),
    ((_LATENT, _WINDOWS[1]), _BF16),
    ((_LATENT, _SHORT[1]), _BF16),
)
"""Layers, and the format of the K/V cache."""
TOKENS_PER_BLOCK: Final = (1, 2, 3)
SLOTS: Final = (1, 2, 3, 4)
REQUESTS: Final = (0, 1)
TOKENS: Final = (1, 2, 3)
TEXTS: Final = (0, 1, 8)


@functools.cache
def grid_specs() -> tuple[CacheSpec, ...]:
    """Return the specs of the grid, simplest first."""
    specs = [
        CacheSpec(layers=layers, kv_format=kv_format, tokens_per_block=tokens, slots=slots)
        for (layers, kv_format), tokens, slots in itertools.product(LAYERS, TOKENS_PER_BLOCK, SLOTS)
    ]
    return tuple(sorted(specs, key=simplicity_key))


@functools.cache
def grid_operations() -> tuple[Operation, ...]:
    """Return the operations of the grid, simplest first."""
    found = [Operation("complete"), Operation("offload", 0), Operation("onload", 0)]
    for request in REQUESTS:
        found += [Operation("admit", request, tokens, text) for tokens in TOKENS for text in TEXTS]
        found += [Operation("extend", request, tokens) for tokens in TOKENS]
        found += [Operation("rewind", request, tokens) for tokens in TOKENS]
        found += [Operation(kind, request) for kind in ("commit", "free", "suspend", "resume")]
        found += [Operation("fork", request, 2), *(Operation("reorder", request, parents) for parents in (0, 1, 4, 5))]
    found += [Operation("step", mask, chunk, padding) for mask in (1, 2, 3) for chunk in (0, 1) for padding in (0, 1)]
    return tuple(sorted(found, key=operation_key))


@functools.cache
def narrow_specs() -> tuple[CacheSpec, ...]:
    """Return the specs of the narrow grid, simplest first."""
    layers = ((_LATENT,), (_WINDOWS[1],), (_SHORT[0],), (_SHORT[1],))
    beside = (_LATENT, _WINDOWS[0])
    return tuple(
        [spec for spec in grid_specs() if (spec.layers in layers and spec.slots != SLOTS[-1]) or spec.layers == beside]
    )


@functools.cache
def narrow_operations() -> tuple[Operation, ...]:
    """Return the operations of the narrow grid, simplest first."""
    return tuple([operation for operation in grid_operations() if _is_narrow(operation)])


def _is_narrow(operation: Operation) -> bool:
    if operation.kind == "admit":
        return operation.b <= 2 and operation.c in (0, 8)
    if operation.kind == "step":
        return operation.a in (1, 2) and operation.b == operation.c == 0
    if operation.kind in ("extend", "rewind"):
        return operation.b <= 2
    return operation.kind != "reorder"
