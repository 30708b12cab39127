"""SGLang's pools: a buffer per layer and role over token rows, and states layer by layer or entry by entry.

Token slots are numbered over all layers; page p of a pool is rows ``p * tokens`` to ``(p + 1) * tokens - 1`` of every
buffer. Page 0 and state slot 0 are sinks for padding, and are never handed out: a pool of n usable pages has n + 1.
"""

from __future__ import annotations

import msgspec

from ....model.arithmetic import div_up, exact_div
from ....model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ....model.layers import AttentionLayer, LatentLayer, RecurrentLayer, paged_part, recurrent_part
from ....model.rank import ManagerLayers, manager_layers, stage_layers
from ....model.spec import CacheSpec
from ...finding import Where
from ...layout import (
    CONV_STATE,
    KEY,
    KEY_SCALE,
    SSM_STATE,
    VALUE,
    VALUE_SCALE,
    Access,
    Buffer,
    Layout,
    LifeCycle,
    Pool,
)
from ...page import Page, data_bytes, dense_page, strided_page
from ...rejection import Rejected
from ..trtllm.heads import head_maps
from ..trtllm.support import refuse_unsupported
from ..vllm.layer_specs import conv_channels
from .support import reasons

ALIGNMENT_BYTES = 512
"""Allocations of the framework's caching allocator are at least this aligned."""

DRAFT_TOKENS = 3
"""Tokens that are verified at a time where states are kept for each of them."""

DRAFT_CONV_STATE, DRAFT_SSM_STATE = "draft_conv_state", "draft_ssm_state"
"""States of a layer after each draft token."""

_FULL, _WINDOW, _STATES, _DRAFTS = 0, 1, 2, 3
"""Groups of a manager: each has an allocator of ids of its own."""


class _Build(msgspec.Struct):
    """What has been laid out so far, over all managers."""

    pools: list[Pool] = []
    life_cycles: list[LifeCycle] = []
    buffers: list[Buffer] = []
    accesses: list[Access] = []


def lay_out_pools(spec: CacheSpec, allocator: str, *, envelope: bool = False, speculative: bool = False) -> Layout:
    """Return the pools of ``spec``; ``envelope`` keeps all states of a request in one entry, ``speculative`` adds
    states for each draft token. Raises ``Rejected``."""
    refuse_unsupported(reasons(spec))
    build = _Build()
    managers = manager_layers(spec)
    pages = page_count(managers, spec)
    for manager in managers:
        _add_pages(build, manager, spec, pages)
        _add_states(build, manager, spec, envelope)
        if speculative:
            _add_draft_states(build, manager, spec)
    return Layout(
        allocator=allocator,
        pools=tuple(build.pools),
        life_cycles=tuple(build.life_cycles),
        buffers=tuple(build.buffers),
        accesses=tuple(build.accesses),
        head_maps=tuple([found for manager in managers for found in head_maps(manager, spec)]),
        stages=tuple([tuple(stage) for stage in stage_layers(spec)]),
        spec=spec,
        notes=("slot 0 of every pool is the sink that padding is written to",),
    )


def page_count(managers: tuple[ManagerLayers, ...], spec: CacheSpec) -> int:
    """Return the pages of each pool, the sink included."""
    if spec.quota_bytes is None:
        return (spec.slots or 0) + 1
    layers = [paged for manager in managers for layer in manager.layers if (paged := paged_part(layer.layer))]
    one = sum(page.span_bytes for layer in layers for _, page in paged_roles(layer, spec))
    pages = spec.quota_bytes // one if one else 2  # floor: whole pages
    if pages < 2:
        raise Rejected(
            f"a quota of {spec.quota_bytes} B leaves no page beside the sink: one takes {one} B over all layers",
            "give a larger quota",
            supported=False,
        )
    return pages


def paged_roles(layer: AttentionLayer | LatentLayer, spec: CacheSpec) -> list[tuple[str, Page]]:
    """Return the roles of a layer with pages, each with its page of ``tokens_per_block`` rows."""
    tokens = spec.tokens_per_block
    if isinstance(layer, LatentLayer):
        rows = dense_page(spec.kv_format, ("token", "head", "dim"), (tokens, 1, layer.row_dim))
        planes = [
            (plane.role, dense_page(plane.format, ("token", "head", "dim"), (tokens, plane.heads, plane.dim)))
            for plane in layer.side_planes
        ]
        return [(KEY, rows), *planes]
    heads = div_up(layer.kv_heads, spec.parallel.attention_tp)
    roles = []
    for role, dim in ((KEY, layer.head_dim), (VALUE, layer.value_dim)):
        if spec.consumer.kv_layout == "HND" and not spec.kv_format.block_scaled:
            roles.append((role, dense_page(spec.kv_format, ("head", "token", "dim"), (heads, tokens, dim))))
        else:
            roles.append((role, dense_page(spec.kv_format, ("token", "head", "dim"), (tokens, heads, dim))))
    if spec.kv_format.block_scaled:
        for role, dim in ((KEY_SCALE, layer.head_dim), (VALUE_SCALE, layer.value_dim)):
            blocks = exact_div(dim, SCALE_BLOCK_ELEMENTS, "head dim in elements per block scale")
            roles.append((role, dense_page(ElementFormat.FP8, ("token", "head", "dim"), (tokens, heads, blocks))))
    return roles


def _add_pages(build: _Build, manager: ManagerLayers, spec: CacheSpec, pages: int) -> None:
    """Add the buffers of the full-attention pool, then those of the windowed layers' pool."""
    paged = [(layer.index, part) for layer in manager.layers if (part := paged_part(layer.layer)) is not None]
    for group in (_FULL, _WINDOW):
        members = [(index, part) for index, part in paged if (part.window is not None) == (group == _WINDOW)]
        if not members:
            continue
        build.life_cycles.append(LifeCycle(manager.name, group, False, members[0][1].window))
        for index, part in members:
            roles = paged_roles(part, spec)
            if [role for role, _ in roles] == [KEY, VALUE] and roles[0][1] == roles[1][1]:
                _add_halves(build, manager.name, group, index, roles[0][1], pages)
            else:
                for role, page in roles:
                    pool = _add_pool(build, manager.name, group, page.span_bytes, pages)
                    _add_buffer(build, "kv-view", index, role, pool, 0, page.span_bytes, page)


def _add_halves(build: _Build, manager: str, group: int, layer: int, page: Page, pages: int) -> None:
    """Add K and V of equal shape: the halves of one allocation, V behind all pages of K."""
    pool = _add_pool(build, manager, group, 2 * page.span_bytes, pages)
    _add_buffer(build, "kv-view", layer, KEY, pool, 0, page.span_bytes, page)
    _add_buffer(build, "kv-view", layer, VALUE, pool, pages * page.span_bytes, page.span_bytes, page)


def states_of(layer: RecurrentLayer, spec: CacheSpec) -> list[tuple[str, Page]]:
    """Return a layer's states, convolution first: taps innermost, but outermost for KDA."""
    ranks = spec.parallel.state_tp
    channels = exact_div(conv_channels(layer, ranks), ranks, "convolution channels over ranks")
    axes, shape = ("channel", "tap"), (channels, layer.conv_kernel - 1)
    if layer.algorithm == "kda":
        axes, shape = ("tap", "channel"), (layer.conv_kernel - 1, channels)
    states = [(CONV_STATE, dense_page(layer.conv_format or spec.conv_format, axes, shape))]
    if layer.state_dim:
        inner = layer.algorithm == "mamba1"  # a state per channel, told as heads of one dim
        count, dim = (layer.heads * layer.head_dim, 1) if inner else (layer.heads, layer.head_dim)
        temporal = (exact_div(count, ranks, "recurrent heads over ranks"), dim, layer.state_dim)
        states.append(
            (SSM_STATE, dense_page(layer.ssm_format or spec.state_format, ("head", "dim", "state"), temporal))
        )
    return states


def draft_states_of(layer: RecurrentLayer, spec: CacheSpec) -> list[tuple[str, Page]]:
    """Return a layer's states after each draft token: windows of the convolution, and temporal states one by one.

    Windows of neighbouring tokens share all taps but one, so a slot holds each channel's taps once, and the windows
    overlap; where taps lie outermost (KDA) they are apart.
    """
    found = []
    for role, (_, page) in zip((DRAFT_CONV_STATE, DRAFT_SSM_STATE), states_of(layer, spec), strict=False):
        axes, shape = ("draft", *page.axes), (DRAFT_TOKENS, *page.shape)
        if page.axes == ("channel", "tap"):
            item, row = page.format.container_bytes, (DRAFT_TOKENS + page.shape[1] - 1) * page.format.container_bytes
            windows = strided_page(page.format, axes, shape, (item, row, item))
            found.append((role, msgspec.structs.replace(windows, self_overlap=page.shape[1] > 1)))
        else:
            found.append((role, dense_page(page.format, axes, shape)))
    return found


def _add_draft_states(build: _Build, manager: ManagerLayers, spec: CacheSpec) -> None:
    """Add the states of draft tokens: ``[layers, requests, state]`` for each kind; slot 0 is the sink."""
    layers = [(layer.index, part) for layer in manager.layers if (part := recurrent_part(layer.layer)) is not None]
    if not layers:
        return
    slots = (spec.slots or 0) + 1
    build.life_cycles.append(LifeCycle(manager.name, _DRAFTS, True))
    for role, page in draft_states_of(layers[0][1], spec):
        size = page.span_bytes
        pool = _add_pool(build, manager.name, _DRAFTS, len(layers) * size, slots)
        for place, (index, _) in enumerate(layers):
            _add_buffer(build, "state-view", index, role, pool, place * slots * size, size, page)


def _add_states(build: _Build, manager: ManagerLayers, spec: CacheSpec, envelope: bool) -> None:
    """Add the states: ``[layers, slots, state]`` for each kind, or in an envelope ``[slots, kind, layers, state]``."""
    layers = [(layer.index, part) for layer in manager.layers if (part := recurrent_part(layer.layer)) is not None]
    if not layers:
        return
    slots = (spec.state_slots or spec.slots or 0) + 1
    build.life_cycles.append(LifeCycle(manager.name, _STATES, True))
    states = states_of(layers[0][1], spec)
    entry = len(layers) * sum(page.span_bytes for _, page in states)
    pool = _add_pool(build, manager.name, _STATES, entry, slots) if envelope else 0
    start = 0
    for role, page in states:
        size = page.span_bytes
        if envelope:
            require_whole(role, page, start, entry, layers[0][0])
        else:
            pool = _add_pool(build, manager.name, _STATES, len(layers) * size, slots)
        for place, (index, _) in enumerate(layers):
            if envelope:
                _add_buffer(build, "state-view", index, role, pool, start + place * size, entry, page)
            else:
                _add_buffer(build, "state-view", index, role, pool, place * slots * size, size, page)
        start += len(layers) * size


def require_whole(role: str, page: Page, start: int, entry: int, layer: int) -> None:
    """Refuse an envelope whose states do not start, or step, by whole elements; the engine asserts the same."""
    item = page.format.container_bytes
    for size, what in ((start, f"{role} starts at byte"), (entry, "the entry takes bytes")):
        if size % item:
            raise Rejected(
                f"{what} {size} of the envelope, which is no multiple of a {page.format.value} element ({item} B)",
                "choose state formats of one width, an even number of convolution values, or --allocator sglang",
                where=(Where(layer=layer, role=role),),
                supported=False,
            )


def _add_pool(build: _Build, manager: str, group: int, slot_bytes: int, slots: int) -> int:
    index = sum(1 for pool in build.pools if (pool.manager, pool.group) == (manager, group))
    build.pools.append(Pool(manager, group, index, slots, slot_bytes, slots * slot_bytes, ALIGNMENT_BYTES))
    return len(build.pools) - 1


def _add_buffer(
    build: _Build, consumer: str, layer: int, role: str, pool: int, first: int, stride: int, page: Page
) -> None:
    """Add one buffer of every slot of ``pool``, in the life cycle that was added last."""
    manager, slots = build.pools[pool].manager, build.pools[pool].slot_count
    build.accesses.append(Access(consumer, len(build.buffers), pool, first, stride, slots, page))
    cycle = len(build.life_cycles) - 1
    build.buffers.append(Buffer(manager, layer, role, cycle, pool, first, stride, slots, data_bytes(page), page))
