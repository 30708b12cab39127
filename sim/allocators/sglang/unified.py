"""SGLang's unified buffer: token pages from its low end up, and states from its high end down.

A token's entry holds the rows of all layers (K and V of layer 0, of layer 1, ...) and is rounded up to 32 B; a
request's entry holds its states as an envelope does. Slots of both count from byte 0, each in steps of its own entry.
What lies below the floor, the largest entry or page, is the sink of both. The layout shows the fullest state: every
page that was asked for at the low end, every state at the high end, in the smallest buffer that holds them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ....model.arithmetic import div_up, round_up
from ....model.layers import LatentLayer, Layer, RecurrentLayer, paged_part, recurrent_part
from ....model.rank import RankLayer, manager_layers, stage_layers
from ....model.spec import CacheSpec
from ...layout import Access, Buffer, Layout, LifeCycle, Pool
from ...page import Page, data_bytes, strided_page
from ..trtllm.heads import head_maps
from ..trtllm.support import refuse_unsupported
from .pools import ALIGNMENT_BYTES, paged_roles, require_whole, states_of
from .support import Reasons, reasons

ENTRY_BYTES: Final = 32
"""What a token's entry is a multiple of."""
ROW_BYTES: Final = 16
"""What every row of a layer is a multiple of."""
PAGES_REGION, STATES_REGION = 1, 3
GROUPS: Final = (0, 0, 0, 2)
"""Groups of the regions of a buffer: sink, pages, free bytes, states."""


class Ends(msgspec.Struct, frozen=True):
    """The sizes of one buffer: ``entry_bytes`` of tokens and of states, the first page and state that are in use, and
    ``size_bytes`` in all."""

    token_entry_bytes: int
    state_entry_bytes: int
    first_page: int
    first_state: int
    size_bytes: int


def lay_out_unified(spec: CacheSpec, allocator: str) -> Layout:
    """Return the unified buffer of ``spec``; raise ``Rejected`` for what it does not hold."""
    refuse_unsupported(unified_reasons(spec))
    [manager] = manager_layers(spec)
    ends = ends_of(spec)
    if ends is None:
        return Layout(allocator=allocator, pools=(), life_cycles=(), buffers=(), stages=_stages(spec), spec=spec)
    states, slots = spec.state_slots or spec.slots or 0, spec.slots or 0
    buffers: list[Buffer] = []
    start, step = 0, ends.token_entry_bytes
    for layer in manager.layers:
        for role, page in _rows(layer.layer, spec):
            rows = strided_page(page.format, page.axes, page.shape, (step, *page.stride_bytes[1:]))
            buffers.append(_buffer(layer, role, PAGES_REGION, start, spec.tokens_per_block * step, slots, rows))
            start += page.stride_bytes[0]
    recurrent = [layer for layer in manager.layers if recurrent_part(layer.layer) is not None]
    offset, entry = 0, ends.state_entry_bytes
    for role, page in _states(recurrent, spec):
        require_whole(role, page, offset, entry, recurrent[0].index)
        for layer in recurrent:
            buffers.append(_buffer(layer, role, STATES_REGION, offset, entry, states, page))
            offset += page.span_bytes
    return Layout(
        allocator=allocator,
        pools=regions(ends, spec.tokens_per_block, slots, states, buffers),
        life_cycles=(LifeCycle("target", 0), LifeCycle("target", 2, True)),
        buffers=tuple(buffers),
        accesses=tuple([_access(number, held) for number, held in enumerate(buffers)]),
        head_maps=tuple(head_maps(manager, spec)),
        stages=_stages(spec),
        spec=spec,
        notes=("the bytes below the first page are the sink that padding is written to",),
    )


def regions(ends: Ends, tokens: int, slots: int, states: int, buffers: list[Buffer]) -> tuple[Pool, ...]:
    """Return one buffer as four pools, one behind the other: the sink, the pages, what is free, and the states.

    ``tokens`` are those of a page; ``buffers`` lie in the second and the fourth. The regions must not overlap.
    """
    page = tokens * ends.token_entry_bytes
    bounds = [0, ends.first_page * page, (ends.first_page + slots) * page]
    bounds += [ends.first_state * ends.state_entry_bytes, ends.size_bytes]
    slot_sizes = [bounds[1], page, bounds[3] - bounds[2], ends.state_entry_bytes]
    pools = []
    for number, (count, size) in enumerate(zip((1, slots, 1, states), slot_sizes, strict=True)):
        used = sum(held.page_bytes for held in buffers if held.pool == number)
        group = GROUPS[number]
        region = bounds[number + 1] - bounds[number]
        pools.append(
            Pool("target", group, number, count, size, region, ALIGNMENT_BYTES if not number else 1, size - used)
        )
    return tuple(pools)


def unified_reasons(spec: CacheSpec) -> Reasons:
    """Yield why a spec has no unified buffer, as (message, remedy)."""
    yield from reasons(spec)
    if spec.draft.layers or spec.kv_format.block_scaled:
        yield "a unified buffer with draft layers or block scales is not modelled", "use --allocator sglang"
    if spec.quota_bytes is not None:
        yield "how a quota is split between pools is not modelled for SGLang", "give --slots"
    paged = [part for part in map(paged_part, spec.layers) if part is not None]
    if any(part.window is not None or part.side_planes for part in paged):
        yield "a unified buffer with windows or index keys is not modelled", "use --allocator sglang"
    if any(isinstance(part, LatentLayer) and not part.rope_dim for part in paged):
        yield "the unified buffer takes latent rows with a rope part only", "give rope_dim"
    layers = [layer.layer for manager in manager_layers(spec) for layer in manager.layers]
    if layers and not (any(map(paged_part, layers)) and any(map(recurrent_part, layers))):
        yield "a unified buffer needs layers with pages and layers with states on each rank", "use --allocator sglang"
    short = next((part for part in map(recurrent_part, spec.layers) if part is not None and not part.state_dim), None)
    if short is not None:
        yield "a unified buffer without temporal states is not modelled", "use --allocator sglang"
    for part in dict.fromkeys(paged):
        for role, page in paged_roles(part, token_major(spec)):
            if page.stride_bytes[0] % ROW_BYTES:
                yield (
                    f"a row of {page.stride_bytes[0]} B of {role} is no multiple of {ROW_BYTES} B",
                    "use --allocator sglang",
                )


def token_major(spec: CacheSpec) -> CacheSpec:
    """Return ``spec`` with pages of rows, which is how a unified buffer has them whatever the consumer asks."""
    return msgspec.structs.replace(spec, consumer=msgspec.structs.replace(spec.consumer, kv_layout="NHD"))


def ends_of(spec: CacheSpec) -> Ends | None:
    """Return the sizes of this rank's buffer, None where no layer of the rank is cached."""
    [manager] = manager_layers(spec)
    if not manager.layers:
        return None
    row = sum(page.stride_bytes[0] for layer in manager.layers for _, page in _rows(layer.layer, spec))
    recurrent = [layer for layer in manager.layers if recurrent_part(layer.layer) is not None]
    tokens = round_up(row, ENTRY_BYTES)
    entry = len(recurrent) * sum(page.span_bytes for _, page in _states(recurrent, spec))
    floor = max(tokens * spec.tokens_per_block, entry)
    first = div_up(div_up(floor, tokens), spec.tokens_per_block)
    low = (first + (spec.slots or 0)) * spec.tokens_per_block * tokens
    states = spec.state_slots or spec.slots or 0
    size = round_up((div_up(low, entry) + states) * entry, ENTRY_BYTES)
    return Ends(tokens, entry, first, size // entry - states, size)  # floor: a rest holds no entry


def _rows(layer: Layer, spec: CacheSpec) -> list[tuple[str, Page]]:
    paged = paged_part(layer)
    return [] if paged is None else paged_roles(paged, token_major(spec))


def _states(layers: list[RankLayer], spec: CacheSpec) -> list[tuple[str, Page]]:
    first: RecurrentLayer | None = recurrent_part(layers[0].layer)
    return [] if first is None else states_of(first, spec)


def _buffer(layer: RankLayer, role: str, region: int, first: int, step: int, slots: int, page: Page) -> Buffer:
    cycle = int(region == STATES_REGION)
    return Buffer("target", layer.index, role, cycle, region, first, step, slots, data_bytes(page), page)


def _access(number: int, held: Buffer) -> Access:
    consumer = "state-view" if held.life_cycle else "kv-view"
    return Access(consumer, number, held.pool, held.offset_bytes, held.slot_stride_bytes, held.slot_count, held.page)


def _stages(spec: CacheSpec) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(stage) for stage in stage_layers(spec)])
