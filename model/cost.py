"""The engines' cost model: bytes per block of tokens, from a formula per layer rather than from a layout.

It is kept apart from the allocators on purpose: the ``budget`` rule compares the two.
"""

from __future__ import annotations

from .formats import SCALE_BLOCK_ELEMENTS
from .layers import LatentLayer, Layer, paged_part
from .parallel import rank_heads
from .rank import ManagerLayers
from .spec import CacheSpec


def block_bytes(manager: ManagerLayers, spec: CacheSpec) -> int:
    """Return the bytes that one block of tokens takes on this rank, over all layers of ``manager``.

    Per token and layer: K and V are ``heads * dim * bits / 8``, an NVFP4 block scale is one byte per 16 elements, a
    side plane
    its own row. Per-rank planes count once. Recurrent states are per request and do not count.
    """
    known: dict[Layer, int] = {}
    bits = 0
    rank_planes: dict[str, int] = {}
    for rank_layer in manager.layers:
        layer = rank_layer.layer
        cost = known.get(layer)
        if cost is None:
            cost = known[layer] = _token_bits(layer, spec)
            paged = paged_part(layer)
            for plane in paged.side_planes if paged is not None else ():
                if plane.scope == "rank":
                    rank_planes.setdefault(plane.role, plane.token_bytes * 8)
        bits += cost
    return (bits + sum(rank_planes.values())) * spec.tokens_per_block >> 3


def _token_bits(layer: Layer, spec: CacheSpec) -> int:
    """Return the bits that one token takes in one layer on this rank, per-rank planes left out."""
    paged = paged_part(layer)
    if paged is None:
        return 0
    kv_format = paged.kv_format or spec.kv_format
    if isinstance(paged, LatentLayer):
        elements = paged.row_dim
    else:
        elements = rank_heads(paged.kv_heads, spec.parallel.attention_tp) * (paged.head_dim + paged.value_dim)
    bits = elements * kv_format.bits
    if kv_format.block_scaled:
        bits += 8 * elements // SCALE_BLOCK_ELEMENTS  # floor: allocators refuse dims that 16 does not divide
    return bits + sum(8 * plane.token_bytes for plane in paged.side_planes if plane.scope == "layer")
