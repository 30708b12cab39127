"""Known limits of the TensorRT-LLM allocators that count as sound; explained in docs/known-limits.md.

Two of them are one weakness: the storage groups buffers by size alone, so the policy is right only as long as sizes
that must not meet do not meet. Each predicate says exactly when they do, on the spec's own rank. The third is that
nobody compares the number of pages with what a page index can hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....model.layers import paged_part
from ....model.rank import ManagerLayers, manager_layers
from ....model.spec import CacheSpec
from ...layout import KEY, KEY_SCALE, SIDE_PLANES, VALUE, VALUE_SCALE
from ...limits import KnownLimit
from ...rejection import Rejected
from .manager_v2 import PolicyV2, life_cycle_key
from .manager_v2 import _side_planes as side_plane_registrations
from .registration import Registration, register_paged
from .storage import LifeCycleKey

_CONSEQUENCES = ("rejected", "index-scale", "op-address", "stride", "alias", "bounds")
"""Rules that break when a foreign page is in a K/V or scale pool: which of them depends on its place."""


_PACKING = PolicyV2("", "packed-any-heads")
"""How side planes are registered: those of K/V layers as the packed manager does it, others (latent layers', which only
plain V2 takes) as buffers of their own."""


def _cycles(manager: ManagerLayers, spec: CacheSpec) -> Iterator[list[tuple[int, Registration]]]:
    """Yield each paged life cycle of a manager as (layer, registration), in the order of registration."""
    planes, _ = side_plane_registrations(manager, spec, _PACKING)
    cycles: dict[LifeCycleKey, list[tuple[int, Registration]]] = {}
    for rank_layer in manager.layers:
        paged = paged_part(rank_layer.layer)
        if paged is not None:
            entries = register_paged(paged, spec) + planes.get(rank_layer.index, ())
            members = cycles.setdefault(life_cycle_key(paged, spec), [])
            members += [(rank_layer.index, entry) for entry in entries]
    yield from cycles.values()


def scale_pool_differs(spec: CacheSpec) -> bool:
    """Whether block scales lie in a pool whose members are not exactly the scales of the layers in the data pool.

    The attention op uses one index and one offset on both pools, so they must hold the same layers in the same order.
    """
    try:
        for manager in manager_layers(spec):
            for members in _cycles(manager, spec):
                data: dict[int, list[tuple[int, str]]] = {}
                for layer, entry in members:
                    data.setdefault(entry.size_bytes, []).append((layer, entry.role))
                sizes = {(layer, entry.role): entry.size_bytes for layer, entry in members}
                for layer in {layer for layer, entry in members if entry.role == KEY_SCALE}:
                    pool = data[sizes[layer, KEY]]
                    scales = data[sizes[layer, KEY_SCALE]]
                    twins = {KEY: KEY_SCALE, VALUE: VALUE_SCALE}
                    if [(own, twins.get(role)) for own, role in pool] != scales:
                        return True
    except Rejected:
        return False
    return False


def packed_plane_meets_pages(spec: CacheSpec) -> bool:
    """Whether a rank's side planes, packed, are as large as a page among which they cannot stay unnoticed.

    In the K/V pool that takes a K page behind them, which then starts on half a pair, or, from the second slot on, the
    dense view of a layer without planes, which steps by pairs. In a scale pool, or beside one, they break the step that
    data and scales keep.
    """
    try:
        for manager in manager_layers(spec):
            for members in _cycles(manager, spec):
                keys = {entry.size_bytes for _, entry in members if entry.role == KEY}
                scales = {entry.size_bytes for _, entry in members if entry.role == KEY_SCALE}
                for place, (_, entry) in enumerate(members):
                    if entry.role != SIDE_PLANES:
                        continue
                    size = entry.size_bytes
                    if size in scales or (scales and size in keys):
                        return True
                    sparse = {part.layer for part in entry.parts}
                    for other, (layer, page) in enumerate(members):
                        dense_view = layer not in sparse and spec.slots != 1
                        if page.role == KEY and page.size_bytes == size and (other > place or dense_view):
                            return True
    except Rejected:
        return False
    return False


def pages_exceed_index(spec: CacheSpec) -> bool:
    """Whether a K pool of the rank may hold more pages than a signed page index of the consumer counts.

    Under a byte quota a pool has at most as many pages as fit into the quota; with a number of slots, that many times
    the pages of one size in a slot.
    """
    limit = 1 << (spec.consumer.index_bits - 1)
    try:
        for manager in manager_layers(spec):
            for members in _cycles(manager, spec):
                pages: dict[int, int] = {}
                for _, entry in members:
                    pages[entry.size_bytes] = pages.get(entry.size_bytes, 0) + entry.expansion
                for _, entry in members:
                    if entry.role != KEY:
                        continue
                    if spec.quota_bytes is not None and spec.quota_bytes * entry.expansion > limit * entry.size_bytes:
                        return True
                    if spec.slots is not None and spec.slots * pages[entry.size_bytes] > limit:
                        return True
    except Rejected:
        return False
    return False


LIMITS: tuple[KnownLimit, ...] = (
    KnownLimit(
        name="block scales beside pages of their size",
        allocators=("trtllm-v2", "trtllm-v2-qsa-packed"),
        rules=_CONSEQUENCES,
        matches=scale_pool_differs,
        anchor="docs/known-limits.md#block-scales-beside-pages-of-their-size",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"kv_format":"nvfp4","layers":['
            b'{"kind":"latent","latent_dim":32},{"kind":"latent","latent_dim":256}]}'
        ),
    ),
    KnownLimit(
        name="packed planes as large as a page",
        allocators=("trtllm-v2-qsa-packed",),
        rules=_CONSEQUENCES,
        matches=packed_plane_meets_pages,
        anchor="docs/known-limits.md#packed-planes-as-large-as-a-page",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":128,'
            b'"side_planes":[{"role":"index_key","dim":128,"format":"bf16"}]},'
            b'{"kind":"attention","kv_heads":1,"head_dim":128}]}'
        ),
    ),
    KnownLimit(
        name="more pages than an index counts",
        allocators=("trtllm-v1", "trtllm-v2", "trtllm-v2-qsa-packed"),
        rules=("int32",),
        matches=pages_exceed_index,
        anchor="docs/known-limits.md#more-pages-than-an-index-counts",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1073741825,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":128}]}'
        ),
    ),
)
