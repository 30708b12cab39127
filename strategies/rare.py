"""Rare classes: geometries in which an allocator's size arithmetic does something unusual, and few random specs have.

``classes_of`` says which of them a spec is in. Classes of page sizes come from the spec alone, every side plane
counted as a page of its own, so that they name what an allocator must cope with (by packing, say), whether it builds
or refuses. What depends on the storage that was built (ties, merged life cycles) is read off the
layout where there is one.

    >>> from kvsan.model.spec import AttentionLayer, CacheSpec, ParallelLayout
    >>> spec = CacheSpec(layers=(AttentionLayer(kv_heads=2, head_dim=128),), parallel=ParallelLayout(tp=2))
    >>> sorted(classes_of(spec))
    ['KV heads = TP']
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from hypothesis import currently_in_test_context, event, target
from hypothesis.errors import InvalidArgument

from ..model.layers import AttentionLayer, Layer, paged_part
from ..model.rank import manager_layers, stage_layers
from ..model.spec import CacheSpec
from ..sim.layout import Layout
from ..sim.rejection import Rejected
from .geometry import CyclePages, cycle_pages

CLASSES: Final[dict[str, str]] = {
    "index plane in its own layer's K/V pool": "a side page is as large as the K page of its own layer",
    "index plane in another layer's pool": "a side page is as large as a K/V page of other layers, not of its own",
    "tie of two size classes": "two pools of one life cycle have equal slots and different pages",
    "life cycles merged": "two life cycles have equal slots, and so one pool group",
    "life cycles merged with different page sizes": "two life cycles share a pool group, with other pages",
    "scale page equal to another page": "a block-scale page is as large as a page of another role",
    "KV heads = TP": "an attention layer has one KV head per tensor-parallel rank, of several",
    "heads replicated": "an attention layer has fewer KV heads than ranks",
    "heads padded": "an attention layer has more KV heads than ranks, but no multiple",
    "one local sparse layer": "a rank holds one layer with side planes",
    "two KV formats in one life cycle": "layers of one life cycle have different KV formats",
    "uneven PP": "pipeline stages hold different numbers of layers",
    "ssm bytes == conv bytes": "a temporal state is as large as its convolution state",
    "window group": "a rank holds layers with a sliding window",
    "draft folded": "draft layers stand in the target's manager of this rank",
    "draft separate": "draft layers have a manager of their own on this rank",
    "packed planes equal to another page": "all side planes of a rank together are as large as a K, V or scale page",
}
"""The classes, and what each means."""

FITTING: Final[dict[str, tuple[str, ...]]] = {
    name: {
        "index plane in its own layer's K/V pool": ("dense", "qsa", "any"),
        "index plane in another layer's pool": ("dense", "any"),
        "scale page equal to another page": ("dense", "qsa", "any"),
        "life cycles merged": ("dense", "qsa", "any"),
        "life cycles merged with different page sizes": ("dense", "qsa", "any"),
        "two KV formats in one life cycle": ("dense", "any"),
        "packed planes equal to another page": ("qsa", "any"),
    }.get(name, ("dense", "dense-v1", "qsa", "any"))
    for name in CLASSES
}
"""The families in which a class is to be reached."""

_KV_ROLES: Final = frozenset({"key", "value"})
_SCALE_ROLES: Final = frozenset({"key_block_scale", "value_block_scale"})
_STATE_ROLES: Final = frozenset({"ssm_state", "conv_state"})


def classes_of(spec: CacheSpec, outcome: Layout | Rejected | None = None) -> frozenset[str]:
    """Return the classes that ``spec`` is in; ``outcome`` is what an allocator made of it, if one was asked."""
    found: set[str] = set()
    cycles = cycle_pages(spec)
    for cycle in cycles:
        found.update(_size_classes(cycle))
    found.update(_layer_classes(spec))
    found.update(_packing_classes(cycles))
    found.update(_built_classes(outcome) if isinstance(outcome, Layout) else _storage_classes(cycles))
    return frozenset(found)


def _size_classes(cycle: CyclePages) -> Iterator[str]:
    """Yield what equal page sizes of one life cycle mean."""
    if cycle.key[0]:
        yield from _state_classes(cycle)
        return
    if len(cycle.formats) > 1:
        yield "two KV formats in one life cycle"
    if cycle.key[1] is not None:
        yield "window group"
    for members in cycle.pages.values():
        roles = {role for _, role in members}
        if roles & _SCALE_ROLES and roles - _SCALE_ROLES:
            yield "scale page equal to another page"
        planes = [layer for layer, role in members if role not in _KV_ROLES | _SCALE_ROLES]
        if planes and roles & _KV_ROLES:
            keyed = {layer for layer, role in members if role == "key"}
            if not keyed.isdisjoint(planes):
                yield "index plane in its own layer's K/V pool"
            if not keyed.issuperset(planes):
                yield "index plane in another layer's pool"


def _state_classes(cycle: CyclePages) -> Iterator[str]:
    for members in cycle.pages.values():
        ssm = {layer for layer, role in members if role == "ssm_state"}
        if not ssm.isdisjoint(layer for layer, role in members if role == "conv_state"):
            yield "ssm bytes == conv bytes"


def _storage_classes(cycles: Iterable[CyclePages]) -> Iterator[str]:
    """Yield ties and merged life cycles, by V2's rule of equal sizes."""
    merged: dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]] = {}
    seen = set()
    for cycle in cycles:
        pools = cycle.pools
        slots = tuple([slot for slot, _ in pools])
        if len(set(slots)) < len(slots):
            yield "tie of two size classes"
        if (cycle.manager, slots) in seen:
            yield "life cycles merged"
        seen.add((cycle.manager, slots))
        merged.setdefault((cycle.manager, slots), set()).add(tuple([page for _, page in pools]))
    if any(len(pages) > 1 for pages in merged.values()):
        yield "life cycles merged with different page sizes"


def _built_classes(layout: Layout) -> Iterator[str]:
    """Yield ties and merged life cycles of the storage that was built."""
    pages: dict[int, dict[int, set[int]]] = {}
    for buffer in layout.buffers:
        pages.setdefault(buffer.life_cycle, {}).setdefault(buffer.pool, set()).add(buffer.page_bytes)
    groups: dict[tuple[int, ...], list[dict[int, set[int]]]] = {}
    for pools in pages.values():
        groups.setdefault(tuple(sorted(pools)), []).append(pools)
        sizes = [(layout.pools[pool].slot_bytes, tuple(sorted(found))) for pool, found in pools.items()]
        if len({slot for slot, _ in sizes}) < len(set(sizes)):
            yield "tie of two size classes"
    for cycles in groups.values():
        if len(cycles) > 1:
            yield "life cycles merged"
        if any(cycle != cycles[0] for cycle in cycles[1:]):
            yield "life cycles merged with different page sizes"


def _packing_classes(cycles: Iterable[CyclePages]) -> Iterator[str]:
    """Yield what the side planes of attention layers come to when they are packed into one page."""
    planes: dict[str, int] = {}
    pages: dict[str, set[int]] = {}
    for cycle in cycles:
        if cycle.key[0]:
            continue
        for size, members in cycle.pages.items():
            roles = {role for _, role in members}
            if roles & (_KV_ROLES | _SCALE_ROLES):
                pages.setdefault(cycle.manager, set()).add(size)
            count = sum(role not in _KV_ROLES | _SCALE_ROLES for _, role in members)
            planes[cycle.manager] = planes.get(cycle.manager, 0) + count * size
    if any(size in pages.get(manager, ()) for manager, size in planes.items() if size):
        yield "packed planes equal to another page"


def _layer_classes(spec: CacheSpec) -> Iterator[str]:
    """Yield what the layers of this rank and the layout say without any size."""
    tp = spec.parallel.attention_tp
    for manager in manager_layers(spec):
        layers = [layer.layer for layer in manager.layers]
        if sum(_is_sparse(layer) for layer in layers) == 1:
            yield "one local sparse layer"
        if tp > 1:
            for layer in dict.fromkeys(layers):
                yield from _head_classes(layer, tp)
        if manager.name == "draft":
            yield "draft separate"
        elif spec.draft.mode == "folded" and manager.layers and manager.layers[-1].index >= len(spec.layers):
            yield "draft folded"
    if spec.parallel.pp > 1 and len({len(stage) for stage in stage_layers(spec)}) > 1:
        yield "uneven PP"


def _is_sparse(layer: Layer) -> bool:
    paged = paged_part(layer)
    return paged is not None and bool(paged.side_planes)


def _head_classes(layer: Layer, tp: int) -> Iterator[str]:
    paged = paged_part(layer)
    if not isinstance(paged, AttentionLayer):
        return
    if paged.kv_heads == tp:
        yield "KV heads = TP"
    elif paged.kv_heads < tp:
        yield "heads replicated"
    elif paged.kv_heads % tp:
        yield "heads padded"


class Nearness(msgspec.Struct, frozen=True):
    """How close a spec is to two classes: 0 where it is in them, below 0 by the factors that are missing.

    ``collision`` compares side pages with K pages, ``merge`` the slots of two life cycles; None where there is
    nothing to compare.
    """

    collision: float | None
    merge: float | None


def nearness(spec: CacheSpec) -> Nearness:
    """Return how close ``spec`` is to a collision of sizes and to a merger of life cycles."""
    collision: float | None = None
    slots: list[tuple[str, list[int]]] = []
    for cycle in cycle_pages(spec):
        slots.append((cycle.manager, [slot for slot, _ in cycle.pools]))
        keys = [size for size, members in cycle.pages.items() if any(role in _KV_ROLES for _, role in members)]
        others = [
            size
            for size, members in cycle.pages.items()
            if not cycle.key[0] and any(role not in _KV_ROLES | _SCALE_ROLES for _, role in members)
        ]
        for key in keys:
            for other in others:
                collision = max(-_factor(key, other), -math.inf if collision is None else collision)
    merge: float | None = None
    for index, (manager, mine) in enumerate(slots):
        for other_manager, theirs in slots[:index]:
            if manager == other_manager and len(mine) == len(theirs):
                distance = sum(map(_factor, mine, theirs))
                merge = max(-distance, -math.inf if merge is None else merge)
    return Nearness(collision, merge)


def _factor(one: int, other: int) -> float:
    return abs(math.log2(one / other))


def observe(spec: CacheSpec, outcome: Layout | Rejected | None = None, *, steer: bool = True) -> frozenset[str]:
    """Count the classes of ``spec`` as Hypothesis events, steer towards rare ones, and return the classes.

    Call it inside a test or campaign, once for each example; outside of Hypothesis it only classifies. The events
    appear in ``--hypothesis-show-statistics``. ``steer=False`` leaves ``target()`` alone.
    """
    found = classes_of(spec, outcome)
    if not currently_in_test_context():
        return found
    for name in sorted(found):
        event("class", payload=name)
    if steer:
        near = nearness(spec)
        for label, score in (("equal pages", near.collision), ("equal life cycles", near.merge)):
            if score is not None:
                with contextlib.suppress(InvalidArgument):  # a second observation of one example keeps the first score
                    target(score, label=label)
    return found
