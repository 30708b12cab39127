"""What the models of SGLang declare to support: the reasons for which a spec lies outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ....model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ....model.layers import INDEX_KEY, AttentionLayer, LatentLayer, Layer, SidePlane, paged_part, recurrent_part
from ....model.spec import CacheSpec
from ..vllm.support import head_reasons, state_reasons

Reasons = Iterator[tuple[str, str]]

INDEX_DIM: Final = 128
"""Elements of an index key, in fp8; four bytes of scale belong to each."""
INDEX_TOKENS: Final = 64
"""Tokens of a page of index keys."""
INDEX_PLANE: Final = SidePlane(role=INDEX_KEY, dim=INDEX_DIM + 4, format=ElementFormat.UINT8)
"""The plane of index keys and scales that the pool of sparse latent layers has."""


def reasons(spec: CacheSpec) -> Reasons:
    """Yield why SGLang's pools do not support ``spec``, as (message, remedy)."""
    if spec.draft.mode == "folded":
        yield "SGLang keeps draft layers in a pool of their own", "use --draft separate"
    if spec.parallel.cp > 1:
        yield "context-parallel pages are not modelled for SGLang", "use --cp 1"
    layers = dict.fromkeys(spec.layers + spec.draft.layers)
    paged = [part for part in map(paged_part, layers) if part is not None]
    states = dict.fromkeys(part for part in map(recurrent_part, layers) if part is not None)
    if spec.kv_format is ElementFormat.INT8 and paged:
        yield "SGLang has no int8 pages", "use fp8"
    windows = {layer.window for layer in paged if layer.window is not None}
    if len(windows) > 1:
        yield f"one pool serves all windowed layers, found windows {sorted(windows)}", "check one window at a time"
    for layer in paged:
        yield from _pages(layer, spec)
    yield from _one_shape(spec.layers)
    yield from _one_shape(spec.draft.layers)
    for state in states:
        yield from state_reasons(state, spec)
        if state.algorithm in ("gdn", "kda") and state.groups % spec.parallel.state_tp:
            yield (
                f"{state.groups} key heads do not divide over {spec.parallel.state_tp} ranks",
                "choose a tensor-parallel size that divides the groups",
            )
    if len(states) > 1:
        yield "one Mamba pool has states of one shape, and the layers' differ", "use --allocator vllm-e3"
    if spec.quota_bytes is not None and (states or windows):
        yield "how a quota is split between pools is not modelled for SGLang", "give --slots"


def _one_shape(layers: tuple[Layer, ...]) -> Reasons:
    """Yield why the layers of one pool cannot share it: a pool has one shape of rows, with index keys or without."""
    for windowed in (False, True):
        paged = [part for part in map(paged_part, layers) if part is not None]
        shapes = {
            (part.row_dim,) if isinstance(part, LatentLayer) else (part.kv_heads, part.head_dim, part.value_dim)
            for part in paged
            if (part.window is not None) == windowed
        }
        if len(shapes) > 1:
            yield "one pool has layers of one shape, and the layers' differ", "use --allocator vllm-e3"


def _pages(layer: AttentionLayer | LatentLayer, spec: CacheSpec) -> Reasons:
    if layer.kv_format not in (None, spec.kv_format):
        yield "SGLang has one KV format for all layers of a pool", "drop the layers' kv_format"
    if layer.tokens_per_block not in (None, spec.tokens_per_block):
        yield "SGLang has one page size", "drop the layers' tokens_per_block"
    if layer.sink_tokens:
        yield "attention sinks beside a window are not modelled for SGLang", "drop sink_tokens"
    if isinstance(layer, LatentLayer):
        if spec.kv_format.block_scaled:
            yield "nvfp4 rows of latent layers are not modelled for SGLang", "use fp8"
        if layer.window is not None:
            yield "latent layers with a window are not modelled for SGLang", "use --allocator vllm-e3"
        if any(plane.scope == "rank" for plane in layer.side_planes):
            yield "SGLang has no side plane that several layers share", "use a plane per layer"
        elif layer.side_planes and layer.side_planes != (INDEX_PLANE,):
            yield "SGLang has one plane of index keys, of 128 fp8 and a 4 B scale", "give index_key, dim 132, uint8"
        elif layer.side_planes and spec.tokens_per_block != INDEX_TOKENS:
            yield f"SGLang keeps index keys in pages of {INDEX_TOKENS} tokens", f"use {INDEX_TOKENS} tokens per block"
        return
    if layer.side_planes:
        yield "SGLang keeps index keys beside latent layers only", "use --allocator trtllm-v2-qsa-packed"
    yield from head_reasons(layer, spec)
    for dim in (layer.head_dim, layer.value_dim):
        if spec.kv_format.block_scaled and dim % SCALE_BLOCK_ELEMENTS:
            yield f"an nvfp4 head dim of {dim} is not a multiple of {SCALE_BLOCK_ELEMENTS}", "use fp8"
