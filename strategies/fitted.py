"""``fitted``: a drawn spec with what the models of vLLM do not support taken out of it.

Draws of the ``dense`` family name sinks, formats per layer and context parallelism, which these models refuse; nearly
every spec would test a refusal. So each is changed into a neighbour that they lay out: simpler, never larger.

>>> from ..model.spec import CacheSpec
>>> from ..model.layers import AttentionLayer
>>> fitted(CacheSpec(layers=(AttentionLayer(kv_heads=6, head_dim=64),), kv_format="int8"), era=1).kv_format.value
'fp8'
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ..model.layers import AttentionLayer, HybridLayer, LatentLayer, Layer, RecurrentLayer, paged_part, recurrent_part
from ..model.parallel import ParallelLayout
from ..model.spec import CacheSpec, Draft

_replace = msgspec.structs.replace
_ERAS: Final = {"vllm-e1": 1, "vllm-e2": 2, "vllm-e2-packed": 2, "vllm-e3": 3, "vllm-e3-block-outermost": 3}


def era_of(allocator: str) -> int | None:
    """Return the era of a vLLM allocator, None for others."""
    return _ERAS.get(allocator)


def fitted(spec: CacheSpec, era: int) -> CacheSpec:
    """Return ``spec``, or a neighbour of it that era ``era`` of vLLM supports as far as its layers say."""
    layers = tuple(_fitted_layer(layer, spec, era) for layer in spec.layers)
    draft = spec.draft
    if draft.layers:
        draft = Draft(mode="folded", layers=tuple(_fitted_layer(layer, spec, era) for layer in draft.layers))
    everything = layers + draft.layers
    parallel = _fitted_parallel(spec.parallel, everything)
    return _replace(
        spec,
        layers=layers,
        draft=draft,
        kv_format=_fitted_format(spec.kv_format, everything, era),
        parallel=parallel,
        rank=spec.rank % parallel.world_size,
    )


def _fitted_layer(layer: Layer, spec: CacheSpec, era: int) -> Layer:
    if isinstance(layer, HybridLayer):
        return _replace(
            layer, attention=_attention(layer.attention, era), recurrent=_replace(layer.recurrent, auxiliary=())
        )
    if isinstance(layer, RecurrentLayer):
        return _replace(layer, auxiliary=())
    if isinstance(layer, AttentionLayer):
        return _attention(layer, era)
    if isinstance(layer, LatentLayer):
        planes = () if spec.has_recurrent else tuple(plane for plane in layer.side_planes if plane.scope == "layer")
        window = layer.window if era > 2 else None
        return _replace(layer, window=window, sink_tokens=0, kv_format=None, tokens_per_block=None, side_planes=planes)
    return layer


def _attention(layer: AttentionLayer, era: int) -> AttentionLayer:
    value_dim = layer.value_dim if era > 2 else layer.head_dim
    return _replace(layer, value_dim=value_dim, sink_tokens=0, kv_format=None, tokens_per_block=None, side_planes=())


def _fitted_format(kv_format: ElementFormat, layers: tuple[Layer, ...], era: int) -> ElementFormat:
    if kv_format is ElementFormat.INT8:
        return ElementFormat.FP8
    paged = [part for part in map(paged_part, layers) if part is not None]
    blocks = all(
        isinstance(part, AttentionLayer)
        and part.value_dim == part.head_dim
        and part.head_dim % SCALE_BLOCK_ELEMENTS == 0
        for part in paged
    )
    if kv_format.block_scaled and (era < 3 or not blocks):
        return ElementFormat.FP8
    return kv_format


def _fitted_parallel(parallel: ParallelLayout, layers: tuple[Layer, ...]) -> ParallelLayout:
    """Return ``parallel`` without context parallelism, with the largest degree of TP over which all heads divide."""
    tp = parallel.tp
    if not parallel.attention_dp:
        while tp > 1 and not all(_divides(layer, tp) for layer in dict.fromkeys(layers)):
            tp -= 1
    ep = parallel.ep if tp == parallel.tp else 1
    return _replace(parallel, tp=tp, cp=1, ep=ep)


def _divides(layer: Layer, tp: int) -> bool:
    paged, recurrent = paged_part(layer), recurrent_part(layer)
    if isinstance(paged, AttentionLayer) and max(paged.kv_heads, tp) % min(paged.kv_heads, tp):
        return False
    if recurrent is None:
        return True
    groups = recurrent.groups
    if recurrent.algorithm == "mamba2" and groups % tp:
        if groups > tp:
            return False
        groups = tp
    inner = recurrent.heads * recurrent.head_dim + 2 * groups * recurrent.state_dim
    return recurrent.heads % tp == 0 and inner % tp == 0
