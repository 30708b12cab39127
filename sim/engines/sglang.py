"""SGLang's own pools as a ``Layout``, and the request that asks for them.

The engine has one geometry for all layers of a pool: a pool of K and V (and one of its own for windows), of latent
rows, of states. A pool's tensors have a row for each token; page ``p`` is the rows from ``p`` times the page's tokens
on, and page 0 (slot 0 of states) is the sink that padding is written to.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

from ...model.arithmetic import div_up
from ...model.errors import SpecError, shown
from ...model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ...model.layers import INDEX_KEY, AttentionLayer, LatentLayer, paged_part, recurrent_part
from ...model.rank import ManagerLayers, manager_layers, stage_layers
from ...model.spec import CacheSpec
from ..allocators.sglang.pools import ALIGNMENT_BYTES, page_count, states_of
from ..allocators.trtllm.heads import head_maps
from ..layout import (
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
from ..page import Page, data_bytes, strided_page
from ..rejection import Rejected
from .answer import Answer, View
from .vllm import DTYPES

INDEX_DIM: Final = 132
"""Bytes of an index key: 128 of fp8 and a scale."""
INDEX_PAGE_TOKENS: Final = 64
"""Tokens of a page where there are index keys."""
_FULL, _WINDOW, _STATES = 0, 1, 2
_GROUPS: Final = 3
"""Groups of a manager: each has an allocator of ids of its own."""
_PAGED_ROLES: Final = (KEY, VALUE, KEY_SCALE, VALUE_SCALE)
_STATE_ROLES: Final = (CONV_STATE, SSM_STATE)


def refuse_unasked(spec: CacheSpec) -> None:
    """Raise ``Rejected`` for what the model lays out layer by layer and the engine has no pool for."""
    for manager in manager_layers(spec):
        paged = [part for layer in manager.layers if (part := paged_part(layer.layer)) is not None]
        for windowed in (False, True):
            shapes = {_geometry(part) for part in paged if (part.window is not None) == windowed}
            if len(shapes) > 1:
                _refuse(f"a pool of SGLang has layers of one geometry, found {len(shapes)}", "use --allocator sglang")
        if len({type(part) for part in paged}) > 1:
            _refuse("SGLang has no model with latent layers beside others", "use --allocator sglang")
        for part in paged:
            planes = [(plane.role, plane.dim, plane.heads, plane.format) for plane in part.side_planes]
            asked = planes == [(INDEX_KEY, INDEX_DIM, 1, ElementFormat.UINT8)]
            if planes and not (asked and spec.tokens_per_block == INDEX_PAGE_TOKENS):
                needed = f"index keys of {INDEX_DIM} bytes in pages of {INDEX_PAGE_TOKENS} tokens"
                _refuse(f"SGLang has {needed} alone", "use --allocator sglang")
        for layer in manager.layers:
            state = recurrent_part(layer.layer)
            if state is not None and not state.state_dim:
                _refuse("SGLang's pool of states has a temporal state", "use --allocator sglang")


def _refuse(message: str, remedy: str) -> None:
    raise Rejected(message, remedy, supported=False)


def _geometry(part: AttentionLayer | LatentLayer) -> tuple[object, ...]:
    if isinstance(part, LatentLayer):
        return part.latent_dim, part.rope_dim, tuple(plane.role for plane in part.side_planes)
    return part.kv_heads, part.head_dim, part.value_dim


@functools.lru_cache(maxsize=16)
def request_of(spec: CacheSpec, *, envelope: bool) -> dict[str, Any]:
    """Return the request for the pools of all managers; ``envelope`` keeps a request's states in one entry.

    It is made once and must not be changed. Sizes are usable tokens, or usable slots of states.
    """
    managers = manager_layers(spec)
    usable = (page_count(managers, spec) - 1) * spec.tokens_per_block
    pools: list[dict[str, Any]] = []
    for number, manager in enumerate(managers):
        pools += _pools_of(spec, manager, number, usable, envelope=envelope)
    return {"pools": pools}


def _pools_of(
    spec: CacheSpec, manager: ManagerLayers, number: int, usable: int, *, envelope: bool
) -> list[dict[str, Any]]:
    paged = [(layer.index, part) for layer in manager.layers if (part := paged_part(layer.layer)) is not None]
    full = [(index, part) for index, part in paged if part.window is None]
    windowed = [(index, part) for index, part in paged if part.window is not None]
    shared = {
        "manager": number,
        "group": _GROUPS * number + _FULL,
        "size": usable,
        "tokens": spec.tokens_per_block,
        "dtype": DTYPES[spec.kv_format],
        "layers": [index for index, _ in full],
    }
    pools: list[dict[str, Any]] = []
    first = full[0][1] if full else windowed[0][1] if windowed else None
    if isinstance(first, LatentLayer):
        rows = {"kind": "latent", "rank": first.latent_dim, "rope": first.rope_dim, "index": bool(first.side_planes)}
        pools.append(shared | rows)
    elif isinstance(first, AttentionLayer):
        swa = windowed[0][1] if windowed else first
        block_scaled = spec.kv_format.block_scaled
        attention: dict[str, Any] = {"fp4": block_scaled, "hnd": spec.consumer.kv_layout == "HND" and not block_scaled}
        for prefix, part in (("", first), ("swa_", swa)):
            if isinstance(part, AttentionLayer):
                heads = div_up(part.kv_heads, spec.parallel.attention_tp)
                attention |= {
                    f"{prefix}heads": heads,
                    f"{prefix}dim": part.head_dim,
                    f"{prefix}value_dim": part.value_dim,
                }
        kind = {"kind": "windowed", "windows": [index for index, _ in windowed]} if windowed else {"kind": "attention"}
        pools.append(shared | attention | kind)
    states = [(layer.index, held) for layer in manager.layers if (held := recurrent_part(layer.layer)) is not None]
    if states:
        (_, conv), (_, temporal) = states_of(states[0][1], spec)
        pools.append({
            "kind": "states", "manager": number, "group": _GROUPS * number + _STATES,
            "size": spec.state_slots or spec.slots or 0, "layers": [index for index, _ in states],
            "conv": list(conv.shape), "temporal": list(temporal.shape), "kernel": states[0][1].conv_kernel,
            "conv_dtype": DTYPES[conv.format], "dtype": DTYPES[temporal.format], "kda": states[0][1].algorithm == "kda",
            "envelope": envelope,
        })  # fmt: skip
    return pools


def layout_of(spec: CacheSpec, answer: Answer, name: str, engine: str) -> Layout:
    """Return the engine's tensors as a layout.

    Raises ``SpecError`` for an answer that makes no sense, and ``Rejected`` for a tensor that is not its layer's.
    """
    managers = manager_layers(spec)
    owners = {f"{layer.index}": (manager, layer.layer) for manager in managers for layer in manager.layers}
    cycles: dict[int, int] = {}
    life_cycles: list[LifeCycle] = []
    buffers: list[Buffer] = []
    accesses: list[Access] = []
    for view in answer.views:
        if view.name not in owners:
            raise SpecError("engine", f"{engine} answered a tensor of {shown(view.name)}, which it was not asked for")
        manager, layer = owners[view.name]
        kind = view.group % _GROUPS
        part = paged_part(layer)
        if view.group not in cycles:
            cycles[view.group] = len(life_cycles)
            window = part.window if part is not None and kind == _WINDOW else None
            life_cycles.append(LifeCycle(manager.name, kind, kind == _STATES, window))
        if kind == _STATES:
            role, page, step, count = _state(spec, layer, view, engine)
        else:
            if part is None:
                raise SpecError("engine", f"{engine} answered pages of layer {view.name}, which has none")
            role, page, step, count = _pages(spec, part, view, engine)
        held = Buffer(
            manager.name, int(view.name), role, cycles[view.group], view.allocation, view.offset, step, count,
            data_bytes(page), page,
        )  # fmt: skip
        consumer = "state-view" if kind == _STATES else "kv-view"
        accesses.append(Access(consumer, len(buffers), held.pool, held.offset_bytes, step, count, page))
        buffers.append(held)
    return Layout(
        allocator=name,
        pools=_pools(answer, buffers, life_cycles),
        life_cycles=tuple(life_cycles),
        buffers=tuple(buffers),
        accesses=tuple(accesses),
        head_maps=tuple([found for manager in managers for found in head_maps(manager, spec)]),
        stages=tuple([tuple(stage) for stage in stage_layers(spec)]),
        spec=spec,
        notes=(f"built by {engine}", "slot 0 of every pool is the sink that padding is written to"),
    )


def _state(spec: CacheSpec, layer: Any, view: View, engine: str) -> tuple[str, Page, int, int]:
    """Return role, page, step from slot to slot in bytes, and slots of one layer's state."""
    state = recurrent_part(layer)
    if state is None or view.part >= len(_STATE_ROLES):
        raise SpecError("engine", f"{engine} answered states of layer {view.name}, which has none")
    role, wanted = states_of(state, spec)[view.part]
    _require(view, dict(zip(wanted.axes, wanted.shape, strict=True)), wanted.format, engine)
    page = strided_page(wanted.format, view.axes[1:], view.shape[1:], view.stride_bytes[1:])
    return role, page, view.stride_bytes[0], view.shape[0]


def _pages(spec: CacheSpec, part: AttentionLayer | LatentLayer, view: View, engine: str) -> tuple[str, Page, int, int]:
    """Return role, page, step from page to page in bytes, and pages of one layer's tensor."""
    tokens, steps = spec.tokens_per_block, dict(zip(view.axes, view.stride_bytes, strict=True))
    sizes = dict(zip(view.axes, view.shape, strict=True))
    role, format, heads, dim = _row(spec, part, view, engine)
    containers = dim // format.elements_per_container if format.block_scaled else dim  # floor: exact, pairs in bytes
    if view.axes == ("block", "head", "token", "dim"):
        _require(view, {"head": heads, "token": tokens, "dim": containers}, format, engine)
        return (
            role,
            strided_page(format, view.axes[1:], view.shape[1:], view.stride_bytes[1:]),
            steps["block"],
            sizes["block"],
        )
    if view.axes == ("block", "content"):
        _require(view, {"content": tokens * heads * containers}, format, engine)
        step = steps["content"]
        strides = (heads * containers * step, containers * step, step)
        return (
            role,
            strided_page(format, ("token", "head", "dim"), (tokens, heads, containers), strides),
            steps["block"],
            sizes["block"],
        )
    rows, rest = divmod(sizes["row"], tokens)
    if rest:
        raise SpecError("engine", f"{engine} answered {sizes['row']} rows, which are no pages of {tokens} tokens")
    if "content" in sizes:
        _require(view, {"content": heads * containers}, format, engine)
        strides = (steps["row"], containers * steps["content"], steps["content"])
    else:
        _require(view, {"head": heads, "dim": containers}, format, engine)
        strides = (steps["row"], steps["head"], steps["dim"])
    page = strided_page(format, ("token", "head", "dim"), (tokens, heads, containers), strides)
    return role, page, tokens * steps["row"], rows


def _row(
    spec: CacheSpec, part: AttentionLayer | LatentLayer, view: View, engine: str
) -> tuple[str, ElementFormat, int, int]:
    """Return (role, format, heads, elements of a head) of one token in one tensor of a layer."""
    if isinstance(part, LatentLayer):
        if view.part == 0:
            return KEY, spec.kv_format, 1, part.row_dim
        plane = part.side_planes[0] if view.part == 1 and part.side_planes else None
        if plane is None:
            raise SpecError("engine", f"{engine} answered tensor {view.part} of layer {view.name}")
        return plane.role, plane.format, plane.heads, plane.dim
    if view.part >= len(_PAGED_ROLES):
        raise SpecError("engine", f"{engine} answered tensor {view.part} of layer {view.name}")
    role = _PAGED_ROLES[view.part]
    heads = div_up(part.kv_heads, spec.parallel.attention_tp)
    dim = part.head_dim if role in (KEY, KEY_SCALE) else part.value_dim
    if role in (KEY_SCALE, VALUE_SCALE):
        return role, ElementFormat.FP8, heads, dim // SCALE_BLOCK_ELEMENTS  # floor: exact, asked for no others
    return role, spec.kv_format, heads, dim


def _require(view: View, needed: dict[str, int], format: ElementFormat, engine: str) -> None:
    """Refuse a tensor whose axes or elements are not those of the layer."""
    found = {axis: size for axis, size in zip(view.axes, view.shape, strict=True) if axis not in ("row", "block")}
    if found == needed and view.item == format.container_bytes:
        return
    shape = ", ".join(f"{size} {axis}" for axis, size in found.items())
    wanted = ", ".join(f"{size} {axis}" for axis, size in needed.items())
    raise Rejected(
        f"{engine} made tensor {view.part} of layer {view.name} with {shape} of {view.item} B, and the layer needs "
        f"{wanted} of {format.container_bytes} B",
        "report the saved case to the engine",
        rule="unexplained-rejection",
    )


def _pools(answer: Answer, buffers: list[Buffer], life_cycles: list[LifeCycle]) -> tuple[Pool, ...]:
    """Return the storages as pools; raise ``SpecError`` for one that nobody's tensors lie in, or no whole slots."""
    pools = []
    counts: dict[tuple[str, int], int] = {}
    for number, size in enumerate(answer.allocations):
        inside = [held for held in buffers if held.pool == number]
        if not inside:
            raise SpecError("engine", f"answered a storage of {size} B that holds no tensor of a layer")
        cycle, slots = life_cycles[inside[0].life_cycle], inside[0].slot_count
        slot, rest = divmod(size, max(1, slots))
        if rest:
            raise SpecError("engine", f"answered a storage of {size} B for {slots} slots, which do not divide")
        place = cycle.manager, cycle.group
        counts[place] = counts.get(place, -1) + 1
        taken = sum(math.prod(held.page.shape) * held.page.format.container_bytes for held in inside)
        pools.append(Pool(*place, counts[place], slots, slot, size, ALIGNMENT_BYTES, max(0, slot - taken)))
    return tuple(pools)
