"""What a spec says of one role of one layer: its format, and the shape of a recurrent state."""

from __future__ import annotations

from ...model.errors import SpecError
from ...model.formats import ElementFormat
from ...model.layers import AttentionLayer, LatentLayer, Layer, RecurrentLayer
from ...model.spec import CacheSpec
from ...sim.layout import SSM_STATE


def layer_of(spec: CacheSpec, number: int) -> Layer:
    """Return a layer by its number; those of the draft come behind the target's."""
    return (*spec.layers, *spec.draft.layers)[number]


def recurrent(spec: CacheSpec, number: int) -> RecurrentLayer:
    """Return a recurrent layer by its number; raise ``SpecError`` where that is none."""
    layer = layer_of(spec, number)
    if not isinstance(layer, RecurrentLayer):
        raise SpecError("layers", f"layer {number} has no recurrent state")
    return layer


def format_of(spec: CacheSpec, number: int, role: str) -> ElementFormat:
    """Return the format in which layer ``number`` stores ``role``."""
    layer = layer_of(spec, number)
    if isinstance(layer, RecurrentLayer):
        if role == SSM_STATE:
            return layer.ssm_format or spec.state_format
        return layer.conv_format or spec.conv_format
    if not isinstance(layer, AttentionLayer | LatentLayer):
        raise SpecError("layers", f"layer {number} is {type(layer).__name__}, which the testbed's model has not")
    for plane in layer.side_planes:
        if plane.role == role:
            return plane.format
    return layer.kv_format or spec.kv_format


def state_shape(spec: CacheSpec, number: int, role: str) -> tuple[int, ...]:
    """Return the shape of a recurrent state before sharding: (heads, dim, states), or (channels, taps)."""
    layer = recurrent(spec, number)
    if role == SSM_STATE:
        return layer.heads, layer.head_dim, layer.state_dim
    return layer.conv_channels, layer.conv_kernel - 1
