"""The smallest byte that two views share, and the smallest that two elements of one view share.

Here the byte is found; ``elements`` then names its owners. Both steps are exact on their own, because which elements
contain a byte has nothing to do with how the byte was found.
"""

from __future__ import annotations

import heapq

from ...model.arithmetic import div_up
from . import bitmaps, sets
from .elements import Element, certain, least_element, least_two_elements
from .equation import CheapestSolution, SearchTooLong, Term
from .multiples import floor_div
from .views import Collision, SlotView, byte_range, cell_range, dims, is_empty, restrict

#: Equal slots that meet are excluded one by one up to this many.
_EQUAL_SLOTS_LIMIT = 8

_Box = tuple[tuple[int, int], tuple[int, int]]
"""First and last slot of a, and of b."""


def smallest_collision(a: SlotView, b: SlotView, *, distinct_slots: bool = False) -> Collision | None:
    """Return the smallest byte that lies in both views, or None, which proves that there is none.

    With ``distinct_slots`` the byte must lie in slot ``s`` of a and slot ``t`` of b with ``s != t``. Among the elements
    that contain the byte, the least ``slot_a`` is named, then the least ``slot_b``, ``index_a`` and ``index_b``. Raises
    ``Undecided`` rather than running for minutes.
    """
    return trace_collision(a, b, distinct_slots=distinct_slots)[0]


def smallest_self_collision(a: SlotView) -> Collision | None:
    """Return the smallest byte of two elements of ``a`` that differ in slot or index, or None if there is none.

    Of the elements that contain the byte, the two least by slot and index are named. Raises ``Undecided`` rather than
    running for minutes.
    """
    return trace_self_collision(a)[0]


def trace_collision(
    a: SlotView, b: SlotView, *, distinct_slots: bool = False
) -> tuple[Collision | None, frozenset[str]]:
    """As ``smallest_collision``, with the methods used.

    These are ``empty``, ``ranges`` (apart), ``cells`` (apart in every pair of slots), ``interleaved`` (the same steps,
    and runs side by side between them), ``bounds`` (of the equation, by themselves), ``branch``, ``pair`` and ``leap``
    (see ``equation``), ``bitmap`` and ``sets``.
    """
    if is_empty(a) or is_empty(b):
        return None, frozenset({"empty"})
    if _ranges_apart(a, b):
        return None, frozenset({"ranges"})
    if _cells_apart(a, b):
        return None, frozenset({"cells"})
    if _interleaved(a, b):
        return None, frozenset({"interleaved"})
    solver = CheapestSolution()
    byte = (_smallest_distinct if distinct_slots else _smallest_shared)(a, b, solver)
    if byte is None:
        return None, frozenset(solver.steps or {"bounds"})
    first, second, how = _owners(a, b, byte, distinct_slots)
    return _collision(byte, first, second), frozenset({*solver.steps, *how})


def trace_self_collision(a: SlotView) -> tuple[Collision | None, frozenset[str]]:
    """As ``smallest_self_collision``, and the methods: those of ``trace_collision``, ``broadcast``, ``nested``."""
    if is_empty(a):
        return None, frozenset({"empty"})
    solver = CheapestSolution()
    repeated = [(count, abs(stride)) for count, stride in dims(a) if count > 1]
    byte: int | None
    if any(stride == 0 for _, stride in repeated):
        byte = byte_range(a)[0]
        solver.steps.add("broadcast")
    elif _nested(repeated):
        return None, frozenset({"nested"})
    else:
        byte = _smallest_self(a, solver)
    if byte is None:
        return None, frozenset(solver.steps or {"bounds"})
    first, second, how = least_two_elements(a, byte)
    return _collision(byte, first, second), frozenset({*solver.steps, how})


def _collision(byte: int, first: Element, second: Element) -> Collision:
    return Collision(byte, first[0], first[1:-1], first[-1], second[0], second[1:-1], second[-1])


def _owners(a: SlotView, b: SlotView, byte: int, distinct_slots: bool) -> tuple[Element, Element, set[str]]:
    """Return the least pair of elements that contain ``byte``."""
    found, how = least_element(a, byte)
    first = certain(found, byte)
    second, also = least_element(b, byte, other_slot_than=first[0] if distinct_slots else None)
    if second is None:
        # Every owner in b is in the least slot of a: the next slot of a goes with that one.
        second, _ = least_element(b, byte)
        found, how = least_element(a, byte, other_slot_than=first[0])
    return certain(found, byte), certain(second, byte), {how, also}


def _ranges_apart(a: SlotView, b: SlotView) -> bool:
    (a_first, a_end), (b_first, b_end) = byte_range(a), byte_range(b)
    return a_end <= b_first or b_end <= a_first


def _cells_apart(a: SlotView, b: SlotView) -> bool:
    """Return whether no two cells meet even in range, for equal slot strides.

    With ``d = s - t``, slot ``s`` of a and ``t`` of b meet in range if ``a_first + d * stride < b_end`` and
    ``b_first < a_end + d * stride``. Every ``d`` from ``-(b's slots - 1)`` to ``a's slots - 1`` occurs, so it is enough
    to round two quotients inwards.
    """
    stride = a.slot_stride_bytes
    if stride <= 0 or stride != b.slot_stride_bytes:
        return False
    (a_first, a_end), (b_first, b_end) = cell_range(a), cell_range(b)
    least = max(1 - b.slot_count, div_up(b_first - a_end + 1, stride))
    return least > min(a.slot_count - 1, floor_div(b_end - 1 - a_first, stride))


def _nested(shape: list[tuple[int, int]]) -> bool:
    """Return whether each ``(count, stride)`` steps over all smaller strides' extent: then no two elements meet."""
    extent = 1
    for count, stride in sorted(shape, key=lambda dim: dim[1]):
        if stride < extent:
            return False
        extent += (count - 1) * stride
    return True


def _interleaved(a: SlotView, b: SlotView) -> bool:
    """Return whether both step alike, over runs that lie side by side: K and V of one token and head, say.

    The two runs and what lies between them are one item then; where no two such items meet, no two cells do.
    """
    if a.slot_count != b.slot_count or a.slot_stride_bytes != b.slot_stride_bytes:
        return False
    a_run, a_steps = _runs(a)
    b_run, b_steps = _runs(b)
    if a_steps != b_steps:
        return False
    start = min(a.offset_bytes, b.offset_bytes)
    end = max(a.offset_bytes + a_run, b.offset_bytes + b_run)
    if end - start < a_run + b_run:
        return False
    slots = [(a.slot_count, a.slot_stride_bytes)] if a.slot_count > 1 else []
    return _nested([(end - start, 1), *slots, *a_steps])


def _runs(view: SlotView) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes that an item and the axes directly around it make together, and the other axes by stride."""
    run = view.item_bytes
    steps: list[tuple[int, int]] = []
    for count, stride in sorted(view.axes, key=_stride):
        if stride == run and not steps:
            run *= count
        elif count > 1:
            steps.append((count, stride))
    return run, steps


def _stride(dim: tuple[int, int]) -> int:
    return dim[1]


def _smallest_shared(a: SlotView, b: SlotView, solver: CheapestSolution) -> int | None:
    """Return the smallest byte shared by any two cells."""
    try:
        _search_pair(a, b, solver)
    except SearchTooLong:
        decided, solver.byte = bitmaps.smallest_shared(a, b)
        if decided:
            solver.steps.add("bitmap")
            return solver.byte
        first = byte_range(a)[0]
        cost = sets.least_cost(_terms(a, b, with_slots=True), byte_range(b)[0] - first)
        solver.steps.add("sets")
        solver.byte = None if cost is None else first + cost
    return solver.byte


def _search_pair(a: SlotView, b: SlotView, solver: CheapestSolution) -> None:
    """Lower ``solver.byte`` to the smallest shared byte. Raises ``SearchTooLong``."""
    if not (is_empty(a) or is_empty(b) or _ranges_apart(a, b)):
        first = byte_range(a)[0]
        solver.search(_terms(a, b, with_slots=True), byte_range(b)[0] - first, first)


def _smallest_distinct(a: SlotView, b: SlotView, solver: CheapestSolution) -> int | None:
    """Return the smallest byte shared by cells of different slots."""
    if any(view.slot_stride_bytes == 0 and view.slot_count > 1 for view in (a, b)):
        # All the slots of one side are the same bytes, so a different one is always at hand.
        return _smallest_shared(a, b, solver)
    if a.slot_count == 1:
        return _smallest_shared(a, restrict(b, 1, b.slot_count - 1), solver)
    if b.slot_count == 1:
        return _smallest_shared(restrict(a, 1, a.slot_count - 1), b, solver)
    try:
        if a.slot_stride_bytes != b.slot_stride_bytes:
            return _smallest_by_exclusion(a, b, solver)
        first, inner = byte_range(a)[0], _terms(a, b, with_slots=False)
        for term in _slot_differences(a, b):
            solver.search((*inner, term), byte_range(b)[0] - first, first)
    except SearchTooLong:
        decided, solver.byte = bitmaps.smallest_shared(a, b, distinct_slots=True)
        if decided:
            solver.steps.add("bitmap")
            return solver.byte
        solver.steps.add("sets")
        first, inner = byte_range(a)[0], _terms(a, b, with_slots=False)
        cost = sets.least_cost_of_distinct_slots(a, b, inner, byte_range(b)[0] - first)
        solver.byte = None if cost is None else first + cost
    return solver.byte


def _smallest_by_exclusion(a: SlotView, b: SlotView, solver: CheapestSolution) -> int | None:
    """As ``_smallest_distinct``, for different slot strides. Raises ``SearchTooLong``.

    Boxes, a range of slots on either side, are searched without the rule. The smallest of their bytes bounds the answer
    from below, so it is the answer as soon as owners of different slots share it. If all its owners are in one slot
    ``s`` on both sides, the box is split into four that lack just the pair ``(s, s)``, and the next byte is looked at.
    """
    boxes: list[tuple[int, _Box]] = []

    def add(box: _Box) -> None:
        left, right = restrict(a, *box[0]), restrict(b, *box[1])
        solver.restart()
        _search_pair(left, right, solver)
        if solver.byte is not None:
            heapq.heappush(boxes, (solver.byte, box))

    add(((0, a.slot_count - 1), (0, b.slot_count - 1)))
    for _ in range(_EQUAL_SLOTS_LIMIT):
        if not boxes:
            return None
        byte, ((a_low, a_high), (b_low, b_high)) = heapq.heappop(boxes)
        owner = certain(least_element(restrict(a, a_low, a_high), byte)[0], byte)
        slot = a_low + owner[0]
        if (
            least_element(restrict(b, b_low, b_high), byte, other_slot_than=slot - b_low)[0]
            or least_element(restrict(a, a_low, a_high), byte, other_slot_than=owner[0])[0]
        ):
            return byte
        add(((a_low, slot - 1), (b_low, b_high)))
        add(((slot + 1, a_high), (b_low, b_high)))
        add(((slot, slot), (b_low, slot - 1)))
        add(((slot, slot), (slot + 1, b_high)))
    raise SearchTooLong


def _slot_differences(a: SlotView, b: SlotView) -> tuple[Term, Term]:
    """Return the terms of the slots if both strides are equal: the difference is anything but that of equal slots.

    Coordinates count from the lowest address. For a negative stride that is the last slot: ``x = n - 1 - s``,
    ``y = m - 1 - t``, and ``s == t`` means ``x - y == n - m``.
    """
    stride, low, high = abs(a.slot_stride_bytes), 1 - b.slot_count, a.slot_count - 1
    equal = 0 if a.slot_stride_bytes > 0 else a.slot_count - b.slot_count
    return Term(stride, equal + 1, high), Term(stride, low, equal - 1)


def _terms(a: SlotView, b: SlotView, *, with_slots: bool) -> tuple[Term, ...]:
    """Return the equation of two views: one term for each stride."""
    counts: dict[int, tuple[int, int]] = {}
    for side, view in enumerate((a, b)):
        for position, (count, stride) in enumerate(dims(view)):
            if count > 1 and stride and (with_slots or position):
                a_count, b_count = counts.get(abs(stride), (1, 1))
                # Two coordinates of one stride make the multiples 0 .. (n - 1) + (m - 1).
                counts[abs(stride)] = (a_count, b_count + count - 1) if side else (a_count + count - 1, b_count)
    return tuple(Term(stride, 1 - b_count, a_count - 1) for stride, (a_count, b_count) in _joined(counts).items())


def _joined(counts: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Join a stride with a multiple of it where both sides have no gap between the two.

    If ``n >= c``, ``x * s + y * (c * s)`` with ``x < n`` and ``y < m`` is every multiple of ``s`` below
    ``(n + c * (m - 1)) * s``. If both sides are so, neither the shared bytes nor the smallest of them change.
    """
    joined: dict[int, tuple[int, int]] = {}
    for stride in sorted(counts):
        a_outer, b_outer = counts[stride]
        for inner, (a_count, b_count) in joined.items():
            times, remainder = divmod(stride, inner)
            if not remainder and (a_count >= times or a_outer == 1) and (b_count >= times or b_outer == 1):
                joined[inner] = (a_count + times * (a_outer - 1), b_count + times * (b_outer - 1))
                break
        else:
            joined[stride] = (a_outer, b_outer)
    return joined


def _smallest_self(a: SlotView, solver: CheapestSolution) -> int | None:
    """Return the smallest byte of two elements, for a view without stride 0.

    The elements differ, so some coordinate does: the equations split on the first that differs, by descending stride.
    Swapping the elements turns a difference around, so it may be taken positive.
    """
    first = byte_range(a)[0]
    outer = sorted(((abs(s), n) for n, s in ((a.slot_count, a.slot_stride_bytes), *a.axes) if n > 1), reverse=True)
    equations = []
    for position, (stride, count) in enumerate(outer):
        rest: dict[int, tuple[int, int]] = {1: (a.item_bytes, a.item_bytes)}
        for other, other_count in outer[position + 1 :]:
            merged = rest.get(other, (1, 1))[0] + other_count - 1
            rest[other] = (merged, merged)
        terms = [Term(s, 1 - b_count, a_count - 1) for s, (a_count, b_count) in _joined(rest).items()]
        equations.append((Term(stride, 1, count - 1), *terms))
    try:
        for equation in equations:
            solver.search(equation, 0, first)
    except SearchTooLong:
        decided, solver.byte = bitmaps.smallest_twice(a)
        if decided:
            solver.steps.add("bitmap")
            return solver.byte
        solver.steps.add("sets")
        costs = [cost for equation in equations if (cost := sets.least_cost(equation, 0)) is not None]
        solver.byte = first + min(costs) if costs else None
    return solver.byte
