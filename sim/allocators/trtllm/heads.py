"""Which KV heads each rank stores, for the head-map rule and the report."""

from __future__ import annotations

from ....model.layers import AttentionLayer, paged_part
from ....model.parallel import rank_head_range, rank_heads
from ....model.rank import ManagerLayers
from ....model.spec import CacheSpec
from ...layout import HeadMap
from .support import distinct_paged, manager_names


def head_maps(manager: ManagerLayers, spec: CacheSpec) -> list[HeadMap]:
    """Return one head map for each different KV head count among the manager's local layers."""
    layers_of: dict[int, list[int]] = {}
    for rank_layer in manager.layers:
        paged = paged_part(rank_layer.layer)
        if isinstance(paged, AttentionLayer):
            layers_of.setdefault(paged.kv_heads, []).append(rank_layer.index)
    ranks = spec.parallel.attention_tp
    maps = []
    for heads, layers in layers_of.items():
        held = [rank_head_range(heads, ranks, rank) for rank in range(ranks)]
        ranges = tuple([(part.start, part.stop) for part in held])
        maps.append(HeadMap(manager.name, tuple(layers), heads, rank_heads(heads, ranks), ranges))
    return maps


def head_notes(spec: CacheSpec) -> list[str]:
    """Return a sentence for each KV head count that the tensor-parallel ranks do not share evenly."""
    ranks = spec.parallel.attention_tp
    counts = {
        layer.kv_heads: None
        for manager in manager_names(spec)
        for layer in distinct_paged(spec, manager)
        if isinstance(layer, AttentionLayer)
    }
    notes = []
    for heads in counts:
        each = rank_heads(heads, ranks)
        if heads < ranks:
            notes.append(f"{heads} KV heads over {ranks} ranks: each rank keeps 1, so heads are replicated")
        elif heads % ranks:
            spare = each * ranks - heads
            notes.append(f"{heads} KV heads over {ranks} ranks: rounded up to {each} per rank, {spare} of them padding")
    return notes
