"""The layout of a trial: raw strided buffers, disjoint by construction."""

from __future__ import annotations

import math

from ...model.arithmetic import exact_div, round_up
from ...model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ...sim.layout import CONV_STATE, KEY, KEY_SCALE, SSM_STATE, VALUE, VALUE_SCALE, Buffer, Layout, LifeCycle, Pool
from ...sim.page import Page, strided_page
from .shape import Shape

_Plane = tuple[str, Page]


def spread_page(shape: Shape, format: ElementFormat, axes: tuple[str, ...], sizes: tuple[int, ...]) -> Page:
    """Return a page with the gaps of ``shape``; ``sizes`` count containers, the last axis lies closest together.

    A row is a whole number of 16 bytes where the gaps are.
    """
    pitch = format.container_bytes * shape.element_step
    gaps = (shape.row_gap * format.container_bytes, shape.page_gap * format.container_bytes)
    strides = []
    for place, size in enumerate(reversed(sizes)):
        strides.append(pitch)
        pitch = pitch * size + (gaps[min(place, 1)])
    return strided_page(format, axes, sizes, tuple(reversed(strides)))


def kv_layout(shape: Shape, slots: int, *, latent: bool = False) -> Layout:
    """Return K and V (K alone if ``latent``) and their block scales in one pool of ``slots`` slots."""
    planes: list[_Plane] = []
    for role, scale_role, dim in ((KEY, KEY_SCALE, shape.head_dim), (VALUE, VALUE_SCALE, shape.value_dim)):
        if role == VALUE and latent:
            continue
        containers = exact_div(dim, shape.format.elements_per_container, "head dim in containers")
        planes.append((role, _kv_page(shape, shape.format, containers)))
        if shape.format.block_scaled:
            blocks = exact_div(dim, SCALE_BLOCK_ELEMENTS, "head dim in blocks")
            planes.append((scale_role, _kv_page(shape, ElementFormat.FP8, blocks)))
    return _layout(shape, planes, slots)


def _kv_page(shape: Shape, format: ElementFormat, containers: int) -> Page:
    if shape.kv_layout == "HND":
        return spread_page(shape, format, ("head", "token", "dim"), (shape.heads, shape.page_tokens, containers))
    return spread_page(shape, format, ("token", "head", "dim"), (shape.page_tokens, shape.heads, containers))


def state_layout(shape: Shape, slots: int, channels: int) -> Layout:
    """Return a temporal and a convolution state per slot."""
    state = spread_page(shape, shape.format, ("head", "dim", "state"), (shape.heads, shape.head_dim, shape.value_dim))
    conv = spread_page(shape, shape.conv_format, ("channel", "tap"), (channels, shape.taps))
    return _layout(shape, [(SSM_STATE, state), (CONV_STATE, conv)], slots)


def plane_layout(shape: Shape, slots: int, planes: tuple[tuple[str, ElementFormat, int], ...]) -> Layout:
    """Return side planes (role, format, dim) of one head, token by token."""
    axes = ("token", "head", "dim")
    pages = [(role, spread_page(shape, format, axes, (shape.page_tokens, 1, dim))) for role, format, dim in planes]
    return _layout(shape, pages, slots)


def _layout(shape: Shape, planes: list[_Plane], slots: int) -> Layout:
    """Place ``planes`` one after the other, in every slot or each in a run of all slots."""
    alignment = math.lcm(*[16 if _aligned(shape) else page.format.container_bytes for _, page in planes])
    gap = shape.slot_gap * alignment
    sizes = [round_up(page.span_bytes, alignment) for _, page in planes]
    total = sum(sizes) + gap
    buffers, at = [], 0
    for (role, page), size in zip(planes, sizes, strict=True):
        pitch = size + gap if shape.planes_apart else total
        buffers.append(Buffer("target", 0, role, 0, 0, at, pitch, slots, page.span_bytes, page))
        at += pitch * slots if shape.planes_apart else size
    size_bytes = at if shape.planes_apart else total * slots
    pool = Pool("target", 0, 0, slots, exact_div(size_bytes, slots, "slot of a trial's pool"), size_bytes)
    return Layout(allocator="trial", pools=(pool,), life_cycles=(LifeCycle("target", 0),), buffers=tuple(buffers))


def _aligned(shape: Shape) -> bool:
    """Whether rows may start at multiples of 16 bytes, which is what the wide kernels need."""
    return shape.element_step == 1 and shape.row_gap % 16 == 0
