"""Era 3: one allocation per worker, which all groups overlay from its first byte, in one of six physical orders.

An order names the axes from outermost in: layers L, blocks B, heads H, tokens N, content C (K and V of one head and
token side by side). A tensor covers the layers of one spec in one group; the next spec of the group follows behind it.
"""

from __future__ import annotations

from typing import Final

from ....model.spec import CacheSpec
from ...layout import Layout
from ...rejection import Rejected
from .building import (
    ALIGNMENT_BYTES,
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
from .cells import Cell, content_cells, row_cells, state_cells
from .grouping import Unifying
from .layer_specs import CachedLayer, LayerSpec, cached_layers

ORDERS: Final = ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC")
"""The physical orders; layers outermost, or blocks outermost."""

_Tensor = tuple[LayerSpec, list[CachedLayer]]


def lay_out_overlay(spec: CacheSpec, allocator: str, order: str, kernel_tokens: int | None = None) -> Layout:
    """Return era 3's layout in ``order``; raise ``Rejected`` for what is not supported, in that order or at all."""
    deployment = plan(spec, 3, Unifying(True, True, keeps_sizes=order[0] == "B"), overlay_block_bytes)
    groups = deployment.groups
    _refuse_order(spec, order)
    if kernel_tokens is not None and order[:2] != "LB":
        raise Rejected(
            f"order {order} has no dense pages side by side, which kernel blocks need",
            "use LBNHC or LBHNC, or kernel blocks as large as the planner's",
            supported=False,
        )
    refuse_kernel_blocks(groups, kernel_tokens)
    build = Build()
    add_life_cycles(build, groups)
    kv_layout = "NHD" if order.index("N") < order.index("H") else "HND"
    if order[0] == "B":
        _blocks_outermost(build, deployment, order, kv_layout)
    elif len({layer.spec.page_bytes for group in groups for layer in group}) > 1:
        _regions(build, deployment, kv_layout, kernel_tokens)
    else:
        _layers_outermost(build, deployment, order, kv_layout, kernel_tokens)
    return finished(build, spec, allocator, (f"physical order {order}",))


def overlay_block_bytes(groups: Groups) -> int:
    """Return the bytes of one block: those of the largest group, which the others overlay."""
    return max((sum(layer.spec.page_bytes for layer in group) for group in groups), default=0)


def _tensors(group: list[CachedLayer]) -> list[_Tensor]:
    by_spec: dict[LayerSpec, list[CachedLayer]] = {}
    for layer in group:
        by_spec.setdefault(layer.spec, []).append(layer)
    return list(by_spec.items())


def _refuse_order(spec: CacheSpec, order: str) -> None:
    """Refuse scattered orders for pages that are not all alike: their blocks would not be the same bytes."""
    if "H" in order[:2]:
        specs = dict.fromkeys(layer.spec for layer in cached_layers(spec))
        alike = len({layer.content for layer in specs}) <= 1
        if not alike or any(layer.format.block_scaled for layer in specs):
            raise Rejected(
                f"order {order} scatters a page over its block, which needs pages of one shape, unpadded and without "
                "block scales",
                "use an order in which layers and blocks are the two outermost axes",
                supported=False,
            )


def _layers_outermost(
    build: Build, deployment: Deployment, order: str, kv_layout: str, kernel_tokens: int | None
) -> None:
    """Lay out pages of one size: each layer's blocks side by side (``LHBNC``: each head's)."""
    blocks = deployment.blocks
    block = overlay_block_bytes(deployment.groups)
    pool = add_pool(build, block, blocks) if block else 0
    for cycle, group in enumerate(deployment.groups):
        ordered = [layer for _, layers in _tensors(group) for layer in layers]
        for place, layer in enumerate(ordered):
            spec, page = layer.spec, layer.spec.page_bytes
            stride, head_stride = page, None
            if order == "LHBNC" and spec.kind != "recurrent":
                stride = spec.block_tokens * (spec.dim + spec.value_dim) * spec.format.container_bytes
                head_stride = blocks * stride
            cells = _cells(spec, kv_layout, head_stride, kernel_tokens)
            add_cells(build, cycle, layer, pool, place * blocks * page, stride, blocks, cells)


def _regions(build: Build, deployment: Deployment, kv_layout: str, kernel_tokens: int | None) -> None:
    """Lay out one group of several page sizes, layers outermost: a region of the allocation for each tensor.

    Regions follow each other; each is a pool here, since blocks are stepped by another distance in each.
    """
    blocks = deployment.blocks
    start = 0
    for cycle, group in enumerate(deployment.groups):
        for spec, layers in _tensors(group):
            item = 1 if spec.kind == "recurrent" else spec.format.container_bytes
            if start % max(item, *(state.format.container_bytes for state in spec.states), 1):
                raise Rejected(
                    f"the {spec.kind} tensor of pages of {spec.page_bytes} B starts {start} B into the allocation, "
                    "which is no multiple of its element",
                    f"choose a number of blocks that makes it one (a multiple of {ALIGNMENT_BYTES}, say)",
                    supported=False,
                )
            pool = add_pool(build, len(layers) * spec.page_bytes, blocks)
            for place, layer in enumerate(layers):
                first = place * blocks * spec.page_bytes
                cells = _cells(spec, kv_layout, None, kernel_tokens)
                add_cells(build, cycle, layer, pool, first, spec.page_bytes, blocks, cells)
            start += len(layers) * blocks * spec.page_bytes


def _blocks_outermost(build: Build, deployment: Deployment, order: str, kv_layout: str) -> None:
    """Lay out a block as one run of bytes: tensor after tensor, in it layer after layer (``BHLNC``: head by head)."""
    groups, blocks = deployment.groups, deployment.blocks
    block = overlay_block_bytes(groups)
    pool = add_pool(build, block, blocks) if block else 0
    for cycle, group in enumerate(groups):
        start = 0
        for spec, layers in _tensors(group):
            step, head_stride = spec.page_bytes, None
            if order == "BHLNC" and spec.kind != "recurrent":
                step = spec.block_tokens * (spec.dim + spec.value_dim) * spec.format.container_bytes
                head_stride = len(layers) * step
            for place, layer in enumerate(layers):
                cells = _cells(spec, kv_layout, head_stride)
                add_cells(build, cycle, layer, pool, start + place * step, block, blocks, cells)
            start += len(layers) * spec.page_bytes


def _cells(spec: LayerSpec, kv_layout: str, head_stride: int | None, kernel_tokens: int | None = None) -> list[Cell]:
    if spec.kind == "recurrent":
        return state_cells(spec)
    if spec.kind == "attention":
        return content_cells(spec, kv_layout, head_stride, kernel_tokens)
    return row_cells(spec)
