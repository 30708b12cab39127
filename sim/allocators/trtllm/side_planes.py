"""How the QSA manager registers its side planes: each as a buffer of its own, or all of a rank's packed into one.

Packing keeps a side page from being as large as a K, V or scale page, which would put it into their pool. It costs no
memory.
The packed buffer belongs to the first local layer with a side plane and holds, in this order, the per-layer planes in
layer order
and then the per-rank planes.
"""

from __future__ import annotations

from collections.abc import Iterable

from ....model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ....model.layers import AttentionLayer, Layer, SidePlane, paged_part
from ....model.parallel import rank_heads
from ....model.rank import RankLayer
from ....model.spec import CacheSpec
from ...layout import SIDE_PLANES, Part
from ...page import dense_page
from ...rejection import Rejected
from .registration import Registration, register_side_plane


def planes_of(layer: Layer) -> tuple[SidePlane, ...]:
    """Return the side planes of ``layer``'s half with pages; recurrent layers have none."""
    paged = paged_part(layer)
    return () if paged is None else paged.side_planes


def separate_planes(layers: Iterable[RankLayer], spec: CacheSpec) -> dict[int, tuple[Registration, ...]]:
    """Return each local layer's side planes as buffers of their own, by global layer.

    Per-layer planes come first, in the layer's order; a per-rank plane is registered once, by the first layer that
    has it.
    """
    registered: dict[int, tuple[Registration, ...]] = {}
    rank_roles: set[str] = set()
    known: dict[SidePlane, Registration] = {}
    for layer in layers:
        own = []
        for plane in sorted(planes_of(layer.layer), key=_rank_scope_last):
            if plane.scope == "rank":
                if plane.role in rank_roles:
                    continue
                rank_roles.add(plane.role)
            if plane not in known:
                known[plane] = register_side_plane(plane, spec)
            own.append(known[plane])
        if own:
            registered[layer.index] = tuple(own)
    return registered


def packed_planes(layers: Iterable[RankLayer], spec: CacheSpec) -> dict[int, tuple[Registration, ...]]:
    """Return all local side planes as one buffer of the first layer that has any, by global layer."""
    by_layer = separate_planes(layers, spec)
    if not by_layer:
        return {}
    rank_roles = {plane.role for layer in layers for plane in planes_of(layer.layer) if plane.scope == "rank"}
    planes = [(index, plane) for index, own in by_layer.items() for plane in own]
    planes.sort(
        key=lambda item: item[1].role in rank_roles
    )  # stable: per-layer planes keep their order, per-rank ones end
    parts = []
    offset = 0
    whole = sum(plane.size_bytes for _, plane in planes)
    for index, plane in planes:
        element = plane.page.format.container_bytes
        if offset % element or whole % element:
            raise Rejected(
                f"layer {index}'s {plane.role} would start {offset} B into a packed plane of {whole} B, and its view "
                f"steps in elements of {element} B",
                "choose index heads, index dim or tokens per block that make every plane a multiple of every element",
                supported=False,
            )
        parts.append(Part(index, plane.role, offset, plane.page))
        offset += plane.size_bytes
    spelled = f"{len(planes)} planes"
    if len(planes) <= 4:
        spelled = " + ".join(f"{plane.size_bytes}" for _, plane in planes) if len(planes) > 1 else "1 plane"
    page = dense_page(ElementFormat.UINT8, ("byte",), (offset,))
    packed = Registration(SIDE_PLANES, page, offset, 1, f"{spelled} = {offset} B", tuple(parts))
    return {next(iter(by_layer)): (packed,)}


def _rank_scope_last(plane: SidePlane) -> bool:
    return plane.scope == "rank"


def side_page_may_collide(layers: Iterable[Layer], spec: CacheSpec, *, any_heads: bool) -> bool:
    """Whether some side page is as large as a K, V or scale page.

    With ``any_heads`` it is asked for every head count from 1 to a layer's own, so that all ranks and all parallel
    layouts decide alike;
    without, for this rank's heads only. Tokens per block cancel: the sizes are compared per token.
    """
    distinct = tuple(dict.fromkeys(layers))
    side_bytes = {plane.token_bytes for layer in distinct for plane in planes_of(layer)}
    for layer in map(paged_part, distinct):
        if not isinstance(layer, AttentionLayer):
            continue
        kv_format = layer.kv_format or spec.kv_format
        heads = range(1, layer.kv_heads + 1) if any_heads else (rank_heads(layer.kv_heads, spec.parallel.attention_tp),)
        for bytes_per_token in side_bytes:
            data_heads, odd = divmod(bytes_per_token * 8, layer.head_dim * kv_format.bits)
            if not odd and data_heads in heads:
                return True
            if kv_format.block_scaled:
                scale_heads, odd = divmod(bytes_per_token * SCALE_BLOCK_ELEMENTS, layer.head_dim)
                if not odd and scale_heads in heads:
                    return True
    return False
