"""A spec in a few words: only what a reader needs to see the geometry."""

from __future__ import annotations

from itertools import groupby

from ..model.layers import AttentionLayer, HybridLayer, LatentLayer, Layer, RecurrentLayer, SidePlane
from ..model.spec import CacheSpec


def describe_spec(spec: CacheSpec) -> list[str]:
    """Return the lines that describe ``spec``: the deployment, then runs of equal layers."""
    head = [f"KV {spec.kv_format.value}", _counted(spec.tokens_per_block, "token") + " per block", spec.parallel.name]
    if spec.has_recurrent:
        head.append(f"states {spec.state_format.value}, convolutions {spec.conv_format.value}")
    if spec.parallel.pp_partition is not None:
        head.append(f"stages of {', '.join(map(str, spec.parallel.pp_partition))} layers")
    if spec.rank:
        head.append(f"rank {spec.rank}")
    head.append(_counted(spec.slots, "slot") if spec.slots is not None else f"a quota of {spec.quota_bytes} B")
    if spec.state_slots is not None:
        head.append(f"{spec.state_slots} for states")
    if spec.consumer.kv_layout != "HND":
        head.append(spec.consumer.kv_layout)
    if spec.consumer.alignment_bytes > 1:
        head.append(f"kernels need {spec.consumer.alignment_bytes} B alignment")
    lines = [", ".join(head)]
    lines += _runs(spec.layers, "layer", 0)
    if spec.draft.mode != "none":
        lines += _runs(spec.draft.layers, f"{spec.draft.mode} draft layer", len(spec.layers))
    return lines


def _runs(layers: tuple[Layer, ...], noun: str, start: int) -> list[str]:
    lines = []
    for layer, run in groupby(layers):
        count = sum(1 for _ in run)
        which = f"{noun} {start}" if count == 1 else f"{noun}s {start}-{start + count - 1}"
        lines.append(f"{which}: {describe_layer(layer)}")
        start += count
    return lines


def describe_layer(layer: Layer) -> str:
    """Return one layer in words, sizes in elements."""
    if isinstance(layer, HybridLayer):
        return f"{describe_layer(layer.attention)} beside {describe_layer(layer.recurrent)}"
    if isinstance(layer, AttentionLayer):
        words = [f"attention, {_counted(layer.kv_heads, 'KV head')} x {layer.head_dim}"]
        if layer.value_dim != layer.head_dim:
            words.append(f"value dim {layer.value_dim}")
        return ", ".join([*words, *_paged_words(layer)])
    if isinstance(layer, LatentLayer):
        return ", ".join([f"latent, rows of {layer.latent_dim} + {layer.rope_dim}", *_paged_words(layer)])
    if isinstance(layer, RecurrentLayer):
        shape = f"{layer.heads} x {layer.head_dim} x {layer.state_dim}"
        taps = f"{layer.conv_channels} channels x {layer.conv_kernel - 1} taps"
        auxiliary = f", {len(layer.auxiliary)} auxiliary states" if layer.auxiliary else ""
        return f"{layer.algorithm}, state {shape}, {taps}{auxiliary}"
    return "no cache"


def _paged_words(layer: AttentionLayer | LatentLayer) -> list[str]:
    words = []
    if layer.window is not None:
        words.append(f"window {layer.window}" + (f" + {layer.sink_tokens} sinks" if layer.sink_tokens else ""))
    if layer.kv_format is not None:
        words.append(f"KV {layer.kv_format.value}")
    if layer.tokens_per_block is not None:
        words.append(f"{layer.tokens_per_block} tokens per block")
    return words + [_plane_words(plane) for plane in layer.side_planes]


def _plane_words(plane: SidePlane) -> str:
    per_rank = " per rank" if plane.scope == "rank" else ""
    return f"{plane.role} {plane.heads} x {plane.dim} {plane.format.value}{per_rank}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
