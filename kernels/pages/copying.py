"""``gather_pages``, ``scatter_pages`` and ``fork_pages``: pages of a view, moved as they are, in any format.

A gathered page is dense: the page's axes row-major, without its gaps.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, Final

import msgspec
import torch

from ...model.arithmetic import div_up, exact_div, round_up
from ...model.errors import SpecError
from ..paged.views import CacheView
from ..tensors import integers_of

_KERNELS: Final = f"{__package__}.triton_copy"
CHUNK_WORDS: Final = 4096
"""Words of a long row that one program copies."""


class Side(msgspec.Struct, frozen=True):
    """One side of a copy, in words: the tensor, where it starts, and its strides (slot first)."""

    words: Any
    start: int
    strides: tuple[int, ...]


def gather_pages(view: CacheView, slots: Any, out: Any) -> None:
    """Copy the pages ``slots`` (int32) of ``view`` to ``out``, of shape (pages, *page) and the view's type, dense."""
    copy_between(view.shape, _side(view), _dense(view, out, slots), slots, _order(slots), view.format.container_bytes)


def scatter_pages(view: CacheView, slots: Any, pages: Any) -> None:
    """Copy dense ``pages``, of shape (pages, *page), to the pages ``slots`` (int32, each once) of ``view``."""
    copy_between(view.shape, _dense(view, pages, slots), _side(view), _order(slots), slots, view.format.container_bytes)


def fork_pages(view: CacheView, sources: Any, targets: Any) -> None:
    """Copy the pages ``sources`` of ``view`` to its pages ``targets`` (int32, each once, none of them a source)."""
    if sources.shape != targets.shape:
        raise SpecError("targets", f"found {targets.numel()} slots, needs {sources.numel()} as in sources")
    copy_between(view.shape, _side(view), _side(view), sources, targets, view.format.container_bytes)


def _side(view: CacheView) -> Side:
    return Side(view.storage, view.start, (view.slot_stride, *view.strides))


def _dense(view: CacheView, pages: Any, slots: Any) -> Side:
    needed = (slots.numel(), *view.shape)
    if tuple(pages.shape) != needed or pages.dtype != view.storage.dtype or not pages.is_contiguous():
        found = f"found {pages.dtype} of {tuple(pages.shape)}"
        raise SpecError(view.name, f"{found}, needs contiguous {view.storage.dtype} of {needed}")
    return Side(pages, 0, tuple(pages.stride()))


def _order(slots: Any) -> Any:
    return torch.arange(slots.numel(), dtype=torch.int32, device=slots.device)


def copy_between(
    shape: tuple[int, ...], source: Side, target: Side, source_slots: Any, target_slots: Any, container_bytes: int
) -> None:
    """Copy pages of ``shape`` containers, slot by slot, in the widest words that fit both sides.

    Slots are contiguous int32 tensors on the device. Raises ``SpecError`` for a page of more than three axes that do
    not continue each other.
    """
    for name, slots in (("source slots", source_slots), ("target slots", target_slots)):
        if slots.dtype != torch.int32 or not slots.is_contiguous():
            raise SpecError(name, f"found a tensor of {slots.dtype}, needs a contiguous one of int32")
    if source_slots.numel() == 0 or 0 in shape:
        return
    sizes, read, write = _merged(shape, source.strides[1:], target.strides[1:])
    numbers = [sizes[-1]]
    for side, strides in ((source, read), (target, write)):
        numbers += [side.start, side.strides[0], *strides[:-1]]
    contiguous = read[-1] == write[-1] == 1
    shared = math.gcd(*numbers) * container_bytes if contiguous else container_bytes
    width = next(width for width in (4, 2, 1) if shared % width == 0)
    wide = contiguous and shared % 16 == 0
    scale = (container_bytes, width)
    outer, middle, inner = sizes
    long = outer * middle == 1 or inner * container_bytes >= 1024
    rows, words = (1, 1024) if long else (16, 64)
    inner = _in_words(inner, scale)
    arguments: dict[str, Any] = {}
    for name, side, strides in (("source", source, read), ("target", target, write)):
        arguments[name] = integers_of(side.words.reshape(-1).view(torch.uint8), width)
        arguments[f"{name}_start"] = _in_words(side.start, scale)
        arguments[f"{name}_slot"] = _in_words(side.strides[0], scale)
        for axis, stride in zip(("outer", "middle", "inner"), strides, strict=True):
            arguments[f"{name}_{axis}"] = stride if axis == "inner" else _in_words(stride, scale)
    chunk = CHUNK_WORDS if long else round_up(inner, 4)
    grid = (source_slots.numel(), div_up(outer * middle, rows), div_up(inner, chunk))
    importlib.import_module(_KERNELS).copy_pages[grid](
        source_slots=source_slots, target_slots=target_slots, rows=outer * middle, middle=middle, inner=inner,
        chunk=chunk, **arguments, ROWS=rows, WORDS=words, WIDE=wide, num_warps=4,
    )  # fmt: skip


def _in_words(containers: int, scale: tuple[int, int]) -> int:
    container_bytes, width = scale
    return exact_div(containers * container_bytes, width, "bytes in words")


def _merged(
    shape: tuple[int, ...], read: tuple[int, ...], write: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return three axes that stand for the page's: neighbours that continue each other on both sides become one."""
    merged: list[tuple[int, int, int]] = []
    for step_read, step_write, size in sorted(zip(read, write, shape, strict=True), reverse=True):
        if size == 1:
            continue
        if merged and merged[-1][:2] == (step_read * size, step_write * size):
            merged[-1] = (step_read, step_write, merged[-1][2] * size)
        else:
            merged.append((step_read, step_write, size))
    merged = merged or [(1, 1, 1)]
    if len(merged) > 3:
        raise SpecError("page", f"found {len(merged)} axes that do not continue each other, the copy needs at most 3")
    merged = [(0, 0, 1)] * (3 - len(merged)) + merged
    return (
        tuple([size for _, _, size in merged]),
        tuple([step for step, _, _ in merged]),
        tuple([step for _, step, _ in merged]),
    )
