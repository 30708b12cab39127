"""Eras 1 and 2: a tensor per place in a group, shared by the layers that hold that place in each group.

Era 1 views K/V as FlashAttention does, all K before all V, unless the model has recurrent states as well: then every
layer with pages is restrided, so that a block of it is the block of bytes that the states have. Era 2 puts the block
first always. Packed, era 2 cuts one allocation into blocks, and blocks into places.
"""

from __future__ import annotations

from typing import Final

from ....model.arithmetic import exact_div
from ....model.spec import CacheSpec
from ...layout import Layout
from .building import (
    Build,
    Deployment,
    Groups,
    add_cells,
    add_life_cycles,
    add_pool,
    finished,
    plan,
    refuse_kernel_blocks,
)
from .cells import Cell, plane_cells, row_cells, split_cells, state_cells
from .grouping import Unifying
from .layer_specs import CachedLayer, LayerSpec

UNIFYING: Final = {1: Unifying(False, False), 2: Unifying(False, False)}
"""What the two eras do to make pages equal: neither pads."""


def lay_out_slot_tensors(spec: CacheSpec, era: int, allocator: str, kernel_tokens: int | None = None) -> Layout:
    """Return the layout of era ``era`` with one tensor per place; raise ``Rejected`` for what it does not support."""
    deployment = plan(spec, era, UNIFYING[era], slot_block_bytes)
    return _slot_tensors(spec, deployment, era, allocator, kernel_tokens)


def _slot_tensors(
    spec: CacheSpec, deployment: Deployment, era: int, allocator: str, kernel_tokens: int | None = None
) -> Layout:
    refuse_kernel_blocks(deployment.groups, kernel_tokens)
    groups, blocks = deployment.groups, deployment.blocks
    build = Build()
    add_life_cycles(build, groups)
    pools = [add_pool(build, size, blocks) for size in _places(groups)]
    keys_first = era == 1 and not deployment.hybrid
    for cycle, group in enumerate(groups):
        for place, layer in enumerate(group):
            kv_layout = spec.consumer.kv_layout
            if layer.spec.kind == "attention" and keys_first:
                half = exact_div(layer.spec.natural_bytes, 2, "page of K and V")
                tokens = kernel_tokens or layer.spec.block_tokens
                cells = plane_cells(layer.spec, kv_layout, blocks * half, tokens)
                add_cells(build, cycle, layer, pools[place], 0, half, blocks, cells)
            else:
                cells = block_first_cells(layer.spec, kv_layout, kernel_tokens)
                add_cells(build, cycle, layer, pools[place], 0, layer.spec.page_bytes, blocks, cells)
    return finished(build, spec, allocator)


def lay_out_packed(spec: CacheSpec, allocator: str) -> Layout:
    """Return era 2's packed layout: block ``b`` of a place starts at ``offset + b * block_stride`` of one allocation.

    Places are counted for each page size apart, the sizes in the order in which they come up. One group alone is not
    packed: its layers keep a tensor each.
    """
    deployment = plan(spec, 2, UNIFYING[2], packed_block_bytes)
    if len(deployment.groups) <= 1:
        return _slot_tensors(spec, deployment, 2, allocator)
    groups, blocks = deployment.groups, deployment.blocks
    build = Build()
    add_life_cycles(build, groups)
    block = packed_block_bytes(groups)
    pool = add_pool(build, block, blocks) if block else 0
    base: dict[int, int] = {}
    start = 0
    for size, count in _counts(groups).items():
        base[size] = start
        start += size * count
    for cycle, group in enumerate(groups):
        taken: dict[int, int] = {}
        for layer in group:
            size = layer.spec.page_bytes
            place = taken.get(size, 0)
            taken[size] = place + 1
            cells = block_first_cells(layer.spec, spec.consumer.kv_layout)
            add_cells(build, cycle, layer, pool, base[size] + place * size, block, blocks, cells)
    return finished(build, spec, allocator)


def slot_block_bytes(groups: Groups) -> int:
    """Return the bytes of one block: the pages of all places."""
    return sum(_places(groups))


def packed_block_bytes(groups: Groups) -> int:
    """Return the bytes of one block: of each page size as many as any group has."""
    return sum(size * count for size, count in _counts(groups).items())


def block_first_cells(spec: LayerSpec, kv_layout: str, kernel_tokens: int | None = None) -> list[Cell]:
    """Return the cells of a page that is one run of bytes, K's half before V's in each kernel block."""
    if spec.kind == "recurrent":
        return state_cells(spec)
    if spec.kind == "attention":
        return split_cells(spec, kv_layout, kernel_tokens or spec.block_tokens)
    return row_cells(spec)


def _places(groups: Groups) -> list[int]:
    """Return the page of each place: several groups have pages of one size, a single one may have any."""
    longest = max(map(len, groups), default=0)
    return [max(_page(group, place) for group in groups) for place in range(longest)]


def _page(group: list[CachedLayer], place: int) -> int:
    return group[place].spec.page_bytes if place < len(group) else 0


def _counts(groups: Groups) -> dict[int, int]:
    counts: dict[int, int] = {}
    for group in groups:
        own: dict[int, int] = {}
        for layer in group:
            own[layer.spec.page_bytes] = own.get(layer.spec.page_bytes, 0) + 1
        for size, count in own.items():
            counts[size] = max(counts.get(size, 0), count)
    return counts
