"""Blocks, and what all eras share of a layout: life cycles, head maps, refusals that only the sizes show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ....model.rank import manager_layers, stage_layers
from ....model.spec import CacheSpec
from ...finding import Where
from ...layout import Access, Buffer, Layout, LifeCycle, Pool
from ...rejection import Rejected
from ..trtllm.heads import head_maps
from ..trtllm.support import refuse_unsupported
from .cells import Cell
from .grouping import Unifying, group_layers
from .layer_specs import CachedLayer, cached_layers
from .support import reasons

ALIGNMENT_BYTES = 512
"""Allocations of the framework's caching allocator are at least this aligned."""

MANAGER = "target"

Groups = list[list[CachedLayer]]


class Build(msgspec.Struct):
    """What has been laid out so far: one life cycle per group, all of one allocator of block ids."""

    pools: list[Pool] = []
    life_cycles: list[LifeCycle] = []
    buffers: list[Buffer] = []
    accesses: list[Access] = []


class Deployment(msgspec.Struct, frozen=True):
    """This rank's groups (a group may be empty on a rank) and the number of blocks, equal on all ranks.

    ``hybrid`` says that the rank has both pages and states.
    """

    groups: Groups
    blocks: int
    hybrid: bool


def plan(spec: CacheSpec, era: int, unifying: Unifying, block_bytes: Callable[[Groups], int]) -> Deployment:
    """Return the groups of ``spec`` on its rank; ``block_bytes`` is what one block takes on a rank with these groups.

    Groups are formed over all pipeline stages and then projected, so every stage has the same groups; the number of
    blocks is the least of all stages. Raises ``Rejected`` for what the era does not support.
    """
    refuse_unsupported(reasons(spec, era))
    layers = cached_layers(spec)
    groups = group_layers(layers, unifying)
    stages = range(spec.parallel.pp)
    projected = [[[layer for layer in group if layer.stage == stage] for group in groups] for stage in stages]
    blocks = spec.slots
    if blocks is None:
        quota = spec.quota_bytes or 0
        sizes = [size for size in map(block_bytes, projected) if size]
        blocks = min((quota // size for size in sizes), default=1)  # floor: whole blocks
        if blocks == 0:
            raise Rejected(
                f"a quota of {quota} B leaves no block: one takes {max(sizes)} B on the largest pipeline stage",
                "give a larger quota",
                supported=False,
            )
    mine = projected[spec.parallel.coordinates(spec.rank).pp_rank]
    kinds = {layer.spec.kind == "recurrent" for group in mine for layer in group}
    return Deployment(mine, blocks, len(kinds) == 2)


def refuse_kernel_blocks(groups: Groups, kernel_tokens: int | None) -> None:
    """Refuse kernel blocks that do not divide the planner's, and a split of padded pages or of block scales."""
    for spec in dict.fromkeys(layer.spec for group in groups for layer in group):
        if kernel_tokens is None or spec.kind == "recurrent" or spec.block_tokens == kernel_tokens:
            continue
        if spec.block_tokens % kernel_tokens or spec.padded_bytes is not None or spec.format.block_scaled:
            raise Rejected(
                f"blocks of {spec.block_tokens} tokens cannot be seen as kernel blocks of {kernel_tokens}: they must "
                "be a whole number of them, unpadded and without block scales",
                "choose a kernel block that divides the block, and pages of one size",
                supported=False,
            )


def add_life_cycles(build: Build, groups: Groups) -> None:
    """Add a life cycle for every group; empty ones too, so that numbers are those of the planner."""
    for group in groups:
        first = group[0].spec if group else None
        recurrent = first is not None and first.kind == "recurrent"
        build.life_cycles.append(LifeCycle(MANAGER, 0, recurrent, None if first is None else first.window))


def add_cells(
    build: Build, cycle: int, layer: CachedLayer, pool: int, first: int, stride: int, blocks: int, cells: list[Cell]
) -> None:
    """Add one layer's cells: block ``b`` of its page starts at ``first + b * stride`` bytes of ``pool``."""
    consumer = "state-view" if layer.spec.kind == "recurrent" else "kv-view"
    for cell in cells:
        start = first + cell.offset_bytes
        _refuse_misaligned(layer, cell, start, stride)
        build.accesses.append(Access(consumer, len(build.buffers), pool, start, stride, blocks, cell.page))
        size = min(cell.page.span_bytes, _data_bytes(cell))
        build.buffers.append(
            Buffer(MANAGER, layer.index, cell.role, cycle, pool, start, stride, blocks, size, cell.page)
        )


def _refuse_misaligned(layer: CachedLayer, cell: Cell, start: int, stride: int) -> None:
    """Refuse a view that cannot be made: it must start, and step, by whole elements of its own."""
    item = cell.page.format.container_bytes
    for size, what in ((start, "starts at byte"), (stride, "steps by bytes")):
        if size % item:
            raise Rejected(
                f"layer {layer.index}'s {cell.role} {what} {size}, which is no multiple of a {cell.page.format.value} "
                f"element ({item} B): pages and states lie back to back, and the view cannot be made",
                "choose formats of one width, or sizes that are multiples of the widest element",
                where=(Where(manager=MANAGER, layer=layer.index, role=cell.role),),
                supported=False,
            )


def _data_bytes(cell: Cell) -> int:
    size = cell.page.format.container_bytes
    for count in cell.page.shape:
        size *= count
    return size


def add_pool(build: Build, slot_bytes: int, blocks: int) -> int:
    """Add a pool of ``blocks`` slots and return its number; ``finished`` fills in its padding."""
    build.pools.append(Pool(MANAGER, 0, len(build.pools), blocks, slot_bytes, slot_bytes * blocks, ALIGNMENT_BYTES))
    return len(build.pools) - 1


def finished(build: Build, spec: CacheSpec, allocator: str, notes: Sequence[str] = ()) -> Layout:
    """Return the layout: what no group uses of a slot is padding."""
    used: dict[tuple[int, int], int] = {}
    for buffer in build.buffers:
        place = buffer.pool, buffer.life_cycle
        used[place] = used.get(place, 0) + buffer.page_bytes
    most = [max((size for (pool, _), size in used.items() if pool == number), default=0)
            for number in range(len(build.pools))]  # fmt: skip
    pools = [
        msgspec.structs.replace(pool, padding_bytes=pool.slot_bytes - taken)
        for pool, taken in zip(build.pools, most, strict=True)
    ]
    return Layout(
        allocator=allocator,
        pools=tuple(pools),
        life_cycles=tuple(build.life_cycles),
        buffers=tuple(build.buffers),
        accesses=tuple(build.accesses),
        head_maps=tuple([found for manager in manager_layers(spec) for found in head_maps(manager, spec)]),
        stages=tuple([tuple(stage) for stage in stage_layers(spec)]),
        spec=spec,
        notes=tuple(notes),
    )
