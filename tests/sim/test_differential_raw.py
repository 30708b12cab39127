"""Arena, static rules and brute force, compared on random layouts that no allocator made, sound and unsound.

Views may step by the slot, by the page or by anything; pages may have gaps, broadcast axes and elements that overlap;
life cycles of one group overlay each other. ``brute`` enumerates the bytes of every element of every cell in plain
Python, and is short enough to be read as the definition of the three rules.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from kvsan.model.formats import ElementFormat
from kvsan.sim.arena import arena_findings
from kvsan.sim.checking import check
from kvsan.sim.layout import Access, Buffer, Layout, LifeCycle, Part, Pool
from kvsan.sim.page import Page, strided_page
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected
from kvsan.sim.rules import alias, bounds, op_address

FORMATS = (ElementFormat.UINT8, ElementFormat.UINT8, ElementFormat.BF16, ElementFormat.FP32)
ON_BYTES = (bounds.RULE, alias.RULE, op_address.RULE)


def _neighbour(name: str) -> ModuleType:
    """Import a helper module that lies beside this file; tests are no package."""
    spec = importlib.util.spec_from_file_location(f"kvsan_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


random_spec = _neighbour("random_specs").random_spec


# Random layouts


def draw_page(draw: random.Random) -> Page:
    element = draw.choice(FORMATS)
    item = element.container_bytes
    rank = draw.randint(0, 3)
    shape = tuple(draw.randint(1, 4) for _ in range(rank))
    gaps = draw.random() < 0.4
    strides = [0] * rank
    pitch = item
    for axis in draw.sample(range(rank), rank):
        strides[axis] = pitch
        pitch = pitch * shape[axis] + (draw.choice((0, 0, 1, 2, item)) if gaps else 0)
    if rank and draw.random() < 0.06:
        strides[draw.randrange(rank)] = draw.choice((0, 1, 2, 3, item, 2 * item))
    return strided_page(element, ("a", "b", "c")[:rank], shape, tuple(strides))


def draw_parts(draw: random.Random, page: Page, layer: int, role: str) -> tuple[Part, ...]:
    """Return nothing, or two planes that share out the page: exactly, or with a byte in common."""
    if not page.dense or page.span_bytes < 3 or draw.random() < 0.8:
        return ()
    cut = draw.randint(1, page.span_bytes - 1)
    first, second = (strided_page(ElementFormat.UINT8, ("b",), (size,), (1,)) for size in (cut, page.span_bytes - cut))
    return (Part(layer, f"{role}p", 0, first), Part(layer, f"{role}q", max(0, cut - draw.choice((0, 0, 0, 1))), second))


def draw_buffers(draw: random.Random, pools: list[Pool], cycle_count: int) -> list[Buffer]:
    buffers = []
    style = draw.choice(("slots", "slots", "layers", "scattered", "free"))
    for number, pool in enumerate(pools):
        free: dict[int, int] = {}  # first free byte of the slot, by life cycle: these may overlay each other
        end = 0
        for layer in range(draw.randint(1, 4)):
            cycle = draw.randrange(cycle_count) if draw.random() < 0.5 else number % cycle_count
            page = draw_page(draw)
            count = pool.slot_count if draw.random() < 0.8 else draw.randint(1, pool.slot_count)
            if style == "slots":
                stride, offset = pool.slot_bytes, free.get(cycle, 0)
                free[cycle] = offset + page.span_bytes
            elif style == "layers":
                stride, offset = page.span_bytes, end
                end += stride * count
            elif style == "scattered":
                stride = draw.choice((1, 2, 4, pool.slot_bytes))
                offset = draw.choice((0, stride * count, draw.randrange(pool.size_bytes)))
            else:
                stride = draw.choice((pool.slot_bytes, page.span_bytes, draw.randint(0, 40)))
                offset = draw.randrange(pool.size_bytes)
            if draw.random() < 0.08:
                offset += draw.choice((-1, 1, 2, -4, page.span_bytes))
            count += draw.random() < 0.03
            role = f"r{number}{layer}of{len(buffers)}"
            parts = draw_parts(draw, page, layer, role)
            buffers.append(
                Buffer("target", layer, role, cycle, number, offset, stride, count, page.span_bytes, page, parts)
            )
    return buffers


def draw_access(draw: random.Random, index: int, buffer: Buffer, pool_count: int) -> Access:
    """Return an access that is right, or wrong in one respect."""
    part = draw.randrange(len(buffer.parts)) if buffer.parts and draw.random() < 0.7 else -1
    page = buffer.parts[part].page if part >= 0 else buffer.page
    offset = buffer.offset_bytes + (buffer.parts[part].offset_bytes if part >= 0 else 0)
    first, step = draw.choice((0, 0, 0, min(1, buffer.slot_count - 1))), draw.choice((1, 1, 1, 2))
    cells = len(range(first, buffer.slot_count, step))
    offset += first * buffer.slot_stride_bytes
    pitch, pool = step * buffer.slot_stride_bytes, buffer.pool
    fault = draw.random()
    if fault < 0.06:
        offset += draw.choice((-1, 1, 2, 4, page.span_bytes))
    elif fault < 0.11:
        pitch += draw.choice((-1, 1, 2, page.span_bytes))
    elif fault < 0.15:
        page = draw_page(draw)
    elif fault < 0.17:
        pool = draw.randrange(pool_count)
    return Access("view", index, pool, offset, pitch, cells, page, part, first, step)


def draw_layout(seed: int) -> Layout:
    draw = random.Random(seed)
    groups = draw.choice((1, 1, 2))
    cycles = [LifeCycle("target", group) for group in range(groups) for _ in range(draw.choice((1, 1, 2, 3)))]
    pools = []
    for number in range(draw.choice((1, 1, 2))):
        count, slot_bytes = draw.randint(1, 5), draw.choice((8, 24, 48, 100, 200))
        pools.append(Pool("target", draw.randrange(groups), number, count, slot_bytes, count * slot_bytes))
    buffers = draw_buffers(draw, pools, len(cycles))
    accesses = [
        draw_access(draw, index, buffer, len(pools))
        for index, buffer in enumerate(buffers)
        for _ in range(draw.choice((0, 1, 1, 2)))
    ]
    return Layout(
        allocator="raw",
        pools=tuple(pools),
        life_cycles=tuple(cycles),
        buffers=tuple(buffers),
        accesses=tuple(accesses),
    )


# Brute force: the three rules by enumeration


def cell_bytes(page: Page, start: int) -> list[int]:
    found = []
    for index in itertools.product(*map(range, page.shape)):
        first = start + sum(x * stride for x, stride in zip(index, page.stride_bytes, strict=True))
        found += range(first, first + page.format.container_bytes)
    return found


class Owned(msgspec.Struct, frozen=True):
    pool: int
    buffer: int
    part: int
    slot: int
    bytes: frozenset[int]


def brute(layout: Layout) -> set[str]:
    """Return the rules that ``layout`` breaks, cell by cell and byte by byte."""
    cells = owned_cells(layout)
    found = brute_bounds(layout)
    for buffer in layout.buffers:
        once = cell_bytes(buffer.page, 0)
        if buffer.slot_count and not buffer.page.self_overlap and len(set(once)) < len(once):
            found.add("alias")
    for one, other in itertools.combinations(cells, 2):
        if one.pool == other.pool and one.bytes & other.bytes and both_live(layout, one, other):
            found.add("alias")
    return found | brute_accesses(layout, cells)


def both_live(layout: Layout, one: Owned, other: Owned) -> bool:
    first, second = layout.buffers[one.buffer].life_cycle, layout.buffers[other.buffer].life_cycle
    groups = [(layout.life_cycles[cycle].manager, layout.life_cycles[cycle].group) for cycle in (first, second)]
    return first == second or groups[0] != groups[1] or one.slot != other.slot


def inside(layout: Layout, places: list[int], pool: int) -> bool:
    return all(0 <= place < layout.pools[pool].size_bytes for place in places)


def plane(buffer: Buffer, part: int) -> tuple[int, Page]:
    if part < 0:
        return buffer.offset_bytes, buffer.page
    return buffer.offset_bytes + buffer.parts[part].offset_bytes, buffer.parts[part].page


def owned_cells(layout: Layout) -> list[Owned]:
    """Return every cell that lies in its pool; of packed buffers their parts'."""
    cells = []
    for index, buffer in enumerate(layout.buffers):
        for part in range(len(buffer.parts)) if buffer.parts else (-1,):
            offset, page = plane(buffer, part)
            for slot in range(buffer.slot_count):
                places = cell_bytes(page, offset + slot * buffer.slot_stride_bytes)
                if inside(layout, places, buffer.pool):
                    cells.append(Owned(buffer.pool, index, part, slot, frozenset(places)))
    return cells


def brute_bounds(layout: Layout) -> set[str]:
    for buffer in layout.buffers:
        pool, once = layout.pools[buffer.pool], cell_bytes(buffer.page, buffer.offset_bytes)
        cells = [
            cell_bytes(buffer.page, buffer.offset_bytes + s * buffer.slot_stride_bytes)
            for s in range(buffer.slot_count)
        ]
        slot_major = buffer.slot_stride_bytes == pool.slot_bytes
        if (
            not all(inside(layout, places, buffer.pool) for places in cells)
            or buffer.slot_count > pool.slot_count
            or len(set(once)) > buffer.page_bytes
            or (slot_major and not 0 <= min(once) <= max(once) < pool.slot_bytes)
        ):
            return {"bounds"}
        for part in buffer.parts:
            places = cell_bytes(part.page, part.offset_bytes)
            if not 0 <= min(places) <= max(places) < buffer.page_bytes:
                return {"bounds"}
    for access in layout.accesses:
        for cell in range(access.cell_count):
            if not inside(
                layout, cell_bytes(access.page, access.offset_bytes + cell * access.pitch_bytes), access.pool
            ):
                return {"bounds"}
    return set()


def brute_accesses(layout: Layout, cells: list[Owned]) -> set[str]:
    """Return op-address where an access reaches other bytes than its own cell's, and alias where it meets others."""
    found = set()
    for access in layout.accesses:
        buffer = layout.buffers[access.buffer]
        offset, page = plane(buffer, access.part)
        reached, stray = [], False
        for cell in range(access.cell_count):
            slot = access.first_slot + cell * access.slot_step
            places = cell_bytes(access.page, access.offset_bytes + cell * access.pitch_bytes)
            own = cell_bytes(page, offset + slot * buffer.slot_stride_bytes)
            within = inside(layout, places, access.pool)
            if access.pool != buffer.pool or not 0 <= slot < buffer.slot_count:
                stray = True
            elif within or inside(layout, own, buffer.pool):
                stray = stray or set(places) != set(own)
            if within:
                reached.append(Owned(access.pool, access.buffer, access.part, slot, frozenset(places)))
        for one, other in itertools.product(reached, cells) if stray else ():
            found.add("op-address")
            mine = (other.buffer, other.slot) == (one.buffer, one.slot) and one.part in (-1, other.part)
            if one.pool == other.pool and not mine and one.bytes & other.bytes and both_live(layout, one, other):
                found.add("alias")
        if stray:
            found.add("op-address")
    return found


# Tests


def compare(layout: Layout) -> set[str]:
    """Assert that the arena says what brute force says, and the static rules too as far as they speak of it.

    Static rules speak of bytes beyond a pool, of which the arena has none; so where bounds is broken the other two are
    not compared. Of what a stray access meets, the static rule leaves out cells that op-address names anyway.
    """
    truth = brute(layout)
    seen = {finding.rule for finding in arena_findings(layout)}
    static = {finding.rule for finding in check(layout, rules=ON_BYTES)}
    assert seen == truth, layout
    assert bool(static) == bool(truth), layout
    assert ("bounds" in static) == ("bounds" in truth), layout
    if "bounds" not in truth:
        assert ("op-address" in static) == ("op-address" in truth), layout
        if "op-address" in truth:
            assert "alias" in truth or "alias" not in static, layout
        else:
            assert static == truth, layout
    return truth


def has_broadcast(layout: Layout) -> bool:
    """Whether elements of a page coincide: the static op-address rule compares axes there, not bytes (see below)."""
    pages = [access.page for access in layout.accesses] + [buffer.page for buffer in layout.buffers]
    return any(0 in page.stride_bytes for page in pages)


@pytest.mark.parametrize("block", range(8))
def test_arena_static_rules_and_brute_force_agree_on_raw_layouts(block: int) -> None:
    broken = Counter()
    for seed in range(block * 250, block * 250 + 250):
        layout = draw_layout(seed)
        if has_broadcast(layout):
            assert {finding.rule for finding in arena_findings(layout)} == brute(layout), layout
        else:
            broken[" ".join(sorted(compare(layout)))] += 1
    assert broken[""] > 35, broken
    assert broken["alias"] > 8, broken
    assert broken["op-address"] + broken["alias op-address"] > 8, broken


def _cycles_beside(layout: Layout, buffer: Buffer) -> list[int]:
    """Return the life cycles of a buffer's own manager: one of another would be no layout at all."""
    return [index for index, cycle in enumerate(layout.life_cycles) if cycle.manager == buffer.manager]


def mutated(layout: Layout, draw: random.Random) -> Layout:
    """Return ``layout`` with one address changed: a buffer's, or what a consumer makes of it."""
    if layout.accesses and draw.random() < 0.6:
        index = draw.randrange(len(layout.accesses))
        access = layout.accesses[index]
        step = draw.choice((1, access.page.format.container_bytes, access.page.span_bytes))
        field, value = draw.choice(
            (
                ("offset_bytes", access.offset_bytes + draw.choice((-1, 1)) * step),
                ("pitch_bytes", access.pitch_bytes + draw.choice((-1, 1)) * step),
                ("pitch_bytes", access.page.span_bytes),
                ("buffer", draw.randrange(len(layout.buffers))),
                ("page", draw.choice(layout.accesses).page),
            )
        )
        if field == "buffer" and (access.part >= 0 or layout.buffers[value].slot_count < access.cell_count):
            return layout
        changed = msgspec.structs.replace(access, **{field: value})
        return msgspec.structs.replace(
            layout, accesses=(*layout.accesses[:index], changed, *layout.accesses[index + 1 :])
        )
    index = draw.randrange(len(layout.buffers))
    buffer = layout.buffers[index]
    step = draw.choice((1, buffer.page_bytes))
    field, value = draw.choice(
        (
            ("offset_bytes", max(0, buffer.offset_bytes + draw.choice((-1, 1)) * step)),
            ("slot_stride_bytes", max(0, buffer.slot_stride_bytes + draw.choice((-1, 1)) * step)),
            ("offset_bytes", draw.choice(layout.buffers).offset_bytes),
            ("life_cycle", draw.choice(_cycles_beside(layout, buffer))),
        )
    )
    changed = msgspec.structs.replace(buffer, **{field: value})
    return msgspec.structs.replace(layout, buffers=(*layout.buffers[:index], changed, *layout.buffers[index + 1 :]))


@pytest.mark.parametrize("allocator", ["trtllm-v1", "trtllm-v2", "trtllm-v2-qsa-packed"])
def test_arena_and_static_rules_agree_on_layouts_with_one_changed_address(allocator: str) -> None:
    draw = random.Random(allocator)
    broken = Counter()
    for seed in range(5000, 5200):
        try:
            layout = allocate(random_spec(seed, mixed=False), allocator)
        except Rejected:
            continue
        if sum(pool.size_bytes for pool in layout.pools) > 1 << 18 or not layout.buffers:
            continue
        layout = mutated(msgspec.structs.replace(layout, tables=()), draw)  # a table must agree with its buffers
        seen = {finding.rule for finding in arena_findings(layout)}
        static = {finding.rule for finding in check(layout, rules=ON_BYTES)}
        assert bool(seen) == bool(static), layout
        assert ("bounds" in seen) == ("bounds" in static), layout
        if "bounds" not in seen:
            assert ("op-address" in seen) == ("op-address" in static), layout
        broken[" ".join(sorted(seen))] += 1
    assert broken["op-address"] + broken["alias op-address"] > 20, broken


# What the static rules once missed.

ONE = Page(ElementFormat.UINT8, ("byte",), (4,), (1,), 4, True)


def one_buffer(*, size: int = 16, **fields: object) -> Layout:
    """Return a sound layout, four slots of 4 B with one buffer, with some fields of the buffer changed."""
    buffer = Buffer("target", 0, "key", 0, 0, 0, 4, 4, 4, ONE)
    buffer = msgspec.structs.replace(buffer, **fields)
    return Layout(
        allocator="raw",
        pools=(Pool("target", 0, 0, 4, 4, size),),
        life_cycles=(LifeCycle("target", 0),),
        buffers=(buffer,),
    )


def reach(layout: Layout, **fields: object) -> Layout:
    """Return ``layout`` with an access to its first buffer: the right one, with some fields changed."""
    buffer = layout.buffers[0]
    right = Access("view", 0, 0, buffer.offset_bytes, buffer.slot_stride_bytes, buffer.slot_count, buffer.page)
    return msgspec.structs.replace(layout, accesses=(msgspec.structs.replace(right, **fields),))


OVER = msgspec.structs.replace(ONE, self_overlap=True)
TAIL = (Part(0, "p", 0, ONE), Part(0, "q", 4, ONE))
BROADCAST = Page(ElementFormat.UINT8, ("head", "byte"), (3, 4), (0, 1), 4, False)

UNSEEN = {
    "a consumer's cell stands for a slot that its buffer does not have": reach(one_buffer(slot_count=2), cell_count=3),
    "negative slot stride, and the first slot lies behind the pool": one_buffer(offset_bytes=16, slot_stride_bytes=-4),
    "a slot-major pool whose bytes do not hold its slots": one_buffer(size=15),
    "slots that share bytes, of a page whose elements overlap on purpose": one_buffer(slot_stride_bytes=2, page=OVER),
    "a plane behind the packed page, inside the bytes reserved for it": one_buffer(
        slot_count=3, slot_stride_bytes=5, page_bytes=8, parts=TAIL
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_static_rules_see_what_the_arena_sees(name: str) -> None:
    layout = UNSEEN[name]
    assert {finding.rule for finding in arena_findings(layout)} == brute(layout) != set()
    assert check(layout, rules=ON_BYTES) != []


def test_pages_scattered_over_a_slot_are_sound() -> None:
    even = strided_page(ElementFormat.UINT8, ("byte",), (2,), (2,))
    layout = one_buffer(page=even, page_bytes=2)
    other = msgspec.structs.replace(layout.buffers[0], role="value", offset_bytes=1)
    layout = msgspec.structs.replace(layout, buffers=(*layout.buffers, other))
    assert arena_findings(layout) == []
    assert brute(layout) == set()
    assert check(layout) == []


def test_a_view_that_broadcasts_reaches_the_same_bytes() -> None:
    layout = reach(one_buffer(), page=BROADCAST)
    assert arena_findings(layout) == []
    assert brute(layout) == set()
    assert check(layout, rules=ON_BYTES) == []
