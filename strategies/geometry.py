"""The arithmetic of page sizes, for solving: what a page takes per token, and which pages of a rank are of one size.

It is written from the published rules, apart from the allocators: a page is ``heads * dim * bits / 8`` bytes per
token, a block scale one byte per 16 elements, and equal sizes of one life cycle meet in one pool.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..model.arithmetic import div_up
from ..model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ..model.layers import (
    MAX_DIM,
    AttentionLayer,
    LatentLayer,
    RecurrentLayer,
    SidePlane,
    paged_part,
    recurrent_part,
)
from ..model.parallel import rank_heads
from ..model.rank import ManagerLayers, manager_layers
from ..model.spec import CacheSpec
from .formats import PLANE_ORDER

Paged: TypeAlias = AttentionLayer | LatentLayer


class CyclePages(msgspec.Struct, frozen=True):
    """The pages of one life cycle of one manager: by size in bytes, the (layer, role) of each page in a slot.

    ``key`` is (recurrent, window, sink blocks); ``formats`` are the K/V formats of its layers.
    """

    manager: str
    key: tuple[bool, int | None, int]
    pages: dict[int, list[tuple[int, str]]]
    formats: set[ElementFormat]

    @property
    def pools(self) -> list[tuple[int, int]]:
        """(slot bytes, page bytes) of each pool, largest slot first."""
        return sorted([(size * len(members), size) for size, members in self.pages.items()], reverse=True)


def key_elements(layer: Paged, attention_tp: int) -> int:
    """Return the elements of one token in a layer's K page on one rank."""
    if isinstance(layer, LatentLayer):
        return layer.row_dim
    return rank_heads(layer.kv_heads, attention_tp) * layer.head_dim


def key_token_bytes(layer: Paged, kv_format: ElementFormat, attention_tp: int) -> int:
    """Return the bytes of one token in a layer's K page on one rank; ``kv_format`` is the spec's."""
    return key_elements(layer, attention_tp) * (layer.kv_format or kv_format).bits >> 3


def state_bytes(layer: RecurrentLayer, ssm: ElementFormat, conv: ElementFormat, ranks: int) -> tuple[int, int]:
    """Return the bytes of a layer's temporal and convolution state on one rank; the formats are the spec's."""
    ssm_bytes = layer.heads * layer.head_dim * layer.state_dim * ((layer.ssm_format or ssm).bits >> 3)
    conv_bytes = layer.conv_channels * (layer.conv_kernel - 1) * ((layer.conv_format or conv).bits >> 3)
    return ssm_bytes // ranks, conv_bytes // ranks  # floor: heads and channels divide over the ranks that share them


def plane_of_bytes(role: str, token_bytes: int, variant: int = 0) -> SidePlane | None:
    """Return a side plane of exactly ``token_bytes`` per token, None where no dim is small enough.

    ``variant`` moves the choice of format along those that fit.

    >>> plane = plane_of_bytes("index_key", 256)
    >>> plane.dim, plane.format.value
    (128, 'bf16')
    """
    fitting = [
        format
        for format in PLANE_ORDER
        if token_bytes * 8 % format.bits == 0 and 1 <= token_bytes * 8 // format.bits <= MAX_DIM  # floor: tested exact
    ]
    if not fitting:
        return None
    format = fitting[variant % len(fitting)]
    return SidePlane(role=role, dim=token_bytes * 8 // format.bits, format=format)  # floor: tested exact above


def cycle_key(layer: Paged, spec: CacheSpec) -> tuple[bool, int | None, int]:
    """Return what decides a layer's life cycle; a window of the longest sequence or more is none."""
    longest = spec.max_sequence_tokens
    if layer.window is None or (longest is not None and layer.window >= longest):
        return False, None, 0
    return False, layer.window, div_up(layer.sink_tokens, spec.tokens_per_block)


def cycle_pages(spec: CacheSpec) -> tuple[CyclePages, ...]:
    """Return the life cycles of this rank's managers with their pages, side planes each a page of its own."""
    found: list[CyclePages] = []
    for manager in manager_layers(spec):
        found += _manager_cycles(manager, spec)
    return tuple(found)


def _manager_cycles(manager: ManagerLayers, spec: CacheSpec) -> list[CyclePages]:
    cycles: dict[tuple[bool, int | None, int], CyclePages] = {}
    rank_roles: set[str] = set()

    def cycle(key: tuple[bool, int | None, int]) -> CyclePages:
        if key not in cycles:
            cycles[key] = CyclePages(manager.name, key, {}, set())
        return cycles[key]

    for rank_layer in manager.layers:
        paged = paged_part(rank_layer.layer)
        if paged is not None:
            home = cycle(cycle_key(paged, spec))
            home.formats.add(paged.kv_format or spec.kv_format)
            for role, token_bytes in _paged_roles(paged, spec, rank_roles):
                home.pages.setdefault(token_bytes * spec.tokens_per_block, []).append((rank_layer.index, role))
        recurrent = recurrent_part(rank_layer.layer)
        if recurrent is not None:
            home = cycle((True, None, 0))
            for role, size in _state_roles(recurrent, spec):
                home.pages.setdefault(size, []).append((rank_layer.index, role))
    return list(cycles.values())


def _paged_roles(layer: Paged, spec: CacheSpec, rank_roles: set[str]) -> list[tuple[str, int]]:
    """Return (role, bytes per token) of a layer's pages; per-rank planes only where their role is new."""
    tp = spec.parallel.attention_tp
    lanes = ("key",) if isinstance(layer, LatentLayer) else ("key", "value")
    roles = [(role, key_token_bytes(layer, spec.kv_format, tp)) for role in lanes]
    if (layer.kv_format or spec.kv_format).block_scaled:
        scales = key_elements(layer, tp) // SCALE_BLOCK_ELEMENTS  # floor: dims are multiples of a block
        roles += [(f"{role}_block_scale", scales) for role in lanes]
    for plane in layer.side_planes:
        if plane.scope == "rank" and plane.role in rank_roles:
            continue
        if plane.scope == "rank":
            rank_roles.add(plane.role)
        roles.append((plane.role, plane.token_bytes))
    return roles


def _state_roles(layer: RecurrentLayer, spec: CacheSpec) -> list[tuple[str, int]]:
    ssm, conv = state_bytes(layer, spec.state_format, spec.conv_format, spec.parallel.state_tp)
    roles = [("ssm_state", ssm)] if ssm else []
    roles.append(("conv_state", conv))
    for state in layer.auxiliary:
        elements = 1
        for size in state.shape:
            elements *= size
        roles.append((state.role, state.format.bytes_of(elements)))
    return roles
