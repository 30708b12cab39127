"""Which elements of a view contain a given byte: the least of them, and the next, in the order slot, index."""

from __future__ import annotations

import itertools

from . import bitmaps, sets
from .equation import SearchTooLong, Term, solutions
from .views import SlotView, dims

#: Steps of enumeration before the integer set library takes over.
_STEP_LIMIT = 400

Element = tuple[int, ...]
"""``(slot, *index, byte_in_item)``."""


def least_element(view: SlotView, byte: int, *, other_slot_than: int | None = None) -> tuple[Element | None, str]:
    """Return the least element that contains ``byte``, in another slot than the one given, and the method."""
    try:
        found = _elements(view, byte)
    except SearchTooLong:
        drawn = bitmaps.elements(view, byte, other_slot_than)
        if drawn is not None:
            return next(drawn, None), "bitmap"
        return sets.least_element(view, byte, other_slot_than=other_slot_than), "sets"
    return next((element for element in found if element[0] != other_slot_than), None), "branch"


def certain(element: Element | None, byte: int) -> Element:
    """Return ``element``, which must contain the shared ``byte``; raise ``RuntimeError`` if there is none."""
    if element is None:
        raise RuntimeError(f"byte {byte} was found to be shared, and no element contains it")
    return element


def least_two_elements(view: SlotView, byte: int) -> tuple[Element, Element, str]:
    """Return the two least elements that contain ``byte``, which two elements must, and the method."""
    try:
        found = _elements(view, byte)
    except SearchTooLong:
        drawn = bitmaps.elements(view, byte)
        if drawn is not None:
            return certain(next(drawn, None), byte), certain(next(drawn, None), byte), "bitmap"
        first = certain(sets.least_element(view, byte), byte)
        return first, certain(sets.least_element(view, byte, after=first), byte), "sets"
    if len(found) < 2:
        raise RuntimeError(f"byte {byte} was found to be shared, and {len(found)} elements contain it")
    return found[0], found[1], "branch"


def _elements(view: SlotView, byte: int) -> list[Element]:
    """Return the elements that contain ``byte``, sorted; of a coordinate of stride 0 only the values 0 and 1.

    The elements are a product: any value of the stride-0 coordinates with any solution for the others. The two least of
    a product, or the least two slots of it, never need a third value of one such coordinate.
    """
    shape = list(dims(view))
    target = byte - view.offset_bytes
    terms, flipped, free = [], set(), []
    for position, (count, stride) in enumerate(shape):
        if stride == 0:
            free.append((position, range(min(count, 2))))
        elif count > 1:
            terms.append(Term(abs(stride), 0, count - 1, position))
            if stride < 0:
                # Counted from the last, which has the lowest address.
                flipped.add(position)
                target -= stride * (count - 1)
    found = []
    for solution in solutions(terms, target, _STEP_LIMIT):
        for choice in itertools.product(*(values for _, values in free)):
            known = {**solution, **dict(zip((position for position, _ in free), choice, strict=True))}
            found.append(
                tuple(
                    count - 1 - known[position] if position in flipped else known.get(position, 0)
                    for position, (count, _) in enumerate(shape)
                )
            )
    return sorted(found)
