"""``fitted`` for pools that serve many layers: one shape of rows and of states, and both kinds for a unified buffer."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from ..model.arithmetic import round_up
from ..model.formats import ElementFormat
from ..model.layers import (
    INDEX_KEY,
    AttentionLayer,
    HybridLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    SidePlane,
    paged_part,
    recurrent_part,
)

_replace = msgspec.structs.replace
Paged: TypeAlias = AttentionLayer | LatentLayer

INDEX_PLANE: Final = SidePlane(role=INDEX_KEY, dim=132, format=ElementFormat.UINT8)
"""The index keys that a pool of sparse latent layers has, in pages of ``INDEX_TOKENS`` tokens."""
INDEX_TOKENS: Final = 64

_STATE: Final = RecurrentLayer(algorithm="mamba2", heads=8, head_dim=4, state_dim=4, groups=1)
_PAGES: Final = AttentionLayer(kv_heads=8, head_dim=16)
_ROW_ELEMENTS: Final = 16


def one_shape(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return ``layers`` with the rows of the first full layer in every full one, and likewise those with a window.

    Only attention is half of a layer, so where one is, it speaks for all. Latent layers keep or lack index keys.
    """
    shapes: dict[bool, Paged] = {}
    for windowed in (False, True):
        parts = [(layer, part) for layer in layers if (part := paged_part(layer)) is not None]
        parts = [(layer, part) for layer, part in parts if (part.window is not None) == windowed]
        parts.sort(key=lambda pair: not isinstance(pair[0], HybridLayer))
        if parts:
            shapes[windowed] = parts[0][1]
    return tuple([_shaped(layer, shapes) for layer in layers])


def _shaped(layer: Layer, shapes: dict[bool, Paged]) -> Layer:
    part = paged_part(layer)
    if part is None:
        return layer
    shape = shapes[part.window is not None]
    if isinstance(layer, HybridLayer):
        return _replace(layer, attention=shape)
    if isinstance(shape, LatentLayer):
        planes = (INDEX_PLANE,) if isinstance(part, LatentLayer) and part.side_planes else ()
        return _replace(shape, side_planes=planes)
    return shape


def two_ends(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return ``layers`` with pages and states among them, rows of whole vectors, and neither windows nor index keys."""
    changed = [_plain_rows(layer) for layer in layers]
    if not any(map(paged_part, changed)):
        changed[0] = HybridLayer(attention=_PAGES, recurrent=recurrent_part(changed[0]) or _STATE)
    if not any(map(recurrent_part, changed)):
        last = changed[-1]
        if len(changed) > 1:
            changed[-1] = _STATE
            changed[0] = changed[0] if paged_part(changed[0]) else _PAGES
        else:
            changed[-1] = HybridLayer(attention=last if isinstance(last, AttentionLayer) else _PAGES, recurrent=_STATE)
    return one_shape(tuple(changed))


def _plain_rows(layer: Layer) -> Layer:
    if isinstance(layer, HybridLayer):
        return _replace(layer, attention=_plain_rows(layer.attention), recurrent=_plain_rows(layer.recurrent))
    if isinstance(layer, RecurrentLayer):
        return _STATE if layer.algorithm == "short_conv" else layer
    if isinstance(layer, AttentionLayer):
        dims = [round_up(dim, _ROW_ELEMENTS) for dim in (layer.head_dim, layer.value_dim)]
        return _replace(layer, window=None, head_dim=dims[0], value_dim=dims[1])
    if isinstance(layer, LatentLayer):
        latent = round_up(layer.latent_dim, _ROW_ELEMENTS)
        return _replace(layer, window=None, latent_dim=latent, rope_dim=_ROW_ELEMENTS, side_planes=())
    return layer
