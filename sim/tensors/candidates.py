"""``meeting_pairs``: the pairs of tensors that may share a byte; every other pair is proven apart.

Thousands of views interleave in one allocation, so their whole ranges all meet. What tells them apart is their common
step: where every stride of at least ``t`` bytes is a multiple of ``g`` in a set of views, and what smaller strides span
is at most ``g``, two of them can only meet where their cells meet modulo ``g``. Sets are split that way, from the
largest step down, into those whose cells touch; what is left together is a candidate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import msgspec

from ..overlap import SlotView

_MOST_STEPS = 32
"""Steps that are tried on one set; the solver decides what they leave open."""


class Runs(msgspec.Struct, frozen=True):
    """The bytes of one view: ``run`` contiguous bytes from ``first`` on, repeated along ``(count, stride)`` axes.

    Strides are positive, from the largest down; axes of one element or of stride 0 are gone, and axes that continue
    each other are merged. ``place`` is the view's number.
    """

    place: int
    first: int
    run: int
    axes: tuple[tuple[int, int], ...]

    @property
    def span(self) -> int:
        """Bytes from the first to one past the last."""
        return self.run + sum((count - 1) * stride for count, stride in self.axes)

    def view(self) -> SlotView:
        """Return these bytes as the overlap solver takes them."""
        if not self.axes:
            return SlotView(self.first, 1, 0, (), self.run)
        (count, stride), *inner = self.axes
        return SlotView(self.first, count, stride, tuple(inner), self.run)


def runs_of(place: int, view: SlotView) -> Runs:
    """Return the bytes of ``view``, which has one slot and is not empty."""
    first, run = view.offset_bytes, view.item_bytes
    steps = []
    for count, stride in view.axes:
        if count > 1 and stride:
            first += min(0, (count - 1) * stride)
            steps.append((abs(stride), count))
    axes: list[tuple[int, int]] = []
    for stride, count in sorted(steps):
        if not axes and stride == run:
            run *= count
        elif axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = (axes[-1][0] * count, axes[-1][1])
        else:
            axes.append((count, stride))
    return Runs(place, first, run, tuple(reversed(axes)))


def meeting_pairs(views: list[Runs]) -> Iterator[tuple[Runs, Runs]]:
    """Yield the pairs of ``views`` that may share a byte, each once."""
    for together in _touching([(view.first, view.span, view) for view in views]):
        for remaining in _split(together, None):
            yield from itertools.combinations(remaining, 2)


def _split(views: list[Runs], below: int | None) -> Iterator[list[Runs]]:
    """Yield the sets that remain of ``views``, tried with every step smaller than ``below``."""
    if len(views) == 1:
        return
    strides = {stride for view in views for _, stride in view.axes if below is None or stride < below}
    for step in sorted(strides, reverse=True)[:_MOST_STEPS]:
        parts = _split_by(views, step)
        if len(parts) > 1:
            for part in parts:
                yield from _split(part, step)
            return
    yield views


def _split_by(views: list[Runs], step: int) -> list[list[Runs]]:
    """Return ``views`` in sets whose cells touch modulo the common step of their strides from ``step`` up."""
    common = math.gcd(*(stride for view in views for _, stride in view.axes if stride >= step))
    ranges = []
    for view in views:
        cell = view.run + sum((count - 1) * stride for count, stride in view.axes if stride < step)
        if cell > common:
            return [views]
        start = view.first % common
        ranges.append((start, min(cell, common - start), view))
        if start + cell > common:
            ranges.append((0, start + cell - common, view))
    return _joined(_touching(ranges))


def _touching(ranges: list[tuple[int, int, Runs]]) -> list[list[Runs]]:
    """Return the views of (start, length) ranges in groups that do not touch each other."""
    ranges.sort(key=lambda inside: inside[:2])
    groups: list[list[Runs]] = []
    end = None
    for start, length, view in ranges:
        if end is None or start >= end:
            groups.append([])
            end = start + length
        end = max(end, start + length)
        groups[-1].append(view)
    return groups


def _joined(groups: list[list[Runs]]) -> list[list[Runs]]:
    """Join the first and the last group where a view wraps around, and name each view once in a group."""
    if len(groups) > 1 and {view.place for view in groups[0]} & {view.place for view in groups[-1]}:
        groups = [groups[0] + groups[-1], *groups[1:-1]]
    return [list({view.place: view for view in group}.values()) for group in groups]
