"""What the models of vLLM declare to support: the reasons for which a spec lies outside."""

from __future__ import annotations

from collections.abc import Iterator

from ....model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ....model.layers import AttentionLayer, LatentLayer, RecurrentLayer, paged_part, recurrent_part
from ....model.rank import model_layers
from ....model.spec import CacheSpec
from .layer_specs import conv_channels

Reasons = Iterator[tuple[str, str]]


def reasons(spec: CacheSpec, era: int) -> Reasons:
    """Yield why era ``era`` (1 to 3) does not support ``spec``, as (message, remedy)."""
    if spec.draft.mode == "separate":
        yield "vLLM plans draft layers together with the target's", "use --draft folded"
    if spec.parallel.cp > 1:
        yield "context-parallel pages are not modelled for vLLM", "use --cp 1"
    layers = dict.fromkeys(model_layers(spec, "target"))
    paged = [part for part in map(paged_part, layers) if part is not None]
    states = [part for part in map(recurrent_part, layers) if part is not None]
    yield from _formats(spec, era, paged)
    for layer in paged:
        yield from _pages(layer, spec, era)
    for state in states:
        yield from state_reasons(state, spec)
    if states and any(isinstance(layer, LatentLayer) and layer.side_planes for layer in paged):
        yield "index keys beside recurrent states are not modelled for vLLM", "check the two kinds of layers apart"


def _formats(spec: CacheSpec, era: int, paged: list[AttentionLayer | LatentLayer]) -> Reasons:
    if spec.kv_format is ElementFormat.INT8 and paged:
        yield "vLLM keeps int8 pages with a scale per token and head, which is not modelled", "use fp8"
    if spec.kv_format.block_scaled and paged and era < 3:
        yield "this era of vLLM has no nvfp4 pages", "use --allocator vllm-e3, or fp8"
    if spec.kv_format.block_scaled and any(isinstance(layer, LatentLayer) for layer in paged):
        yield "generic nvfp4 rows of latent layers are not modelled for vLLM", "use fp8"


def _pages(layer: AttentionLayer | LatentLayer, spec: CacheSpec, era: int) -> Reasons:
    if layer.kv_format not in (None, spec.kv_format):
        yield "layers of a KV format of their own are not modelled for vLLM", "drop the layers' kv_format"
    if layer.tokens_per_block not in (None, spec.tokens_per_block):
        yield "vLLM has one configured block size", "drop the layers' tokens_per_block"
    if layer.sink_tokens:
        yield "attention sinks beside a window are not modelled for vLLM", "drop sink_tokens"
    if isinstance(layer, LatentLayer):
        if layer.window is not None and era < 3:
            yield "this era of vLLM has no latent layers with a window", "use --allocator vllm-e3"
        if any(plane.scope == "rank" for plane in layer.side_planes):
            yield "vLLM has no side plane that several layers share", "use a plane per layer"
        return
    if layer.side_planes:
        yield "vLLM keeps index keys beside latent layers only", "use --allocator trtllm-v2-qsa-packed"
    yield from head_reasons(layer, spec)
    if layer.head_dim != layer.value_dim and (era < 3 or spec.kv_format.block_scaled):
        yield (
            f"K of head dim {layer.head_dim} beside V of {layer.value_dim} needs era 3 and no block scales",
            "use --allocator vllm-e3, or equal dims",
        )
    if spec.kv_format.block_scaled and layer.head_dim % SCALE_BLOCK_ELEMENTS:
        yield f"an nvfp4 head dim of {layer.head_dim} is not a multiple of {SCALE_BLOCK_ELEMENTS}", "use fp8"


def head_reasons(layer: AttentionLayer, spec: CacheSpec) -> Reasons:
    """Yield why a layer's KV heads cannot be shared out; SGLang divides them in the same way."""
    heads, ranks = layer.kv_heads, spec.parallel.attention_tp
    if max(heads, ranks) % min(heads, ranks):
        yield (
            f"{heads} KV heads over {ranks} tensor-parallel ranks: one must be a multiple of the other",
            "choose a tensor-parallel size that divides the heads, or is a multiple of them",
        )


def state_reasons(layer: RecurrentLayer, spec: CacheSpec) -> Reasons:
    """Yield why a layer's states cannot be shared out; SGLang has the same formulas."""
    ranks = spec.parallel.state_tp
    if layer.auxiliary:
        yield "no auxiliary states are kept beside recurrent ones", "use --allocator trtllm-v2"
    if layer.algorithm == "mamba2" and layer.groups > ranks and layer.groups % ranks:
        yield (
            f"{layer.groups} Mamba2 groups over {ranks} ranks: the engine's formula would keep {ranks} groups only",
            "choose a tensor-parallel size that divides the groups",
        )
    for count, what in ((layer.heads, "heads"), (conv_channels(layer, ranks), "convolution channels")):
        if count % ranks:
            yield (
                f"a {layer.algorithm} layer's {count} recurrent {what} do not divide over {ranks} ranks",
                f"choose a tensor-parallel size that divides {count}",
            )
