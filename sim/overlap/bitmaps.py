"""Bitmaps as the resort before the integer set library: a byte set as the bits of one integer, whatever its strides.

A view's bytes are its item's bits, repeated along one axis after the other; doubling takes a handful of shifts for an
axis of any length, so the cost depends on the bytes between a view's first and its last, and not on how its strides
interlock. That decides, in milliseconds, what makes the search and the integer set library run for minutes: many axes
with strides that have nothing in common.

All sizes are in *units*: the greatest common divisor of what the strides, the item and the two offsets have in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Final

from ...model.arithmetic import div_up, exact_div
from .multiples import floor_div
from .views import SlotView, byte_range, dims, is_empty

EXTENT_LIMIT: Final = 1 << 27
"""Longest bitmap, in units: 16 MiB of bits."""
WORK_LIMIT: Final = 1 << 34
"""Most bits that are combined slot by slot."""

Element = tuple[int, ...]
"""``(slot, *index, byte_in_item)``."""


def smallest_shared(a: SlotView, b: SlotView, *, distinct_slots: bool = False) -> tuple[bool, int | None]:
    """Return whether bitmaps can decide, and the smallest byte of both views, of different slots where asked for."""
    if is_empty(a) or is_empty(b):
        return True, None
    a_first, b_first = byte_range(a)[0], byte_range(b)[0]
    first, unit = min(a_first, b_first), gcd(_unit(a), _unit(b), a_first - b_first)
    end = max(byte_range(a)[1], byte_range(b)[1])
    if end - first > EXTENT_LIMIT * unit:
        return False, None
    left, right = _Comb(a, unit, first), _Comb(b, unit, first)
    if not distinct_slots:
        shared = left.once & right.once
    else:
        both = min(a.slot_count, b.slot_count)
        if both * floor_div(end - first, unit) > WORK_LIMIT:
            return False, None
        equal = 0
        for slot in range(both):
            equal |= left.slot(slot) & right.slot(slot)
        # A byte that one slot alone holds on either side is of different slots unless it is the same one.
        shared = left.once & right.once & (left.twice | right.twice | ~equal)
    return True, first + unit * _lowest(shared) if shared else None


def smallest_twice(a: SlotView) -> tuple[bool, int | None]:
    """Return whether bitmaps can decide, and the smallest byte of two elements of ``a``."""
    (first, end), unit = byte_range(a), _unit(a)
    if end - first > EXTENT_LIMIT * unit:
        return False, None
    shape, once = _in_units(a, unit)
    twice = 0
    for count, stride in shape:
        once, twice = _repeated_twice(once, twice, count, abs(stride))
    return True, first + unit * _lowest(twice) if twice else None


def elements(view: SlotView, byte: int, other_slot_than: int | None = None) -> Iterator[Element] | None:
    """Return the elements that contain ``byte``, least first, as they are asked for; None where the view is too long.

    Those of the slot ``other_slot_than`` are left out.
    """
    first, end = byte_range(view)
    unit = _unit(view)
    if end - first > EXTENT_LIMIT * unit:
        return None
    if not first <= byte < end:
        return iter(())
    target, rest = divmod(byte - view.offset_bytes, unit)
    shape, item = _in_units(view, unit)
    tails = [_Tail(0, item)]
    for count, stride in reversed(shape[1:]):
        tails.insert(0, tails[0].along(count, stride))
    found = _walk(shape, tails, target, other_slot_than)
    return ((*element[:-1], element[-1] * unit + rest) for element in found)


class _Tail:
    """What some axes can add to an address: bit ``n`` of ``bits`` stands for ``low + n``."""

    def __init__(self, low: int, bits: int) -> None:
        self.low, self.bits, self.length = low, bits, bits.bit_length()
        self._table = bits.to_bytes(div_up(self.length, 8), "little")

    def along(self, count: int, stride: int) -> _Tail:
        """Return what they add together with one more axis."""
        return _Tail(self.low + min(0, (count - 1) * stride), _repeated(self.bits, count, abs(stride)))

    def has(self, address: int) -> bool:
        """Whether they can add just ``address``."""
        place = address - self.low
        return 0 <= place < self.length and bool(self._table[place >> 3] >> (place & 7) & 1)


def _walk(
    shape: list[tuple[int, int]], tails: list[_Tail], target: int, skipped: int | None = None
) -> Iterator[Element]:
    """Yield the elements that contain ``target``, least first, without the number ``skipped`` of the first axis.

    ``tails[n]`` is what the axes behind axis ``n`` can add, so that no step leads nowhere.
    """
    if not shape:
        yield (target,)
        return
    (count, stride), tail = shape[0], tails[0]
    low, high = 0, count - 1
    if stride == 0 and not tail.has(target):
        return
    if stride:  # other numbers leave what the tail can add
        ends = target - tail.low - tail.length + 1, target - tail.low
        least, most = ends if stride > 0 else ends[::-1]
        low, high = max(low, -floor_div(-least, stride)), min(high, floor_div(most, stride))
    for number in range(low, high + 1):
        if number != skipped and tail.has(target - number * stride):
            for deeper in _walk(shape[1:], tails[1:], target - number * stride):
                yield (number, *deeper)


class _Comb:
    """A view as bitmaps that count from ``first``: bytes of at least one slot, and of at least two."""

    def __init__(self, view: SlotView, unit: int, first: int) -> None:
        shape, self._cell = _in_units(view, unit)
        self._slots, self._stride = shape[0]
        for count, stride in shape[1:]:
            self._cell = _repeated(self._cell, count, abs(stride))
        self._shift = exact_div(byte_range(view)[0] - first, unit, "offset in units")
        once, twice = _repeated_twice(self._cell, 0, self._slots, abs(self._stride))
        self.once, self.twice = once << self._shift, twice << self._shift

    def slot(self, number: int) -> int:
        """Return the bytes of one slot."""
        place = number if self._stride >= 0 else self._slots - 1 - number
        return self._cell << (self._shift + place * abs(self._stride))


def _unit(view: SlotView) -> int:
    """Return what the item and the strides that are ever stepped have in common."""
    *shape, _ = dims(view)
    return gcd(view.item_bytes, *(stride for count, stride in shape if count > 1))


def _in_units(view: SlotView, unit: int) -> tuple[list[tuple[int, int]], int]:
    """Return the slots and axes with their strides in units (0 for one element), and the item's bits."""
    *shape, _ = dims(view)
    axes = [(count, exact_div(stride, unit, "stride in units") if count > 1 else 0) for count, stride in shape]
    return axes, (1 << exact_div(view.item_bytes, unit, "item in units")) - 1


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _repeated(bits: int, count: int, stride: int) -> int:
    """Return ``bits`` and ``count - 1`` copies, each ``stride`` further; copies of copies, so it takes few shifts."""
    done = 1
    while done < count:
        step = min(done, count - done)
        bits |= bits << (step * stride)
        done += step
    return bits


def _repeated_twice(once: int, twice: int, count: int, stride: int) -> tuple[int, int]:
    """As ``_repeated``, for the bits that occur at least once and at least twice: no copy may be counted again."""
    all_once = all_twice = done = 0
    size = 1
    while count:
        if count & 1:
            here_once, here_twice = once << (done * stride), twice << (done * stride)
            all_once, all_twice = all_once | here_once, all_twice | here_twice | (all_once & here_once)
            done += size
        count >>= 1
        if count:
            shift = size * stride
            once, twice = once | once << shift, twice | twice << shift | (once & once << shift)
            size *= 2
    return all_once, all_twice
