"""Moves that change which layers there are, their kinds, and how ranks share them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from ...model.errors import SpecError
from ...model.layers import AttentionLayer, HybridLayer, LatentLayer, Layer, RecurrentLayer, UncachedLayer
from ...model.parallel import ParallelLayout
from ...model.rank import stage_layers
from ...model.spec import CacheSpec, Draft
from .fields import MAX_SINGLE_LAYERS, Move, change_layers, layers_in, scopes
from .values import counts_near, distinct_layers

_SWAPPED_LAYERS = 8


def drop_moves(spec: CacheSpec, first: int, end: int) -> Iterator[Move]:
    """Yield moves that drop the layers from ``first`` up to ``end`` (target layers, then draft layers).

    With pipeline stages there are two ways: the stages are split anew, or every other layer stays on its stage.
    """
    count = len(spec.layers)
    keep = spec.layers[:first] + spec.layers[end:]
    draft = spec.draft.layers[: max(0, first - count)] + spec.draft.layers[max(0, end - count) :]
    changes: dict[str, Any] = {"layers": keep}
    if len(draft) < len(spec.draft.layers):
        changes["draft"] = msgspec.structs.replace(spec.draft, layers=draft) if draft else Draft()
    if spec.parallel.pp_partition is None:
        yield partial(msgspec.structs.replace, spec, **changes)
    if spec.parallel.pp > 1:
        kept = [_outside(stage, first, end) for stage in stage_layers(spec)]
        yield partial(_with_stages, spec, changes, kept)


def _outside(stage: range, first: int, end: int) -> int:
    """Return how many layers of a stage lie outside of ``first`` to ``end``."""
    inside = max(0, min(stage.stop, end) - max(stage.start, first))
    return len(stage) - inside


def _with_stages(spec: CacheSpec, changes: dict[str, Any], kept: list[int]) -> CacheSpec:
    """Return ``spec`` changed, with ``kept`` layers on each stage; empty stages go, unless the rank stands on one."""
    at = spec.parallel.coordinates(spec.rank)
    if kept[at.pp_rank] == 0:
        raise SpecError("rank", "stands on a stage without layers")
    partition = tuple([count for count in kept if count])
    pp_rank = sum(1 for count in kept[: at.pp_rank] if count)
    parallel = msgspec.structs.replace(
        spec.parallel, pp=len(partition), pp_partition=partition if len(partition) > 1 else None
    )
    rank = (pp_rank * parallel.cp + at.cp_rank) * parallel.tp + at.tp_rank
    return msgspec.structs.replace(spec, parallel=parallel, rank=rank, **changes)


def structure_moves(spec: CacheSpec) -> Iterator[Move]:
    """Yield all other moves of structure: draft mode, kinds, merged classes, order, parallel layout."""
    yield from _draft_moves(spec)
    yield from parallel_moves(spec)
    layers = distinct_layers(spec)
    for layer in layers[:MAX_SINGLE_LAYERS]:
        if len(layers) > 1:
            yield partial(change_layers, spec, partial(_same, layer=layer))
        for other in layers[:MAX_SINGLE_LAYERS]:
            if other is not layer:
                yield partial(change_layers, spec, partial(_same, layer=layer), other)
    for scope in scopes(spec):
        for layer in layers_in(spec, scope)[:MAX_SINGLE_LAYERS]:
            for simpler in _simpler_kinds(layer):
                if simpler != layer:
                    yield partial(change_layers, spec, partial(_same, layer=simpler), layer if scope is None else scope)
    for index in range(min(len(spec.layers), _SWAPPED_LAYERS) - 1):
        if spec.layers[index] != spec.layers[index + 1]:
            swapped = list(spec.layers)
            swapped[index], swapped[index + 1] = swapped[index + 1], swapped[index]
            yield partial(msgspec.structs.replace, spec, layers=tuple(swapped))


def _same(_: Layer, layer: Layer) -> Layer:
    return layer


def _simpler_kinds(layer: Layer) -> Iterator[Layer]:
    """Yield layers of other kinds, and the plainest of each kind."""
    yield UncachedLayer()
    yield LatentLayer(latent_dim=128)
    yield RecurrentLayer(algorithm="short_conv", heads=1, conv_kernel=2)
    yield AttentionLayer(kv_heads=1, head_dim=128)
    if isinstance(layer, HybridLayer):
        yield layer.attention
        yield layer.recurrent
    elif isinstance(layer, AttentionLayer):
        yield msgspec.structs.replace(layer, side_planes=())
    elif isinstance(layer, LatentLayer):
        yield AttentionLayer(kv_heads=1, head_dim=layer.row_dim, side_planes=layer.side_planes)
        yield msgspec.structs.replace(layer, side_planes=())


def _draft_moves(spec: CacheSpec) -> Iterator[Move]:
    if spec.draft.mode == "none":
        return
    yield partial(msgspec.structs.replace, spec, draft=Draft())
    yield partial(msgspec.structs.replace, spec, layers=spec.layers + spec.draft.layers, draft=Draft())
    yield partial(msgspec.structs.replace, spec, layers=spec.draft.layers, draft=Draft())
    if spec.draft.mode == "separate":
        yield partial(msgspec.structs.replace, spec, draft=Draft(mode="folded", layers=spec.draft.layers))


def parallel_moves(spec: CacheSpec) -> Iterator[Move]:
    """Yield moves of the parallel layout and the rank; a rank keeps its coordinates as far as they still exist."""
    parallel = spec.parallel
    if parallel.world_size == 1 and parallel == ParallelLayout():
        return
    yield partial(msgspec.structs.replace, spec, parallel=ParallelLayout(), rank=0)
    for axis in ("tp", "cp", "pp"):
        for value in counts_near(getattr(parallel, axis), 1):
            yield partial(_with_parallel, spec, {axis: value})
    for ep in counts_near(parallel.ep, 1):
        yield partial(_with_parallel, spec, {"ep": ep})
    if parallel.attention_dp:
        yield partial(_with_parallel, spec, {"attention_dp": False})
    if parallel.pp_partition is not None:
        yield partial(_with_parallel, spec, {"pp_partition": None})
    at = parallel.coordinates(spec.rank)
    for field in ("tp_rank", "cp_rank"):
        for value in counts_near(getattr(at, field), 0):
            yield partial(_with_parallel, spec, {}, {field: value})
    for pp_rank in counts_near(at.pp_rank, 0):
        yield partial(_with_parallel, spec, {}, {"pp_rank": pp_rank})
    if spec.rank:
        yield partial(msgspec.structs.replace, spec, rank=0)
    if parallel.pp > 1:
        yield from _stage_moves(spec, at.pp_rank)


def _with_parallel(spec: CacheSpec, changes: dict[str, Any], place: dict[str, int] | None = None) -> CacheSpec:
    """Return ``spec`` with parts of its parallel layout changed, and its rank at the nearest place that is left."""
    old, at = spec.parallel, spec.parallel.coordinates(spec.rank)
    fields = {"tp": old.tp, "pp": old.pp, "ep": old.ep, "cp": old.cp, **changes}
    if fields["tp"] % fields["ep"]:
        fields["ep"] = 1
    partition = changes.get("pp_partition", old.pp_partition if fields["pp"] == old.pp else None)
    attention_dp = changes.get("attention_dp", old.attention_dp)
    parallel = ParallelLayout(
        tp=fields["tp"],
        pp=fields["pp"],
        ep=fields["ep"],
        cp=fields["cp"],
        attention_dp=attention_dp,
        pp_partition=partition,
    )
    where = {"tp_rank": at.tp_rank, "cp_rank": at.cp_rank, "pp_rank": at.pp_rank, **(place or {})}
    tp_rank, cp_rank = min(where["tp_rank"], parallel.tp - 1), min(where["cp_rank"], parallel.cp - 1)
    pp_rank = min(where["pp_rank"], parallel.pp - 1)
    rank = (pp_rank * parallel.cp + cp_rank) * parallel.tp + tp_rank
    return msgspec.structs.replace(spec, parallel=parallel, rank=rank)


def _stage_moves(spec: CacheSpec, mine: int) -> Iterator[Move]:
    """Yield moves that keep this rank's stage whole: alone, or with all before or behind it as one other stage."""
    stages = stage_layers(spec)
    own, last = stages[mine], mine == len(stages) - 1
    layers = spec.layers[own.start : own.stop]
    alone: dict[str, Any] = {"layers": layers}
    if not last:
        alone["draft"] = Draft()
    yield partial(_on_stages, spec, alone, (len(layers),), 0)
    if mine:
        before = {"layers": spec.layers[: own.stop], **({} if last else {"draft": Draft()})}
        yield partial(_on_stages, spec, before, (own.start, len(own)), 1)
        yield partial(_on_stages, spec, {}, (own.start, len(spec.layers) - own.start), 1)
    if not last:
        yield partial(_on_stages, spec, {}, (own.stop, len(spec.layers) - own.stop), 0)


def _on_stages(spec: CacheSpec, changes: dict[str, Any], sizes: tuple[int, ...], pp_rank: int) -> CacheSpec:
    at = spec.parallel.coordinates(spec.rank)
    parallel = msgspec.structs.replace(spec.parallel, pp=len(sizes), pp_partition=sizes if len(sizes) > 1 else None)
    rank = (pp_rank * parallel.cp + at.cp_rank) * parallel.tp + at.tp_rank
    return msgspec.structs.replace(spec, parallel=parallel, rank=rank, **changes)
