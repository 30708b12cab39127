"""Every single number of a small sound layout is watched by some rule.

One field of one member is changed at a time, to its neighbours and to other members' values; ``check`` must notice.
``MEANT`` lists what may change unnoticed, each with the reason; anything else that goes unnoticed is a hole in the
rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec
import pytest

from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.sim.checking import check
from kvsan.sim.layout import Buffer, Layout, PageTable
from kvsan.sim.page import Page, strided_page

replace = msgspec.structs.replace

Mutant: TypeAlias = tuple[str, str, Callable[[], Layout]]
"""The kind of change (a field's name), where it is, and the changed layout."""

NUMBERS = {
    "pools": ("slot_count", "slot_bytes", "size_bytes", "alignment_bytes", "padding_bytes", "group"),
    "life_cycles": ("group", "window", "sink_blocks"),
    "buffers": ("layer", "life_cycle", "pool", "offset_bytes", "slot_stride_bytes", "slot_count", "page_bytes"),
    "tables": (
        "life_cycle",
        "pool",
        "pointer_bytes",
        "page_bytes",
        "index_scale",
        "kv_factor",
        "kv_offset",
        "expansion",
        "row_offset",
        "scale_pool",
        "scale_pointer_bytes",
        "scale_page_bytes",
        "scale_index_scale",
    ),
    "accesses": ("buffer", "pool", "offset_bytes", "pitch_bytes", "cell_count", "part", "first_slot", "slot_step"),
    "head_maps": ("heads", "rank_heads"),
}
SEQUENCES = {"tables": ("layers", "key_buffers", "mapping_offsets"), "head_maps": ("layers",)}

LAYOUTS = (
    "v1-windows",
    "v1-nvfp4",
    "v1-hybrid",
    "v2-windows",
    "v2-per-layer",
    "v2-latent",
    "v2-nvfp4",
    "v2-expanded",
    "v2-draft",
    "packed-nvfp4",
    "packed-pipeline",
)
"""The layouts that are mutated: one of each kind."""

MEANT = {
    "pools.size_bytes+1": "memory behind the last slot is slack: pools are mapped in whole chunks",
    "pools.alignment_bytes-1": "asked for only where a consumer declares an alignment",
    "pools.alignment_bytes+1": "asked for only where a consumer declares an alignment",
    "pools.group-1": "a label for reports: several groups may overlay one pool, and cells ask their life cycle",
    "pools.group+1": "a label for reports: several groups may overlay one pool, and cells ask their life cycle",
    "life_cycles.group-1": "a number of its own for each allocator of slot ids; merged groups are tested with alias",
    "life_cycles.group+1": "a number of its own for each allocator of slot ids; merged groups are tested with alias",
    "life_cycles.window-1": "says when blocks go stale, which no address depends on",
    "life_cycles.window+1": "says when blocks go stale, which no address depends on",
    "life_cycles.sink_blocks-1": "says which blocks never go stale, which no address depends on",
    "life_cycles.sink_blocks+1": "says which blocks never go stale, which no address depends on",
    "accesses removed": "fewer consumers are no fault",
    "page.dense": "derived from the strides by the functions that make pages",
    "page.self_overlap": "declares an overlap on purpose, here of a page that has none",
    "tables.missing_lanes=()": "a table without entries for missing pages",
    "block_bytes removed": "without an estimate there is nothing to compare",
}


def neighbours(value: int) -> Iterator[tuple[str, int]]:
    yield "-1", value - 1
    yield "+1", value + 1


def put(members: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*members[:index], value, *members[index + 1 :])


def page_mutants(page: Page) -> Iterator[tuple[str, Page]]:
    for axis, size in enumerate(page.shape):
        for sign, wrong in neighbours(size):
            if wrong:
                shape = put(page.shape, axis, wrong)
                yield f"page.shape{sign}", strided_page(page.format, page.axes, shape, page.stride_bytes)
    for axis, stride in enumerate(page.stride_bytes):
        for sign, wrong in neighbours(stride):
            strides = put(page.stride_bytes, axis, wrong)
            yield f"page.stride_bytes{sign}", strided_page(page.format, page.axes, page.shape, strides)
    for sign, wrong in neighbours(page.span_bytes):
        yield f"page.span_bytes{sign}", replace(page, span_bytes=wrong)
    if len(page.axes) > 1:
        yield "page.axes swapped", replace(page, axes=(page.axes[1], page.axes[0], *page.axes[2:]))
    for other in ElementFormat:
        if other is not page.format and other.container_bytes == page.format.container_bytes:
            yield "page.format", replace(page, format=other)
    yield "page.dense", replace(page, dense=not page.dense)
    yield "page.self_overlap", replace(page, self_overlap=True)


def number_mutants(layout: Layout, with_member: Callable[..., Layout]) -> Iterator[Mutant]:
    for field, names in NUMBERS.items():
        for index, member in enumerate(getattr(layout, field)):
            for name in names:
                value = getattr(member, name)
                if value is None or unread(field, member, name):
                    continue
                for sign, wrong in neighbours(value):
                    change = functools.partial(with_member, field, index, **{name: wrong})
                    yield f"{field}.{name}{sign}", f"{field}[{index}].{name} {value} -> {wrong}", change
    for field, names in SEQUENCES.items():
        for index, member in enumerate(getattr(layout, field)):
            for name in names:
                values = getattr(member, name)
                for at, value in enumerate(values):
                    for sign, wrong in neighbours(value):
                        change = functools.partial(with_member, field, index, **{name: put(values, at, wrong)})
                        yield f"{field}.{name}{sign}", f"{field}[{index}].{name}[{at}] {value} -> {wrong}", change
                change = functools.partial(with_member, field, index, **{name: values[:-1]})
                yield f"{field}.{name} shortened", f"{field}[{index}].{name}", change


def unread(field: str, member: Any, name: str) -> bool:
    """Whether a table without block scales has nothing to say in this field."""
    return field == "tables" and name.startswith("scale_") and member.scale_pool is None


def buffer_mutants(layout: Layout, with_member: Callable[..., Layout]) -> Iterator[Mutant]:
    for index, buffer in enumerate(layout.buffers):
        change = functools.partial(with_member, "buffers", index)
        mates = {other.role for other in layout.buffers if other.layer == buffer.layer} - {buffer.role}
        for role in sorted(mates):
            yield (
                "buffers.role twice",
                f"buffers[{index}] {buffer.role} -> {role}",
                functools.partial(change, role=role),
            )
        if buffer.role == "key":
            yield "buffers.role of a K page", f"buffers[{index}]", functools.partial(change, role="other")
        yield "buffers.manager", f"buffers[{index}]", functools.partial(change, manager="other")
        if not buffer.parts:  # where there are parts, they are what is stored
            for kind, page in page_mutants(buffer.page):
                yield named("buffers", kind), f"buffers[{index}].{kind}", functools.partial(change, page=page)
            continue
        yield "buffers.parts shortened", f"buffers[{index}]", functools.partial(change, parts=buffer.parts[:-1])
        for kind, where, parts in part_mutants(buffer):
            yield kind, f"buffers[{index}].{where}", functools.partial(change, parts=parts)


def part_mutants(buffer: Buffer) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    for at, part in enumerate(buffer.parts):
        for name in ("layer", "offset_bytes"):
            for sign, wrong in neighbours(getattr(part, name)):
                changed = put(buffer.parts, at, replace(part, **{name: wrong}))
                yield f"parts.{name}{sign}", f"parts[{at}].{name} -> {wrong}", changed
        twin = next((other for other in buffer.parts if other.role == part.role and other.layer != part.layer), None)
        if twin is not None:
            yield "parts.layer twice", f"parts[{at}]", put(buffer.parts, at, replace(part, layer=twin.layer))
        for kind, page in page_mutants(part.page):
            yield named("parts", kind), f"parts[{at}].{kind}", put(buffer.parts, at, replace(part, page=page))


def named(field: str, kind: str) -> str:
    """Name a change of a page by where it is, unless it is meant to go unnoticed everywhere."""
    return kind if kind in MEANT else f"{field}.{kind}"


def other_mutants(layout: Layout, with_member: Callable[..., Layout]) -> Iterator[Mutant]:
    for index, access in enumerate(layout.accesses):
        for kind, page in page_mutants(access.page):
            change = functools.partial(with_member, "accesses", index, page=page)
            yield named("accesses", kind), f"accesses[{index}].{kind}", change
        without = functools.partial(replace, layout, accesses=layout.accesses[:index] + layout.accesses[index + 1 :])
        yield "accesses removed", f"accesses[{index}]", without
    for index, table in enumerate(layout.tables):
        yield from table_mutants(table, index, with_member)
    for index, cycle in enumerate(layout.life_cycles):
        change = functools.partial(with_member, "life_cycles", index)
        yield "life_cycles.recurrent", f"life_cycles[{index}]", functools.partial(change, recurrent=not cycle.recurrent)
        yield "life_cycles.manager", f"life_cycles[{index}]", functools.partial(change, manager="other")
    for index, heads in enumerate(layout.head_maps):
        for at, (first, end) in enumerate(heads.ranges):
            for wrong in ((first - 1, end), (first + 1, end), (first, end - 1), (first, end + 1)):
                change = functools.partial(with_member, "head_maps", index, ranges=put(heads.ranges, at, wrong))
                yield "head_maps.ranges", f"head_maps[{index}].ranges[{at}] -> {wrong}", change
    for index, stage in enumerate(layout.stages):
        for at, layer in enumerate(stage):
            for sign, wrong in neighbours(layer):
                stages = put(layout.stages, index, put(stage, at, wrong))
                yield (
                    f"stages{sign}",
                    f"stages[{index}][{at}] -> {wrong}",
                    functools.partial(replace, layout, stages=stages),
                )
    for index, (manager, estimate) in enumerate(layout.block_bytes):
        for sign, wrong in neighbours(estimate):
            estimates = put(layout.block_bytes, index, (manager, wrong))
            yield f"block_bytes{sign}", f"{manager} {wrong}", functools.partial(replace, layout, block_bytes=estimates)
        yield "block_bytes removed", manager, functools.partial(replace, layout, block_bytes=())


def table_mutants(table: PageTable, index: int, with_member: Callable[..., Layout]) -> Iterator[Mutant]:
    change = functools.partial(with_member, "tables", index)
    yield "tables.manager", f"tables[{index}]", functools.partial(change, manager="other")
    if table.scale_pool is not None:
        yield "tables.scale_pool removed", f"tables[{index}]", functools.partial(change, scale_pool=None)
    if table.missing_lanes:
        yield "tables.missing_lanes=()", f"tables[{index}]", functools.partial(change, missing_lanes=())
        yield "tables.missing_guard", f"tables[{index}]", functools.partial(change, missing_guard=None)
        yield "tables.missing_guard", f"tables[{index}]", functools.partial(change, missing_guard="negative")
    if len(table.missing_lanes) > 1:
        yield "tables.missing_lanes+1", f"tables[{index}]", functools.partial(change, missing_lanes=(0, 1))


@pytest.fixture(scope="module")
def unnoticed(sound: Mapping[str, Layout]) -> dict[str, list[str]]:
    """Return, for each kind of change, where it went unnoticed; an empty list where it never did."""
    missed: dict[str, list[str]] = {}
    for name in LAYOUTS:
        layout = sound[name]

        def with_member(field: str, index: int, layout: Layout = layout, **values: Any) -> Layout:
            members = getattr(layout, field)
            return replace(layout, **{field: put(members, index, replace(members[index], **values))})

        for mutants in (number_mutants, buffer_mutants, other_mutants):
            for kind, where, change in mutants(layout, with_member):
                places = missed.setdefault(kind, [])
                try:
                    noticed = bool(check(change()))
                except SpecError:
                    noticed = True  # a reference to nothing
                except Exception as error:
                    noticed = False
                    where += f" ({type(error).__name__}: {error})"
                if not noticed:
                    places.append(f"{name}: {where}")
    return missed


KINDS = [
    *(f"{field}.{name}{sign}" for field, names in NUMBERS.items() for name in names for sign in ("-1", "+1")),
    *(
        f"{field}.{name}{how}"
        for field, names in SEQUENCES.items()
        for name in names
        for how in ("-1", "+1", " shortened")
    ),
    *(
        f"{field}.page.{how}"
        for field in ("buffers", "parts", "accesses")
        for how in (
            "shape-1",
            "shape+1",
            "stride_bytes-1",
            "stride_bytes+1",
            "span_bytes-1",
            "span_bytes+1",
            "axes swapped",
            "format",
        )
    ),
    *("page.dense", "page.self_overlap", "accesses removed"),
    *("buffers.role twice", "buffers.role of a K page", "buffers.manager", "buffers.parts shortened"),
    *("parts.layer-1", "parts.layer+1", "parts.layer twice", "parts.offset_bytes-1", "parts.offset_bytes+1"),
    *("tables.manager", "tables.scale_pool removed", "tables.missing_lanes=()", "tables.missing_lanes+1"),
    *("tables.missing_guard", "life_cycles.recurrent", "life_cycles.manager", "head_maps.ranges"),
    *("stages-1", "stages+1", "block_bytes-1", "block_bytes+1", "block_bytes removed"),
]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MEANT])
def test_a_change_is_noticed(unnoticed: dict[str, list[str]], kind: str) -> None:
    assert kind in unnoticed, "no layout has such a member"
    missed = unnoticed[kind]
    assert not missed, f"{len(missed)} times, such as {'; '.join(missed[:3])}"


@pytest.mark.parametrize("kind", MEANT)
def test_what_goes_unnoticed_still_does(unnoticed: dict[str, list[str]], kind: str) -> None:
    """An exception that is no longer needed is taken off the list."""
    assert unnoticed[kind] != []


def test_every_kind_is_listed(unnoticed: dict[str, list[str]]) -> None:
    assert sorted(unnoticed) == sorted(set(KINDS))
