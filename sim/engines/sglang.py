"""SGLang's own pools as a ``Layout``, and the request that asks for them.

The engine is told one description per pool: its pools have one shape for all of their layers. What it answers are real
tensors. A pool's rows are token slots, page p being rows ``p * tokens`` and following; states have a slot per request.
Overlapping windows of draft tokens' convolutions are meant (``self_overlap``), and the two ends of a unified buffer are
shown with every page that was asked for at the low end and every state at the high end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ...model.arithmetic import div_up
from ...model.errors import SpecError, shown
from ...model.layers import AttentionLayer, LatentLayer, RecurrentLayer, paged_part, recurrent_part
from ...model.rank import ManagerLayers, manager_layers, stage_layers
from ...model.spec import CacheSpec
from ..allocators.sglang.pools import ALIGNMENT_BYTES, DRAFT_TOKENS, draft_states_of, page_count, paged_roles, states_of
from ..allocators.sglang.support import INDEX_DIM
from ..allocators.sglang.unified import PAGES_REGION, STATES_REGION, Ends, ends_of, regions, token_major
from ..allocators.trtllm.heads import head_maps
from ..layout import Access, Buffer, Layout, LifeCycle, Pool
from ..page import Page, data_bytes, strided_page
from ..rejection import Rejected
from .answer import Answer, View
from .vllm import DTYPES

FP4_DTYPE: Final = "float4_e2m1fn_x2"
PACKED_ROW: Final = 656
"""A published row of sparse latent attention in fp8: 512 elements, 4 scales of 4 B, and 64 elements of two bytes."""
_RANK, _ROPE = 512, 64

GROUPS: Final = {"full": 0, "window": 1, "states": 2, "drafts": 3}
"""Pools with ids of their own, and their groups in a layout."""

ENTRY: Final = "full.entry_bytes"
"""What the engine reports of a unified buffer alone: the bytes of a token over all layers."""

Role = tuple[str, Page]


def request_of(spec: CacheSpec, variant: str) -> dict[str, Any]:
    """Return the request for this rank; ``variant`` is ``plain``, ``envelope``, ``speculative`` or ``unified``.

    Raises ``Rejected`` where a quota leaves no page.
    """
    managers = manager_layers(spec)
    pages = page_count(managers, spec) - 1
    request: dict[str, Any] = {
        "order": spec.consumer.kv_layout,
        "tokens": spec.tokens_per_block,
        "pages": pages,
        "state_slots": spec.state_slots or pages,
        "request_slots": pages,
        "managers": [_described(manager, spec) for manager in managers],
    }
    if variant == "envelope":
        request["envelope"] = True
    if variant == "speculative":
        request["draft_tokens"] = DRAFT_TOKENS
    if variant == "unified":
        ends = ends_of(spec)
        request["unified_bytes"] = 0 if ends is None else ends.size_bytes
    return request


def _described(manager: ManagerLayers, spec: CacheSpec) -> dict[str, Any]:
    paged = [(layer.index, rows) for layer in manager.layers if (rows := paged_part(layer.layer)) is not None]
    full = [(index, part) for index, part in paged if part.window is None]
    window = [(index, part) for index, part in paged if part.window is not None]
    states = [(layer.index, part) for layer in manager.layers if (part := recurrent_part(layer.layer)) is not None]
    return {
        "name": manager.name,
        "full": _pool(full, spec) if full else None,
        "window": _pool(window, spec) if window else None,
        "states": _states(states, spec) if states else None,
    }


def _pool(layers: list[tuple[int, AttentionLayer | LatentLayer]], spec: CacheSpec) -> dict[str, Any]:
    """Return what a token pool is told; the first layer speaks for all, as the pool has one shape."""
    indices, first = [index for index, _ in layers], layers[0][1]
    described: dict[str, Any] = {"layers": indices, "dtype": DTYPES[spec.kv_format]}
    if isinstance(first, AttentionLayer):
        described |= {"kind": "mha", "dim": first.head_dim, "value_dim": first.value_dim}
        described["heads"] = div_up(first.kv_heads, spec.parallel.attention_tp)
        return described | ({"kind": "fp4", "dtype": FP4_DTYPE} if spec.kv_format.block_scaled else {})
    described |= {"kind": "mla", "dim": first.row_dim, "rank": first.latent_dim, "rope": first.rope_dim}
    indexed = [index for index, part in layers if part.side_planes]
    if indexed:
        described |= {"kind": "dsa", "indexed": indexed, "index_dim": INDEX_DIM}
        if first.row_dim == PACKED_ROW:
            described |= {"rank": _RANK, "rope": _ROPE}
    return described


def _states(layers: list[tuple[int, RecurrentLayer]], spec: CacheSpec) -> dict[str, Any]:
    first = layers[0][1]
    return {
        "layers": [index for index, _ in layers],
        "algorithm": first.algorithm,
        "heads": first.heads,
        "dim": first.head_dim,
        "state": first.state_dim,
        "groups": first.groups,
        "kernel": first.conv_kernel,
        "ranks": spec.parallel.state_tp,
        "conv": DTYPES[first.conv_format or spec.conv_format],
        "ssm": DTYPES[first.ssm_format or spec.state_format],
    }


def layout_of(spec: CacheSpec, answer: Answer, name: str, engine: str) -> Layout:
    """Return the engine's views of one rank as a layout.

    Raises ``SpecError`` for an answer that makes no sense, and ``Rejected`` for a view that is not its layer's.
    """
    seen = token_major(spec) if ENTRY in answer.reported else spec
    wanted = {key: role for manager in manager_layers(seen) for key, role in _wanted(manager, seen)}
    cycles = [_life_cycle(members[0], spec) for members in answer.groups if members]
    ends = _ends(spec, answer, engine)
    buffers = [_buffer(spec, view, wanted, ends, engine) for view in answer.views]
    missing = wanted.keys() - {(view.name, view.part) for view in answer.views}
    if missing:
        raise _unlike(engine, f"made no tensor for {wanted[min(missing)][0]} of {min(missing)[0]}")
    return Layout(
        allocator=name,
        pools=tuple(_pools(answer, buffers, cycles)) if ends is None else _regions(spec, ends, buffers),
        life_cycles=tuple(cycles),
        buffers=tuple(buffers),
        accesses=tuple(
            [
                Access(
                    "state-view" if cycles[held.life_cycle].recurrent else "kv-view", number, held.pool,
                    held.offset_bytes, held.slot_stride_bytes, held.slot_count, held.page,
                )
                for number, held in enumerate(buffers)
            ]
        ),
        head_maps=tuple([found for manager in manager_layers(spec) for found in head_maps(manager, spec)]),
        stages=tuple([tuple(stage) for stage in stage_layers(spec)]),
        spec=spec,
        notes=(f"pools made by {engine}", *_reported(answer, buffers)),
    )  # fmt: skip


def _wanted(manager: ManagerLayers, spec: CacheSpec) -> Iterator[tuple[tuple[str, int], Role]]:
    """Yield what each tensor of a manager has to hold, by its name and part."""
    for layer in manager.layers:
        paged, recurrent = paged_part(layer.layer), recurrent_part(layer.layer)
        if paged is not None:
            group = "full" if paged.window is None else "window"
            for part, role in enumerate(paged_roles(paged, spec)):
                yield (f"{manager.name}.{group}.{layer.index}", part), role
        if recurrent is not None:
            for part, role in enumerate(states_of(recurrent, spec)):
                yield (f"{manager.name}.states.{layer.index}", part), role


def _life_cycle(member: str, spec: CacheSpec) -> LifeCycle:
    manager, group, index = _place_of(member)
    if GROUPS[group] >= GROUPS["states"]:
        return LifeCycle(manager, GROUPS[group], True)
    paged = paged_part((spec.layers + spec.draft.layers)[index])
    return LifeCycle(manager, GROUPS[group], False, None if paged is None else paged.window)


def _place_of(name: str) -> tuple[str, str, int]:
    """Return manager, group and layer of a view's name."""
    manager, group, layer = name.split(".")
    return manager, group, int(layer)


def _ends(spec: CacheSpec, answer: Answer, engine: str) -> Ends | None:
    """Return the two ends of a unified buffer in use, by the engine's own floor and counts; None of other pools."""
    said = answer.reported
    if ENTRY not in said:
        return None
    states = spec.state_slots or spec.slots or 0
    first = div_up(said["full.min_slot"], spec.tokens_per_block)
    last = said["states.max_slots"] - states
    tokens, entry = said[ENTRY], said["states.entry_bytes"]
    pages = (first + (spec.slots or 0)) * spec.tokens_per_block
    if pages > said["full.max_slots"] or last < said["states.min_slot"] or pages * tokens > last * entry:
        raise _unlike(engine, f"has no room for {spec.slots} pages and {states} states: {said}")
    return Ends(tokens, entry, first, last, answer.allocations[0])


def _buffer(
    spec: CacheSpec,
    view: View,
    wanted: dict[tuple[str, int], Role],
    ends: Ends | None,
    engine: str,
) -> Buffer:
    """Return the buffer of one view, cut into pages; refuse one that is not what its layer needs."""
    manager, group, layer = _place_of(view.name)
    if group == "drafts":
        recurrent = recurrent_part(spec.layers[layer])
        role, page = draft_states_of(recurrent, spec)[view.part] if recurrent is not None else ("", None)
    else:
        role, page = wanted.get((view.name, view.part), ("", None))
    if page is None:
        raise SpecError("engine", f"{engine} answered a view of {shown(view.name)}, which it was not asked for")
    sizes = dict(zip(view.axes[1:], view.shape[1:], strict=True))
    steps = dict(zip(view.axes[1:], view.stride_bytes[1:], strict=True))
    step, slots = view.stride_bytes[0], view.shape[0]
    if view.axes[0] == "row":
        tokens = spec.tokens_per_block
        sizes["token"], steps["token"] = tokens, step
        step, slots = step * tokens, slots // tokens  # floor: rows behind the last whole page are never handed out
    if "content" in sizes:
        _unpack(sizes, steps, page)
    shape = tuple([sizes.get(axis, 1) for axis in page.axes])
    if shape != page.shape or view.item != page.format.container_bytes or len(sizes) > len(page.axes):
        found = ", ".join(f"{size} {axis}" for axis, size in zip(view.axes, view.shape, strict=True))
        needed = ", ".join(f"{size} {axis}" for axis, size in zip(page.axes, page.shape, strict=True))
        raise _unlike(engine, f"made {role} of {view.name} as {found}, and the layer needs {needed} in a slot")
    strides = tuple([steps.get(axis, page.format.container_bytes) for axis in page.axes])
    held = strided_page(page.format, page.axes, shape, strides)
    if page.self_overlap:
        held = page if strides == page.stride_bytes else held
    pool = view.allocation
    if ends is not None:  # views span the whole buffer; what is in use lies in a region of it
        pool = PAGES_REGION if group == "full" else STATES_REGION
        slots = (spec.slots if group == "full" else spec.state_slots or spec.slots) or 0
    return Buffer(manager, layer, role, view.group, pool, view.offset, step, slots, data_bytes(held), held)


def _unpack(sizes: dict[str, int], steps: dict[str, int], page: Page) -> None:
    """Cut a run of bytes, scales of a row or index keys of a page, into the axes that the layer has in it."""
    held, pitch = sizes.pop("content"), steps.pop("content")
    for axis, size in reversed([*zip(page.axes, page.shape, strict=True)]):
        if axis not in sizes:
            sizes[axis], steps[axis] = size, pitch
            held, rest = divmod(held, size)
            pitch *= size
            if rest:
                sizes[axis] = 0  # no whole number of them: the shape will not fit
    if held != 1:
        sizes[page.axes[-1]] *= held


def _unlike(engine: str, what: str) -> Rejected:
    return Rejected(f"{engine} {what}", "report the saved case to the engine", rule="unexplained-rejection")


def _pools(answer: Answer, buffers: list[Buffer], cycles: list[LifeCycle]) -> Iterator[Pool]:
    """Yield the storages as pools, each with the slots of its own views."""
    seen: dict[tuple[str, int], int] = {}
    for number, size in enumerate(answer.allocations):
        held = [buffer for buffer in buffers if buffer.pool == number]
        first = cycles[held[0].life_cycle]
        slots = max([1, *[buffer.slot_count for buffer in held]])
        place = first.manager, first.group
        index = seen[place] = seen.get(place, -1) + 1
        slot, rest = divmod(size, slots)
        if rest:  # rows padded to whole pages: what lies behind the last page belongs to no slot
            slot = sum(buffer.page_bytes for buffer in held)
        yield Pool(first.manager, first.group, index, slots, slot, size, ALIGNMENT_BYTES)


def _regions(spec: CacheSpec, ends: Ends, buffers: list[Buffer]) -> tuple[Pool, ...]:
    return regions(ends, spec.tokens_per_block, spec.slots or 0, spec.state_slots or spec.slots or 0, buffers)


def _reported(answer: Answer, buffers: list[Buffer]) -> Iterator[str]:
    """Yield what the engine says of its sizes, where its storages say otherwise."""
    by_manager: dict[str, int] = {}
    for name, size in answer.reported.items():
        if name.rpartition(".")[2] in ("key", "value", "states"):
            manager = name.partition(".")[0]
            by_manager[manager] = by_manager.get(manager, 0) + size
    for manager, said in by_manager.items():
        held = sum(answer.allocations[pool] for pool in {one.pool for one in buffers if one.manager == manager})
        if said != held:
            yield f"the engine reports {said} B for its {manager} pools, whose storages take {held} B"
