"""vLLM's own plan and views as a ``Layout``, and the request that asks for them.

The engine is told one entry per layer, in its planner's terms (``sim.allocators.vllm.layer_specs``). What it answers
are real tensors: storage, offset, shape and strides of each view. Roles are cut out of a view the way the engine's own
readers do: K and V are halves of the content axis in era 3, of an axis of two before it.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import msgspec

from ...model.errors import SpecError, shown
from ...model.formats import ElementFormat
from ...model.rank import manager_layers, stage_layers
from ...model.spec import CacheSpec
from ..allocators.trtllm.heads import head_maps
from ..allocators.vllm.building import ALIGNMENT_BYTES, MANAGER
from ..allocators.vllm.cells import Cell, content_cells
from ..allocators.vllm.layer_specs import CachedLayer, LayerSpec, cached_layers
from ..layout import KEY, VALUE, Access, Buffer, Layout, LifeCycle
from ..page import data_bytes, strided_page
from ..rejection import Rejected
from .answer import Answer, View, pools_of

DTYPES: Final = {
    ElementFormat.FP32: "float32",
    ElementFormat.FP16: "float16",
    ElementFormat.BF16: "bfloat16",
    ElementFormat.FP8: "float8_e4m3fn",
    ElementFormat.FP8_E5M2: "float8_e5m2",
    ElementFormat.INT8: "int8",
    ElementFormat.UINT8: "uint8",
    ElementFormat.NVFP4: "uint8",
    ElementFormat.INT32: "int32",
    ElementFormat.INT64: "int64",
}
"""Names of torch dtypes by format; packed pairs are bytes."""

_SIDES: Final = 2
"""K and V: two head slots per head in nvfp4 pages, and the axis of two before era 3."""


_AT_WORK: Final = 16
"""Specs that are looked at in turn: the engine works on one while the answer about another is read."""


@functools.lru_cache(maxsize=_AT_WORK)
def _entries(spec: CacheSpec) -> tuple[CachedLayer, ...]:
    """Return the planner's layers, once for the question and the answer about one spec; equal pages are one object."""
    pages: dict[LayerSpec, LayerSpec] = {}
    layers = cached_layers(spec)
    return tuple([CachedLayer(one.index, one.stage, pages.setdefault(one.spec, one.spec)) for one in layers])


def entry_name(layer: CachedLayer) -> str:
    """Return the name under which the engine knows one entry of a layer."""
    return f"layers.{layer.index}.{layer.spec.kind}.{layer.spec.role}"


@functools.lru_cache(maxsize=_AT_WORK)
def request_of(spec: CacheSpec, order: str) -> dict[str, Any]:
    """Return the request for a spec: the entries of all pipeline stages, which stage is this rank's, and the memory.

    It is made once and must not be changed.

    ``order`` is a physical order of era 3, or ``NHD`` or ``HND`` before it.
    """
    stages = range(spec.parallel.pp)
    entries = _entries(spec)
    return {
        "order": order,
        "stages": [[_described(entry) for entry in entries if entry.stage == stage] for stage in stages],
        "stage": spec.parallel.coordinates(spec.rank).pp_rank,
        "blocks": spec.slots,
        "bytes": None if spec.quota_bytes is None else [spec.quota_bytes for _ in stages],
    }


def _described(layer: CachedLayer) -> dict[str, Any]:
    spec = layer.spec
    described: dict[str, Any] = {
        "name": entry_name(layer),
        "kind": spec.kind,
        "block": spec.block_tokens,
        "padded": spec.padded_bytes,
        "window": spec.window,
    }
    if spec.kind == "recurrent":
        return described | {
            "shapes": [list(state.shape) for state in spec.states],
            "axes": [list(state.axes) for state in spec.states],
            "dtypes": [DTYPES[state.format] for state in spec.states],
        }
    described |= {"heads": spec.heads, "dim": spec.dim, "value_dim": spec.value_dim, "dtype": DTYPES[spec.format]}
    if spec.format.block_scaled:
        described["slots"] = _SIDES * spec.heads
        described["content"] = _nvfp4_content_bytes(spec)
    return described


def _nvfp4_content_bytes(spec: LayerSpec) -> int:
    """Return the bytes of one side, head and token: data and the scales behind it."""
    one = msgspec.structs.replace(spec, heads=1, value_dim=0)
    return one.token_bytes


def layout_of(spec: CacheSpec, answer: Answer, name: str, order: str, engine: str) -> Layout:
    """Return the engine's views of one rank as a layout.

    Raises ``SpecError`` for an answer that makes no sense, and ``Rejected`` for a view that is not its layer's.
    """
    entries = {entry_name(entry): entry for entry in _entries(spec)}
    life_cycles = [_life_cycle(members, entries) for members in answer.groups]
    buffers: list[Buffer] = []
    accesses: list[Access] = []
    alike: dict[object, list[tuple[Cell, int, int]]] = {}  # layers repeat: what one view holds, the next like it does
    for view in answer.views:
        entry = entries.get(view.name)
        if entry is None:
            raise SpecError("engine", f"{engine} answered a view of {shown(view.name)}, which it was not asked for")
        view = _whole_blocks(view, answer.blocks, entry.spec)
        consumer = "state-view" if entry.spec.kind == "recurrent" else "kv-view"
        key = id(entry.spec), view.part, view.shape, view.stride, view.item
        cells = alike.get(key)
        if cells is None:
            found = _cells(entry.spec, view, order, answer.blocks, engine)
            cells = alike[key] = [(cell, step, data_bytes(cell.page)) for cell, step in found]
        for cell, step, size in cells:
            if answer.blocks == 1:  # a single block steps nowhere, and torch may say anything
                step = answer.allocations[view.allocation]
            held = Buffer(
                MANAGER, entry.index, cell.role, view.group, view.allocation, view.offset + cell.offset_bytes, step,
                answer.blocks, size, cell.page,
            )  # fmt: skip
            accesses.append(
                Access(consumer, len(buffers), held.pool, held.offset_bytes, step, answer.blocks, cell.page)
            )
            buffers.append(held)
    return Layout(
        allocator=name,
        pools=pools_of(answer, buffers, MANAGER, ALIGNMENT_BYTES),
        life_cycles=tuple(life_cycles),
        buffers=tuple(buffers),
        accesses=tuple(accesses),
        head_maps=tuple([found for manager in manager_layers(spec) for found in head_maps(manager, spec)]),
        stages=tuple([tuple(stage) for stage in stage_layers(spec)]),
        spec=spec,
        notes=(f"planned and viewed by {engine}",),
    )


def _life_cycle(members: tuple[str, ...], entries: dict[str, CachedLayer]) -> LifeCycle:
    """Return the life cycle of one group; empty groups keep their number."""
    specs = [entries[name].spec for name in members if name in entries]
    recurrent = bool(specs) and specs[0].kind == "recurrent"
    windows = {spec.window for spec in specs}  # layers of several keep all their blocks
    return LifeCycle(MANAGER, 0, recurrent, windows.pop() if len(windows) == 1 else None)


def _whole_blocks(view: View, blocks: int, spec: LayerSpec) -> View:
    """Return a view with the planner's blocks: where it has kernel blocks, they are an axis ``page`` of a block."""
    count, rest = divmod(view.shape[0], max(1, blocks))
    if spec.kind == "recurrent" or rest or count < 2 or len(view.axes) < 2:
        return view
    return msgspec.structs.replace(
        view,
        axes=(view.axes[0], "page", *view.axes[1:]),
        shape=(blocks, count, *view.shape[1:]),
        stride=(view.stride[0] * count, view.stride[0], *view.stride[1:]),
    )


def _cells(spec: LayerSpec, view: View, order: str, blocks: int, engine: str) -> list[tuple[Cell, int]]:
    """Return the roles in one view, from its first byte on, each with its step from block to block in bytes."""
    steps = dict(zip(view.axes, view.stride_bytes, strict=True))
    if spec.kind == "recurrent":
        if view.part >= len(spec.states):
            raise SpecError("engine", f"{engine} answered {view.part + 1} states of {shown(view.name)}")
        state = spec.states[view.part]
        _require(dict(zip(state.axes, state.shape, strict=True)), view, blocks, engine)
        return [_cell(state.role, state.format, state.axes, view, 0, steps)]
    sizes = {"head": spec.heads, "token": spec.block_tokens}
    if "content" not in view.axes:
        _require(sizes | {"dim": spec.dim}, view, blocks, engine)
        role = (KEY, VALUE)[view.part] if spec.kind == "attention" else spec.role
        return [_cell(role, spec.format, view.axes[1:], view, 0, steps)]
    if spec.format.block_scaled:
        content = _nvfp4_content_bytes(spec)
        _require(sizes | {"head": _SIDES * spec.heads, "content": content}, view, blocks, engine)
        kv_layout = "NHD" if order.index("N") < order.index("H") else "HND"
        tokens = dict(zip(view.axes, view.shape, strict=True))["token"]
        seen = msgspec.structs.replace(spec, block_tokens=tokens)
        cells = content_cells(seen, kv_layout)  # the kernel's own convention, which the view does not show
        return [(cell, steps[view.axes[0]]) for cell in cells]
    _require(sizes | {"content": spec.dim + spec.value_dim}, view, blocks, engine)
    axes = ("page", "token", "head", "dim") if "page" in view.axes else ("token", "head", "dim")
    if spec.kind != "attention":
        return [_cell(spec.role, spec.format, axes, view, 0, steps)]
    return [
        _cell(KEY, spec.format, axes, view, 0, steps, spec.dim),
        _cell(VALUE, spec.format, axes, view, spec.dim, steps, spec.value_dim),
    ]


def _cell(
    role: str, format: ElementFormat, axes: tuple[str, ...], view: View, first: int, steps: dict[str, int],
    dim: int | None = None,
) -> tuple[Cell, int]:  # fmt: skip
    """Return one role of a view, from element ``first`` of its last axis on (``dim`` elements of it, None: all)."""
    sizes = dict(zip(view.axes, view.shape, strict=True))
    last = view.axes[-1]
    shape = tuple([sizes[last] if axis not in sizes else sizes[axis] for axis in axes])
    strides = tuple([steps[last] if axis not in steps else steps[axis] for axis in axes])
    if dim is not None:
        shape = (*shape[:-1], dim)
    page = strided_page(format, axes, shape, strides)
    return Cell(role, first * steps[last], page), steps[view.axes[0]]


def _require(needed: dict[str, int], view: View, blocks: int, engine: str) -> None:
    """Refuse a view whose axes are not those of the layer; one head may be left out, and tokens may be a multiple:
    the planner gives a block more of them where pages must become as large as others."""
    found = dict(zip(view.axes[1:], view.shape[1:], strict=True))
    tokens = found.get("token", 1) * found.get("page", 1)
    fits = all(found.get(axis, 1) == size for axis, size in needed.items() if axis != "token")
    if view.shape[0] == blocks and fits and tokens % needed.get("token", 1) == 0:
        return
    shape = ", ".join(f"{size} {axis}" for axis, size in zip(view.axes, view.shape, strict=True))
    wanted = ", ".join(f"{size} {axis}" for axis, size in needed.items())
    raise Rejected(
        f"{engine} viewed {view.name} as {shape}, and the layer needs {blocks} blocks, {wanted}",
        "report the saved case to the engine",
        rule="unexplained-rejection",
    )
