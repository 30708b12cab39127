"""Which layers a rank holds, and the numbers it gives them."""

from __future__ import annotations

import msgspec

from .layers import Layer, UncachedLayer
from .parallel import pipeline_stages
from .spec import CacheSpec


class RankLayer(msgspec.Struct, frozen=True):
    """A cached layer of this rank: its number in the model (draft layers follow the target's) and on the rank."""

    index: int
    local_index: int
    layer: Layer


class ManagerLayers(msgspec.Struct, frozen=True):
    """The layers of one cache manager on this rank, in order. ``name`` is ``target`` or ``draft``."""

    name: str
    layers: tuple[RankLayer, ...]


def stage_layers(spec: CacheSpec) -> tuple[range, ...]:
    """Return the global target layers of every pipeline stage of ``spec``."""
    return pipeline_stages(len(spec.layers), spec.parallel.pp, spec.parallel.pp_partition)


def manager_layers(spec: CacheSpec) -> tuple[ManagerLayers, ...]:
    """Return what each manager of this rank holds: the target's, and the draft's where it has one of its own.

    Cached layers are numbered densely from 0 on each rank and in each manager; layers without a cache take no number.
    Draft
    layers live on the last pipeline stage: appended to the target's when folded, in a manager of their own when
    separate.
    """
    pp_rank = spec.parallel.coordinates(spec.rank).pp_rank
    mine = stage_layers(spec)[pp_rank]
    on_last = pp_rank == spec.parallel.pp - 1
    target = [(index, spec.layers[index]) for index in mine]
    draft = list(enumerate(spec.draft.layers, start=len(spec.layers))) if on_last else []
    if spec.draft.mode == "folded":
        return (ManagerLayers("target", _number(target + draft)),)
    managers = [ManagerLayers("target", _number(target))]
    if draft:
        managers.append(ManagerLayers("draft", _number(draft)))
    return tuple(managers)


def _number(layers: list[tuple[int, Layer]]) -> tuple[RankLayer, ...]:
    cached = [pair for pair in layers if pair[1].__class__ is not UncachedLayer]
    return tuple([RankLayer(index, local, layer) for local, (index, layer) in enumerate(cached)])


def model_layers(spec: CacheSpec, manager: str) -> tuple[Layer, ...]:
    """Return the layers of one manager over the whole model, all ranks together."""
    if manager == "draft":
        return spec.draft.layers
    return spec.layers + spec.draft.layers if spec.draft.mode == "folded" else spec.layers
