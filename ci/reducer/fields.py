"""Moves that change numbers and formats of a spec, leaving its layers in place.

A move is a function without arguments that builds the changed spec, and may raise ``SpecError``. Fields of layers are
changed in all layers at once, because many allocators want one geometry, and in each different layer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import msgspec

from ...model.formats import KV_FORMATS, STATE_FORMATS, ElementFormat
from ...model.layers import (
    INDEX_KEY,
    AttentionLayer,
    AuxiliaryState,
    HybridLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    SidePlane,
    paged_part,
    recurrent_part,
)
from ...model.spec import CacheSpec, Consumer
from ..simplicity import FORMAT_ORDER, format_rank
from .values import (
    counts_near,
    dims_near,
    distinct_layers,
    seen_dims,
    solved_head_dims,
    solved_plane_dims,
)

Move: TypeAlias = Callable[[], CacheSpec]
LayerChange: TypeAlias = Callable[[Layer], Layer]

Scope: TypeAlias = Layer | int | None
"""Which layers a move changes: all of them, those equal to one, or the one at a place."""

MAX_SINGLE_LAYERS = 6
"""Different layers, and layers in all, up to which each is changed alone too."""


def change_layers(spec: CacheSpec, change: LayerChange, only: Scope = None) -> CacheSpec:
    """Return ``spec`` with every layer changed, or only those in the scope ``only``; draft layers too."""
    if isinstance(only, int):
        one = (*spec.layers[:only], change(spec.layers[only]), *spec.layers[only + 1 :])
        return msgspec.structs.replace(spec, layers=one)
    changed = {layer: change(layer) for layer in ([only] if only is not None else distinct_layers(spec))}
    layers = tuple([changed.get(layer, layer) for layer in spec.layers])
    draft = spec.draft
    if draft.layers:
        draft = msgspec.structs.replace(draft, layers=tuple([changed.get(layer, layer) for layer in draft.layers]))
    return msgspec.structs.replace(spec, layers=layers, draft=draft)


def change_paged(layer: Layer, change: Callable[[AttentionLayer | LatentLayer], AttentionLayer | LatentLayer]) -> Layer:
    """Return a layer with its half with K/V pages changed."""
    if isinstance(layer, HybridLayer):
        return msgspec.structs.replace(layer, attention=change(layer.attention))
    return change(layer) if isinstance(layer, AttentionLayer | LatentLayer) else layer


def change_recurrent(layer: Layer, change: Callable[[RecurrentLayer], RecurrentLayer]) -> Layer:
    """Return a layer with its recurrent half changed."""
    if isinstance(layer, HybridLayer):
        return msgspec.structs.replace(layer, recurrent=change(layer.recurrent))
    return change(layer) if isinstance(layer, RecurrentLayer) else layer


def scopes(spec: CacheSpec) -> list[Scope]:
    """Return what a change of layers may be confined to: all of them, then different layers, then single places."""
    layers = distinct_layers(spec)
    found: list[Scope] = [None]
    if 1 < len(layers) <= MAX_SINGLE_LAYERS:
        found += layers
    total = len(spec.layers) + len(spec.draft.layers)
    if total <= MAX_SINGLE_LAYERS and len(layers) < total:
        found += range(len(spec.layers))
    return found


def layers_in(spec: CacheSpec, scope: Scope) -> list[Layer]:
    """Return the different layers in a scope."""
    if scope is None:
        return distinct_layers(spec)
    return [spec.layers[scope]] if isinstance(scope, int) else [scope]


def spec_moves(spec: CacheSpec) -> Iterator[Move]:
    """Yield moves of the spec's own fields; the parallel layout has a module of its own."""
    for field, allowed in (("kv_format", KV_FORMATS), ("state_format", STATE_FORMATS), ("conv_format", STATE_FORMATS)):
        yield from _set(spec, field, sorted(allowed, key=format_rank))
    yield from _set(spec, "tokens_per_block", counts_near(spec.tokens_per_block, 1))
    yield from _set(spec, "model", [""])
    yield from _set(spec, "sparse_algorithm", [None])
    for field in ("max_sequence_tokens", "state_slots"):
        value = getattr(spec, field)
        if value is not None:
            yield from _set(spec, field, [None, *counts_near(value, 1)])
    if spec.quota_bytes is not None:
        for slots in (1, 2, 3, 4):
            yield partial(msgspec.structs.replace, spec, slots=slots, quota_bytes=None)
        yield from _set(spec, "quota_bytes", counts_near(spec.quota_bytes, 1))
    if spec.slots is not None:
        yield from _set(spec, "slots", counts_near(spec.slots, 1))
    yield from _set(spec, "consumer", [Consumer()])
    consumer = spec.consumer
    for field in ("kv_layout", "alignment_bytes", "index_bits", "offset_bits"):
        default = getattr(Consumer(), field)
        values = [default]
        if field == "alignment_bytes":
            values = [1 << shift for shift in range(consumer.alignment_bytes.bit_length() - 1)]
        for value in values:
            if value != getattr(consumer, field):
                changed = msgspec.structs.replace(consumer, **{field: value})
                yield partial(msgspec.structs.replace, spec, consumer=changed)


def _set(spec: CacheSpec, field: str, values: list[Any]) -> Iterator[Move]:
    for value in values:
        if value != getattr(spec, field):
            yield partial(msgspec.structs.replace, spec, **{field: value})


def layer_moves(spec: CacheSpec) -> Iterator[Move]:
    """Yield moves of the layers' fields, in every scope."""
    layers = distinct_layers(spec)
    seen = seen_dims(layers)
    for scope in scopes(spec):
        inside = layers_in(spec, scope)
        paged = [part for part in map(paged_part, inside) if part is not None]
        yield from _paged_moves(spec, scope, list(dict.fromkeys(paged)), seen)
        planes = dict.fromkeys(plane for part in paged for plane in part.side_planes)
        yield from _plane_moves(spec, scope, list(planes), seen)
        recurrent = [part for part in map(recurrent_part, inside) if part is not None]
        yield from _recurrent_moves(spec, scope, list(dict.fromkeys(recurrent)))


def _paged_moves(
    spec: CacheSpec, scope: Scope, parts: list[AttentionLayer | LatentLayer], seen: list[int]
) -> Iterator[Move]:
    values: dict[str, dict[Any, None]] = {}

    def add(field: str, found: list[Any]) -> None:
        values.setdefault(field, {}).update(dict.fromkeys(found))

    layers = distinct_layers(spec)
    for part in parts[:MAX_SINGLE_LAYERS]:
        if isinstance(part, AttentionLayer):
            add("kv_heads", counts_near(part.kv_heads, 1, seen))
            add("head_dim", dims_near(part.head_dim, [*seen, *solved_head_dims(part, layers, spec)]))
            if part.value_dim != part.head_dim:
                add("value_dim", [0, *dims_near(part.value_dim)])
        else:
            add("latent_dim", dims_near(part.latent_dim, seen))
            if part.rope_dim:
                add("rope_dim", counts_near(part.rope_dim, 0))
        if part.window is not None:
            add("window", [None, *counts_near(part.window, 1)])
            add("sink_tokens", counts_near(part.sink_tokens, 0))
        if part.kv_format is not None:
            add("kv_format", [None, *sorted(KV_FORMATS, key=format_rank)])
        if part.tokens_per_block is not None:
            add("tokens_per_block", [None, *counts_near(part.tokens_per_block, 1)])
    for field, found in values.items():
        for value in found:
            yield partial(change_layers, spec, partial(_set_paged, field=field, value=value), scope)


def _set_paged(layer: Layer, field: str, value: Any) -> Layer:
    return change_paged(layer, partial(_with_paged_field, field=field, value=value))


def _with_paged_field(part: AttentionLayer | LatentLayer, field: str, value: Any) -> AttentionLayer | LatentLayer:
    """Return a part with a field set where it has one; a value dim goes with the head dim, sinks with the window."""
    if not hasattr(part, field):
        return part
    changes = {field: value}
    if field == "head_dim" and isinstance(part, AttentionLayer) and part.value_dim == part.head_dim:
        changes["value_dim"] = value
    if field == "window" and value is None:
        changes["sink_tokens"] = 0
    return msgspec.structs.replace(part, **changes)


def _plane_moves(spec: CacheSpec, scope: Scope, planes: list[SidePlane], seen: list[int]) -> Iterator[Move]:
    if not planes:
        return
    layers = distinct_layers(spec)
    roles = list(dict.fromkeys(plane.role for plane in planes))
    yield partial(change_layers, spec, partial(_keep_planes, roles=()), scope)
    for role in roles:
        others = tuple(other for other in roles if other != role)
        yield partial(change_layers, spec, partial(_keep_planes, roles=others), scope)
    yield partial(change_layers, spec, _sort_planes, scope)
    for plane in planes[:MAX_SINGLE_LAYERS]:
        found: list[tuple[str, Any]] = [
            ("dim", dim) for dim in dims_near(plane.dim, [*seen, *solved_plane_dims(plane, layers, spec)])
        ]
        found += [("heads", heads) for heads in counts_near(plane.heads, 1)]
        found += [("format", format) for format in FORMAT_ORDER if not format.block_scaled]
        found += [("scope", "layer"), ("role", INDEX_KEY), ("role", "a")]
        for field, value in found:
            if value != getattr(plane, field):
                yield partial(change_layers, spec, partial(_set_plane, role=plane.role, changes={field: value}), scope)
        for format in FORMAT_ORDER[: format_rank(plane.format)]:
            # the plane keeps its bytes: a narrower format with more elements, or the other way round
            if not format.block_scaled and plane.dim * plane.format.bits % format.bits == 0:
                dim = plane.dim * plane.format.bits // format.bits  # floor: exact, as just asked
                changes = {"format": format, "dim": dim}
                yield partial(change_layers, spec, partial(_set_plane, role=plane.role, changes=changes), scope)


def _keep_planes(layer: Layer, roles: tuple[str, ...]) -> Layer:
    return change_paged(
        layer,
        lambda part: msgspec.structs.replace(
            part, side_planes=tuple([plane for plane in part.side_planes if plane.role in roles])
        ),
    )


def _sort_planes(layer: Layer) -> Layer:
    return change_paged(
        layer,
        lambda part: msgspec.structs.replace(
            part, side_planes=tuple(sorted(part.side_planes, key=msgspec.json.encode))
        ),
    )


def _set_plane(layer: Layer, role: str, changes: dict[str, Any]) -> Layer:
    return change_paged(
        layer,
        lambda part: msgspec.structs.replace(
            part,
            side_planes=tuple(
                [
                    msgspec.structs.replace(plane, **changes) if plane.role == role else plane
                    for plane in part.side_planes
                ]
            ),
        ),
    )


def _recurrent_moves(spec: CacheSpec, scope: Scope, parts: list[RecurrentLayer]) -> Iterator[Move]:
    for part in parts[:MAX_SINGLE_LAYERS]:
        found: list[dict[str, Any]] = [{"algorithm": "short_conv", "groups": 0, "state_dim": 0}]
        if part.state_dim:
            found.append({"algorithm": "mamba1", "groups": 0})
        for field, low in (("heads", 1), ("head_dim", 1), ("groups", 0), ("state_dim", 0), ("conv_kernel", 2)):
            found += [{field: value} for value in counts_near(getattr(part, field), low)]
        for field in ("ssm_format", "conv_format"):
            if getattr(part, field) is not None:
                found += [{field: value} for value in (None, *STATE_FORMATS)]
        found += [{"auxiliary": states} for states in _auxiliary_changes(part.auxiliary)]
        for changes in found:
            if any(getattr(part, field) != value for field, value in changes.items()):
                yield partial(change_layers, spec, partial(_set_recurrent, changes=changes), scope)


def _set_recurrent(layer: Layer, changes: dict[str, Any]) -> Layer:
    return change_recurrent(layer, lambda part: msgspec.structs.replace(part, **changes))


def _auxiliary_changes(states: tuple[AuxiliaryState, ...]) -> Iterator[tuple[AuxiliaryState, ...]]:
    """Yield simpler auxiliary states: without one, of fewer axes, smaller, of another format."""
    for index, state in enumerate(states):
        before, after = states[:index], states[index + 1 :]
        yield (*before, *after)
        if len(state.shape) > 1:
            yield (*before, msgspec.structs.replace(state, shape=state.shape[1:]), *after)
        for axis, length in enumerate(state.shape):
            for value in counts_near(length, 1):
                shape = (*state.shape[:axis], value, *state.shape[axis + 1 :])
                yield (*before, msgspec.structs.replace(state, shape=shape), *after)
        for format in FORMAT_ORDER[: format_rank(state.format)]:
            if format is not ElementFormat.NVFP4:
                yield (*before, msgspec.structs.replace(state, format=format), *after)
