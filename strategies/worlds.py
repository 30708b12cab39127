"""Worlds: the specs that traces are drawn on, small enough for a thousand operations a trace.

A world is a tuple of layers with tiny heads and dims (where a token's bytes lie matters, how many there are does not),
with a number of tokens per block and a number of slots. Windows end inside blocks and at their ends, life cycles merge
into one group or stay apart, states lie beside pages or alone, drafts have a manager of their own.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from ..model.errors import SpecError
from ..model.formats import ElementFormat
from ..model.layers import INDEX_KEY, AttentionLayer, LatentLayer, Layer, RecurrentLayer, SidePlane
from ..model.spec import CacheSpec, Draft
from ..sim.cache.cache import RunningCache
from ..sim.cache.managers import running_cache
from ..sim.cache.names import layout_allocator
from ..sim.rejection import Rejected

TOKENS_PER_BLOCK: Final = (1, 2, 3, 4)
SLOTS: Final = (4, 8, 2, 6, 12, 3, 16, 1)

_FULL: Final = AttentionLayer(kv_heads=1, head_dim=8)
_WIDE: Final = AttentionLayer(kv_heads=2, head_dim=8)
_WINDOW: Final = AttentionLayer(kv_heads=1, head_dim=8, window=3)
_SINKS: Final = AttentionLayer(kv_heads=1, head_dim=8, window=4, sink_tokens=2)
_LATENT: Final = LatentLayer(latent_dim=8)
_LATENT_WINDOW: Final = LatentLayer(latent_dim=8, window=2)
_SCALED: Final = AttentionLayer(kv_heads=1, head_dim=16, kv_format=ElementFormat.NVFP4)
_BLOCKS: Final = AttentionLayer(kv_heads=1, head_dim=16)
_SPARSE: Final = AttentionLayer(
    kv_heads=1, head_dim=8, side_planes=(SidePlane(role=INDEX_KEY, dim=8, format=ElementFormat.BF16),)
)
_CONVOLUTION: Final = RecurrentLayer(algorithm="short_conv", heads=4, conv_kernel=4)
_STATE: Final = RecurrentLayer(algorithm="mamba1", heads=2, state_dim=2, conv_kernel=3)

LAYERS: Final[tuple[tuple[Layer, ...], ...]] = (
    (_LATENT,),
    (_FULL,),
    (_CONVOLUTION,),
    (_LATENT_WINDOW,),
    (_FULL, _FULL),
    (_FULL, _WINDOW),
    (_WIDE, _WINDOW),
    (_LATENT, _LATENT_WINDOW),
    (_FULL, _SINKS),
    (_FULL, _CONVOLUTION),
    (_LATENT, _CONVOLUTION),
    (_FULL, _STATE, _WINDOW),
    (_SCALED,),
    (_SPARSE, _SPARSE),
)
"""The layers of the worlds, simplest first."""
DRAFTS: Final = (Draft(), Draft(mode="separate", layers=(_BLOCKS,)))


class World(msgspec.Struct, frozen=True):
    """A spec of one token per block and one slot; ``crowd`` is the most life cycles that draw slots from one group."""

    spec: CacheSpec
    crowd: int


def small_specs() -> Iterator[CacheSpec]:
    """Yield the specs that an allocator may support, simplest layers first."""
    for layers, kv_format in (*((layers, ElementFormat.BF16) for layers in LAYERS), ((_BLOCKS,), ElementFormat.NVFP4)):
        for draft in DRAFTS:
            yield CacheSpec(layers=layers, kv_format=kv_format, tokens_per_block=1, slots=1, draft=draft)


def _crowd(cache: RunningCache) -> int:
    """Return the most life cycles of one group; an engine's manager says it itself."""
    told = getattr(cache, "crowd", None)
    if told is not None:
        return int(told)
    return max(Counter(cycle.group for cycle in cache.geometry.cycles).values())


@functools.cache
def worlds_for(allocator: str) -> tuple[World, ...]:
    """Return the worlds that an allocator supports, with one token per block and one slot each.

    Raises ``SpecError`` where there is none.
    """
    found: list[World] = []
    reason = ""
    for spec in small_specs():
        try:
            cache = running_cache(spec, allocator)
        except Rejected as refusal:
            if refusal.supported:
                found.append(World(spec, 1))  # its refusal is the finding
            reason = reason or refusal.message
            continue
        found.append(World(spec, _crowd(cache)))
    if not found:
        name = layout_allocator(allocator)
        raise SpecError("allocator", f"{name} supports none of the small specs that traces are drawn on: {reason}")
    return tuple(found)
