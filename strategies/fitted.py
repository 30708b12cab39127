"""``fitted``: a drawn spec with what the models of vLLM and SGLang do not support taken out of it.

Draws of the ``dense`` family name sinks, formats per layer and context parallelism, which these models refuse; nearly
every spec would test a refusal. So each is changed into a neighbour that they lay out, with no more layers.

>>> from kvsan.model.layers import AttentionLayer
>>> spec = CacheSpec(layers=(AttentionLayer(kv_heads=6, head_dim=64),), kv_format="int8")
>>> fitted(spec, ABILITIES["vllm-e1"]).kv_format.value
'fp8'
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..model.arithmetic import round_up
from ..model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ..model.layers import AttentionLayer, HybridLayer, LatentLayer, Layer, RecurrentLayer, paged_part, recurrent_part
from ..model.parallel import ParallelLayout
from ..model.spec import CacheSpec, Draft
from .pools import INDEX_TOKENS, one_shape, two_ends

_replace = msgspec.structs.replace


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a model lays out beyond the rest: V dims unlike K's, windows of latent layers, nvfp4, draft pools apart.

    ``pools``: windowed layers have one window, the layers of a pool one shape, and no quota is split between pools.
    ``unified``: one buffer holds pages and states. ``quotas``: bytes may be given in place of slots.
    ``block_tokens``: blocks are a multiple of so many tokens.
    """

    unequal_dims: bool = False
    latent_windows: bool = False
    block_scales: bool = False
    separate_draft: bool = False
    pools: bool = False
    unified: bool = False
    quotas: bool = True
    block_tokens: int = 1


_EARLY: Final = Abilities(block_tokens=16)
_ERA_3: Final = Abilities(unequal_dims=True, latent_windows=True, block_scales=True)
_KERNEL_BLOCKS: Final = Abilities(unequal_dims=True, latent_windows=True, block_tokens=32)
_SGLANG: Final = Abilities(unequal_dims=True, block_scales=True, separate_draft=True, pools=True)
_UNIFIED: Final = _replace(_SGLANG, block_scales=False, unified=True, quotas=False)
ABILITIES: Final = {
    "vllm-e1": _EARLY,
    "vllm-e2": _EARLY,
    "vllm-e2-packed": _EARLY,
    "vllm-e3": _ERA_3,
    "vllm-e3-block-outermost": _ERA_3,
    "sglang": _SGLANG,
    "sglang-envelope": _SGLANG,
    "sglang-speculative": _SGLANG,
    "sglang-unified": _UNIFIED,
    "sglang-engine": _SGLANG,
    "sglang-engine-envelope": _SGLANG,
    "sglang-engine-speculative": _SGLANG,
    "sglang-engine-unified": _UNIFIED,
    "vllm": _ERA_3,
    "vllm-block-outermost": _ERA_3,
    "vllm-lhbnc": _ERA_3,
    "vllm-bhlnc": _ERA_3,
    "vllm-kernel-blocks": _KERNEL_BLOCKS,
}
"""The allocators whose specs are fitted, by name."""


def fitted(spec: CacheSpec, can: Abilities) -> CacheSpec:
    """Return ``spec``, or a neighbour of it that an allocator with the abilities ``can`` supports."""
    layers = tuple(_fitted_layer(layer, spec, can) for layer in spec.layers)
    draft = tuple(_fitted_layer(layer, spec, can) for layer in spec.draft.layers)
    if can.unified:
        layers, draft = two_ends(layers), ()
    if can.pools:
        layers, draft = _one_window(layers, draft), _one_window(draft, layers)
        layers, draft = one_shape(_one_state(layers)), one_shape(draft)
    parallel = _fitted_parallel(spec.parallel, layers + draft, can)
    indexed = can.pools and any(part is not None and part.side_planes for part in map(paged_part, layers + draft))
    changed = _replace(
        spec,
        layers=layers,
        draft=Draft(mode="separate" if can.separate_draft else "folded", layers=draft) if draft else Draft(),
        kv_format=_fitted_format(spec.kv_format, layers + draft, can),
        parallel=parallel,
        tokens_per_block=INDEX_TOKENS if indexed else round_up(spec.tokens_per_block, can.block_tokens),
        rank=spec.rank % parallel.world_size,
    )
    several = spec.has_recurrent or any(map(_window_of, layers + draft))
    if spec.slots is None and (not can.quotas or (can.pools and several)):
        return _replace(changed, slots=4, quota_bytes=None)
    return changed


def _fitted_layer(layer: Layer, spec: CacheSpec, can: Abilities) -> Layer:
    if isinstance(layer, HybridLayer):
        recurrent = _replace(layer.recurrent, auxiliary=())
        return _replace(layer, attention=_attention(layer.attention, can), recurrent=recurrent)
    if isinstance(layer, RecurrentLayer):
        return _replace(layer, auxiliary=())
    if isinstance(layer, AttentionLayer):
        return _attention(layer, can)
    if isinstance(layer, LatentLayer):
        planes = () if spec.has_recurrent else tuple(plane for plane in layer.side_planes if plane.scope == "layer")
        window = layer.window if can.latent_windows else None
        return _replace(layer, window=window, sink_tokens=0, kv_format=None, tokens_per_block=None, side_planes=planes)
    return layer


def _attention(layer: AttentionLayer, can: Abilities) -> AttentionLayer:
    value_dim = layer.value_dim if can.unequal_dims else layer.head_dim
    return _replace(layer, value_dim=value_dim, sink_tokens=0, kv_format=None, tokens_per_block=None, side_planes=())


def _window_of(layer: Layer) -> int | None:
    paged = paged_part(layer)
    return None if paged is None else paged.window


def _one_window(layers: tuple[Layer, ...], others: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return ``layers`` with the smallest window of all in place of each window."""
    windows = [window for window in map(_window_of, layers + others) if window is not None]
    if len(set(windows)) < 2:
        return layers
    return tuple(_with_window(layer, min(windows)) if _window_of(layer) else layer for layer in layers)


def _with_window(layer: Layer, window: int) -> Layer:
    if isinstance(layer, HybridLayer):
        return _replace(layer, attention=_replace(layer.attention, window=window))
    return _replace(layer, window=window)


def _one_state(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return ``layers`` with the first recurrent layer's shape in place of each."""
    first = next((part for part in map(recurrent_part, layers) if part is not None), None)
    if first is None:
        return layers
    changed: list[Layer] = []
    for layer in layers:
        if isinstance(layer, HybridLayer):
            changed.append(_replace(layer, recurrent=first))
        else:
            changed.append(first if isinstance(layer, RecurrentLayer) else layer)
    return tuple(changed)


def _fitted_format(kv_format: ElementFormat, layers: tuple[Layer, ...], can: Abilities) -> ElementFormat:
    paged = [part for part in map(paged_part, layers) if part is not None]
    blocks = all(
        isinstance(part, AttentionLayer)
        and part.value_dim == part.head_dim
        and part.head_dim % SCALE_BLOCK_ELEMENTS == 0
        for part in paged
    )
    if kv_format is ElementFormat.INT8 or (kv_format.block_scaled and not (can.block_scales and blocks)):
        return ElementFormat.FP8
    return kv_format


def _fitted_parallel(parallel: ParallelLayout, layers: tuple[Layer, ...], can: Abilities) -> ParallelLayout:
    """Return ``parallel`` without context parallelism, with the largest degree of TP over which all heads divide; all
    stages of a pipeline have both ends of a unified buffer where there is one stage."""
    tp = parallel.tp
    if not parallel.attention_dp:
        while tp > 1 and not all(_divides(layer, tp, can) for layer in dict.fromkeys(layers)):
            tp -= 1
    changed = _replace(parallel, tp=tp, cp=1, ep=parallel.ep if tp == parallel.tp else 1)
    return _replace(changed, pp=1, pp_partition=None) if can.unified else changed


def _divides(layer: Layer, tp: int, can: Abilities) -> bool:
    paged, recurrent = paged_part(layer), recurrent_part(layer)
    if isinstance(paged, AttentionLayer) and max(paged.kv_heads, tp) % min(paged.kv_heads, tp):
        return False
    if recurrent is None:
        return True
    groups = recurrent.groups
    if can.pools and recurrent.algorithm in ("gdn", "kda") and groups % tp:
        return False
    if recurrent.algorithm == "mamba2" and groups % tp:
        if groups > tp:
            return False
        groups = tp
    inner = recurrent.heads * recurrent.head_dim + 2 * groups * recurrent.state_dim
    return recurrent.heads % tp == 0 and inner % tp == 0
