"""``raw_layouts``: layouts made of nothing but strided views over pools, sound or with one fault planted.

A sound layout is disjoint by construction. A pool is cut into regions; in a region the byte of element ``(i, j,
...)`` of buffer ``b`` in slot ``s`` is a number in mixed radix, whose digits are ``s``, ``b``, ``i``, ``j``, ... in
any order: every digit's stride is at least the span of all digits below it, so different digits never give the same
byte. Slots outermost is a pool of contiguous slots, buffers outermost a layer-major pool, an axis outermost scatters
a page over the pool. Two life cycles of one group may cut the same contiguous slots in two ways; two groups never
share a region.

    >>> from hypothesis import find
    >>> layout = find(raw_layouts(sound=True), lambda layout: len(layout.buffers) > 1)
    >>> [(buffer.offset_bytes, buffer.page.span_bytes) for buffer in layout.buffers]
    [(0, 1), (1, 1)]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec
from hypothesis import strategies as st

from ..model.arithmetic import div_up, round_up
from ..model.formats import ElementFormat
from ..sim.layout import Buffer, Layout, LifeCycle, Pool
from ..sim.page import data_bytes, strided_page
from .numbers import between, draw_one

_FORMATS: Final = (
    ElementFormat.UINT8,
    ElementFormat.BF16,
    ElementFormat.FP32,
    ElementFormat.NVFP4,
    ElementFormat.INT64,
)
_REGION_ALIGNMENT_BYTES: Final = 8
_POOL_ALIGNMENT_BYTES: Final = 256
_AXES: Final = ("a", "b", "c")
_SLOT, _BUFFER = "slot", "buffer"


class _Region(msgspec.Struct, frozen=True):
    """A piece of a pool, or of a slot: equal buffers with the strides of their digits, and the bytes that it takes."""

    format: ElementFormat
    shape: tuple[int, ...]
    buffer_count: int
    strides: dict[str, int]
    span_bytes: int


class _Build(msgspec.Struct):
    """A layout in the making."""

    pools: list[Pool] = []
    life_cycles: list[LifeCycle] = []
    buffers: list[Buffer] = []

    def layout(self) -> Layout:
        taken: dict[int, dict[int, int]] = {}
        for buffer in self.buffers:
            cycles = taken.setdefault(buffer.pool, {})
            cycles[buffer.life_cycle] = cycles.get(buffer.life_cycle, 0) + buffer.page_bytes
        pools = [
            msgspec.structs.replace(pool, padding_bytes=max(0, pool.slot_bytes - max(taken[index].values())))
            for index, pool in enumerate(self.pools)
        ]
        return Layout(
            allocator="raw",
            pools=tuple(pools),
            life_cycles=tuple(self.life_cycles),
            buffers=tuple(self.buffers),
        )


@st.composite
def raw_layouts(
    draw: st.DrawFn,
    *,
    sound: bool | None = None,
    max_pools: int = 3,
    max_slots: int = 4,
    max_buffers: int = 3,
    max_extent: int = 4,
) -> Layout:
    """Return layouts of strided views: 1 to ``max_pools`` pools of 1 to ``max_slots`` slots.

    ``sound=True`` gives layouts in which no two cells that may be live together share a byte and none leaves its pool;
    ``sound=False`` plants one such fault; None draws which. ``max_buffers`` bounds the buffers of a region,
    ``max_extent`` the size of an axis. A layout has no page tables and no accesses.
    """
    wanted = not draw(between(0, 1)) if sound is None else sound
    build = _Build()
    for _ in range(draw(between(1, max_pools))):
        _draw_pool(draw, build, max_slots, max_buffers, max_extent)
    layout = build.layout()
    return layout if wanted else _with_fault(draw, layout)


def _draw_pool(draw: st.DrawFn, build: _Build, max_slots: int, max_buffers: int, max_extent: int) -> None:
    """Draw one pool: contiguous slots of several regions, slots cut in two ways, or one region in any digit order."""
    slots = draw(between(1, max_slots))
    style = draw_one(draw, ("slots", "digits", "overlay", "groups"))
    if style == "digits":
        _add_digits(build, _draw_region(draw, slots, max_buffers, max_extent), slots)
        return
    cuts = []
    for _ in range(draw(between(1, 2)) if style == "slots" else 2):
        count = draw(between(1, 2))
        cuts.append([_draw_region(draw, 0, max_buffers, max_extent) for _ in range(count)])
    padding = draw_one(draw, (0, 0, 8, 48))
    _add_slots(build, cuts, slots, padding, style)


def _draw_region(draw: st.DrawFn, slots: int, max_buffers: int, max_extent: int) -> _Region:
    """Draw equal buffers and an order of digits; without ``slots`` the region lies inside a slot."""
    format = draw_one(draw, _FORMATS)
    shape = tuple([draw(between(1, max_extent)) for _ in range(draw(between(1, len(_AXES))))])
    digits = dict(zip(_AXES, shape, strict=False))
    digits[_BUFFER] = draw(between(1, max_buffers))
    if slots:
        digits[_SLOT] = slots
    strides: dict[str, int] = {}
    pitch = format.container_bytes
    names = list(digits)
    while names:
        name = names.pop(len(names) - 1 - draw(between(0, len(names) - 1)))
        strides[name] = pitch
        pitch *= digits[name]
        pitch += format.container_bytes * draw_one(draw, (0, 0, 0, 1, 3))
    return _Region(format, shape, digits[_BUFFER], strides, pitch)


def _add_digits(build: _Build, region: _Region, slots: int) -> None:
    """Add a pool that is one region, slots being a digit like any other."""
    slot_bytes = div_up(region.span_bytes, slots)
    if region.strides[_SLOT] * slots >= region.span_bytes:  # slots are contiguous: one slot is what they step by
        slot_bytes = region.strides[_SLOT]
    pool = len(build.pools)
    build.pools.append(Pool("raw", pool, 0, slots, slot_bytes, slots * slot_bytes, _POOL_ALIGNMENT_BYTES))
    build.life_cycles.append(LifeCycle("raw", pool))
    _add_buffers(build, region, pool, 0, region.strides[_SLOT], slots)


def _add_slots(build: _Build, cuts: list[list[_Region]], slots: int, padding: int, style: str) -> None:
    """Add a pool of contiguous slots: a life cycle per cut, overlaid on one slot or one after the other in it."""
    pool = len(build.pools)
    widths = [sum(round_up(region.span_bytes, _REGION_ALIGNMENT_BYTES) for region in cut) for cut in cuts]
    slot_bytes = (max(widths) if style == "overlay" else sum(widths)) + padding
    build.pools.append(Pool("raw", pool, 0, slots, slot_bytes, slots * slot_bytes, _POOL_ALIGNMENT_BYTES))
    offset = 0
    for number, cut in enumerate(cuts):
        if style != "slots" or number == 0:
            group = pool if style != "groups" or number == 0 else 1000 + pool
            build.life_cycles.append(LifeCycle("raw", group))
        if style == "overlay":
            offset = 0
        for region in cut:
            _add_buffers(build, region, pool, offset, slot_bytes, slots)
            offset += round_up(region.span_bytes, _REGION_ALIGNMENT_BYTES)


def _add_buffers(build: _Build, region: _Region, pool: int, offset: int, slot_stride: int, slots: int) -> None:
    axes = _AXES[: len(region.shape)]
    page = strided_page(region.format, axes, region.shape, tuple([region.strides[axis] for axis in axes]))
    for number in range(region.buffer_count):
        layer = len(build.buffers)
        build.buffers.append(
            Buffer(
                manager="raw",
                layer=layer,
                role="view",
                life_cycle=len(build.life_cycles) - 1,
                pool=pool,
                offset_bytes=offset + number * region.strides[_BUFFER],
                slot_stride_bytes=slot_stride,
                slot_count=slots,
                page_bytes=data_bytes(page),  # not the span: pages may interleave
                page=page,
            )
        )


# Faults: each returns a layout that is wrong for certain, or None where the buffer gives no room for it.


_Fault: TypeAlias = Callable[[Layout, int, int], Layout | None]


def _with_fault(draw: st.DrawFn, layout: Layout) -> Layout:
    """Plant one fault in one buffer of ``layout``."""
    victim = draw(between(0, len(layout.buffers) - 1))
    faults: tuple[_Fault, ...] = (
        _double,
        _shift_along_axis,
        _narrow_slots,
        _fold_axis,
        _move_out,
        _move_before,
        _independent,
    )
    fault = draw_one(draw, faults)
    step = draw(between(0, 7))
    return fault(layout, victim, step) or _double(layout, victim, step)


def _replace(layout: Layout, index: int, **change: object) -> Layout:
    buffers = list(layout.buffers)
    buffers[index] = msgspec.structs.replace(buffers[index], **change)
    return msgspec.structs.replace(layout, buffers=tuple(buffers))


def _double(layout: Layout, victim: int, step: int) -> Layout:
    """Add a second owner of a buffer's bytes, in the same life cycle."""
    twin = msgspec.structs.replace(layout.buffers[victim], layer=len(layout.buffers))
    return msgspec.structs.replace(layout, buffers=(*layout.buffers, twin))


def _shift_along_axis(layout: Layout, victim: int, step: int) -> Layout | None:
    """Add a second owner whose first element is a later element of the buffer."""
    buffer = layout.buffers[victim]
    axis = next((axis for axis, size in enumerate(buffer.page.shape) if size > 1), None)
    if axis is None:
        return None
    elements = 1 + step % (buffer.page.shape[axis] - 1)
    offset = buffer.offset_bytes + elements * buffer.page.stride_bytes[axis]
    twin = msgspec.structs.replace(buffer, layer=len(layout.buffers), offset_bytes=offset)
    return msgspec.structs.replace(layout, buffers=(*layout.buffers, twin))


def _narrow_slots(layout: Layout, victim: int, step: int) -> Layout | None:
    """Make a buffer's slots step by a stride of its own page, or not at all."""
    buffer = layout.buffers[victim]
    if buffer.slot_count < 2:
        return None
    axis = next((axis for axis, size in enumerate(buffer.page.shape) if size > 1), None)
    stride = 0 if axis is None else buffer.page.stride_bytes[axis] * (step % buffer.page.shape[axis])
    return _replace(layout, victim, slot_stride_bytes=stride)


def _fold_axis(layout: Layout, victim: int, step: int) -> Layout | None:
    """Make an axis of a page step by another axis's stride, or not at all."""
    page = layout.buffers[victim].page
    wide = [axis for axis, size in enumerate(page.shape) if size > 1]
    if not wide:
        return None
    axis = wide[step % len(wide)]
    other = wide[(step + 1) % len(wide)]
    strides = list(page.stride_bytes)
    strides[axis] = 0 if other == axis else strides[other]
    return _replace(layout, victim, page=strided_page(page.format, page.axes, page.shape, tuple(strides)))


def _move_out(layout: Layout, victim: int, step: int) -> Layout:
    """Move a buffer so that its last byte lies one element or more behind its pool."""
    buffer = layout.buffers[victim]
    end = buffer.offset_bytes + (buffer.slot_count - 1) * buffer.slot_stride_bytes + buffer.page.span_bytes
    beyond = (1 + step) * buffer.page.format.container_bytes
    return _replace(
        layout, victim, offset_bytes=buffer.offset_bytes + layout.pools[buffer.pool].size_bytes - end + beyond
    )


def _move_before(layout: Layout, victim: int, step: int) -> Layout:
    """Move a buffer so that its first byte lies before its pool."""
    return _replace(layout, victim, offset_bytes=-(1 + step) * layout.buffers[victim].page.format.container_bytes)


def _independent(layout: Layout, victim: int, step: int) -> Layout | None:
    """Let two life cycles that overlay one pool draw their slots independently."""
    cycle = layout.buffers[victim].life_cycle
    mine = layout.life_cycles[cycle]
    others = [index for index, other in enumerate(layout.life_cycles) if index != cycle and other.group == mine.group]
    if not others:
        return None
    cycles = list(layout.life_cycles)
    cycles[cycle] = msgspec.structs.replace(mine, group=mine.group + 2000)
    return msgspec.structs.replace(layout, life_cycles=tuple(cycles))
