"""What ``kvsan matrix`` does once its options are known.

A cell examines the first rank of every pipeline stage and takes the worst of them for its status and its message; index
scale, mapping offsets and side planes are those of the first stage that has K pages. When a cell is refused, index
scale and mapping offsets are null and the side planes 0.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from ..model.architecture import Architecture
from ..model.errors import SpecError
from ..model.formats import KV_FORMATS, ElementFormat
from ..model.loading import Deployment, LoadedSpec, deploy
from ..model.parallel import ParallelLayout
from ..model.spec import CacheSpec
from ..sim.layout import Layout
from .allocator_choice import choose_allocator
from .deployment import Given, name_option, read_deployment, read_format, read_list, read_model, read_partition
from .document import mapping_offsets_of
from .examination import Examination, NamedAllocator, examine, worst
from .output import print_report, stdout_kept, terminal, watched, write_json
from .status import CLEAN, WRONG
from .wording import counted


class Cell(msgspec.Struct, frozen=True):
    """One combination, and what came of it. ``layout`` and ``kv_dtype`` are canonical names."""

    layout: str
    kv_dtype: str
    allocator: str
    status: str
    index_scale: int | None
    mapping_offsets: tuple[int, ...] | None
    side_planes_bytes: int
    message: str | None


class JudgedCell(msgspec.Struct, frozen=True):
    """A cell with the examination that decided it; the report shows its cause and its remedy."""

    cell: Cell
    decisive: Examination


def run_matrix(
    config: str, given: Given, layouts: str, kv_dtypes: str | None, allocators: str | None, json: bool
) -> int:
    """Run ``matrix``; return the exit status."""
    with stdout_kept():  # an allocator of somebody's own may print
        deployment = read_deployment({**given, "--pp-partition": None})
        parallels = _read_layouts(layouts, given)
        formats = _read_formats(kv_dtypes)
        names = [None] if allocators is None else list(dict.fromkeys(read_list("--allocators", allocators)))
        model = read_model(config)
        specs = [
            _deploy_cell(model, deployment, parallel, kv_format, given, config)
            for kv_format in formats
            for parallel in parallels
        ]
        chosen = [choose_allocator(name, specs[0].spec, "--allocators") for name in names]
        work = list(itertools.product(chosen, specs))
        cells = [_judge(allocator, loaded, deployment.rank) for allocator, loaded in watched(work, "cells")]
    if json:
        write_json({"cells": [judged.cell for judged in cells]})
    else:
        from .report_matrix import report_matrix

        console = terminal()
        report_matrix(console, cells)
        print_report(console)
    return CLEAN if all(judged.cell.status == "clean" for judged in cells) else WRONG


def _read_layouts(text: str, given: Given) -> list[ParallelLayout]:
    """Return the layouts of a list, each once; those with as many stages as --pp-partition has entries get it."""
    written = given.get("--pp-partition")
    partition = read_partition(written if isinstance(written, str) else None)
    layouts = {}
    for name in read_list("--layouts", text):
        try:
            layout = ParallelLayout.parse(name)
            if partition is not None and layout.pp == len(partition):
                layout = ParallelLayout.parse(name, partition)
        except SpecError as error:
            option = "--pp-partition" if error.field == "pp_partition" else "--layouts"
            raise SpecError(option, str(error) if error.field != "layout" else error.problem) from None
        layouts[layout.name] = layout
    if partition is not None and all(layout.pp_partition is None for layout in layouts.values()):
        raise SpecError("--pp-partition", f"found {counted(len(partition), 'stage')}, and no layout has as many")
    return list(layouts.values())


def _read_formats(text: str | None) -> list[ElementFormat | None]:
    """Return the KV formats of a list, each once; None stands for the model's own."""
    if text is None:
        return [None]
    names = read_list("--kv-dtypes", text)
    return list(dict.fromkeys(read_format("--kv-dtypes", name, KV_FORMATS) for name in names))


def _deploy_cell(
    model: Architecture | CacheSpec,
    deployment: Deployment,
    parallel: ParallelLayout,
    kv_format: ElementFormat | None,
    given: Given,
    config: str,
) -> LoadedSpec:
    """Return the spec of a cell's first rank, or of the rank asked for."""
    rank = 0 if deployment.rank is None else deployment.rank
    changes: dict[str, Any] = {"parallel": parallel, "kv_format": kv_format, "rank": rank}
    try:
        return deploy(model, msgspec.structs.replace(deployment, **changes))
    except SpecError as error:
        if error.field == "rank":
            raise SpecError("--rank", f"{error.problem}, for layout {parallel.name}") from None
        if error.field == "pp_partition":
            raise SpecError("--pp-partition", error.problem) from None
        if error.field in ("tp", "pp", "ep", "cp"):
            raise SpecError("--layouts", f"{parallel.name}: {error}") from None
        raise name_option(error, given, config) from None


def _judge(allocator: NamedAllocator, loaded: LoadedSpec, rank: int | None) -> JudgedCell:
    """Examine every pipeline stage of a cell, or the one rank asked for."""
    parallel = loaded.spec.parallel
    stage_ranks = parallel.tp * parallel.cp
    ranks = range(0, parallel.world_size, stage_ranks) if rank is None else (rank,)
    specs = [msgspec.structs.replace(loaded.spec, rank=rank) for rank in ranks]
    stages = [examine(spec, allocator, loaded.inferred) for spec in specs]
    decisive = worst(stages)
    shown: Layout | None = None
    keys: list[int] = []
    if decisive.status != "rejected":
        layouts = [stage.layout for stage in stages if stage.layout is not None]
        shown = next((layout for layout in layouts if _target_keys(layout)), layouts[0])
        keys = _target_keys(shown)
    offsets = mapping_offsets_of(shown) if shown is not None else {}
    cell = Cell(
        layout=parallel.name,
        kv_dtype=loaded.spec.kv_format.value,
        allocator=allocator.name,
        status=decisive.status,
        index_scale=_index_scale(shown),
        mapping_offsets=None if shown is None else tuple([offsets[key] for key in keys]),
        side_planes_bytes=0 if shown is None else shown.side_planes_bytes,
        message=decisive.message,
    )
    return JudgedCell(cell, decisive)


def _target_keys(layout: Layout) -> list[int]:
    """Return the target's K buffers that page tables serve, in layer order."""
    keys = [key for table in layout.tables if table.manager == "target" for key in table.key_buffers]
    return sorted(keys, key=lambda key: layout.buffers[key].layer)


def _index_scale(layout: Layout | None) -> int | None:
    """Return the pages per slot that the first page table of the target with a K page counts."""
    tables = layout.tables if layout is not None else ()
    return next((table.index_scale for table in tables if table.manager == "target" and table.key_buffers), None)
