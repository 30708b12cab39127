"""The linear equation behind an overlap, and its cheapest solution.

Say ``x`` are the coordinates of side a and ``y`` those of side b, all strides made positive, counted from the lowest
address. Where both sides have the stride ``s``, only ``d = x - y`` matters for whether they meet, and the least ``x``
with that difference is ``max(0, d)``. So the smallest shared byte, counted from a's first, is the least
``sum(s * max(0, d))`` subject to ``sum(s * d) = target`` and ``low <= d <= high``, where ``target`` is b's first byte
minus a's. A coordinate of a alone has ``low = 0``, one of b alone ``high = 0``; the byte in the item is a coordinate of
stride 1. With strides that nest, only few ``d`` are possible, however long the axes are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

from ...model.arithmetic import div_up
from .multiples import first_meeting, floor_div

#: Steps of search before the integer set library takes over; a step is about 5 microseconds.
STEP_BUDGET = 6000
#: Steps that one node of the search counts for; a first meeting counts for one.
_NODE_STEPS = 3
#: A coordinate with at most this many values left is tried value by value.
_BRANCH_LIMIT = 2
#: Intervals kept apart in the sums of the short coordinates; joining them beyond that only weakens a bound.
_INTERVAL_LIMIT = 256


class SearchTooLong(Exception):
    """The search spent its budget: nothing is known yet, ask the integer set library."""


class Term(NamedTuple):
    """One unknown ``d`` with ``low <= d <= high`` and coefficient ``stride > 0``; ``key`` names it to the caller."""

    stride: int
    low: int
    high: int
    key: int = -1


class Branch(NamedTuple):
    """The values that ``terms[position]`` may still take: ``first + k * step`` for ``k < values``."""

    position: int
    first: int
    step: int
    values: int


def narrowest(terms: Sequence[Term], target: int) -> Branch | None:
    """Return the term with the fewest values left, or None if the equation has no solution.

    Two necessary conditions on each term: the others' sum is within their bounds, and a multiple of their greatest
    common divisor. With one term they are also sufficient.
    """
    least = sum(stride * low for stride, low, _, _ in terms)
    most = sum(stride * high for stride, _, high, _ in terms)
    if not least <= target <= most:
        return None
    strides = [term.stride for term in terms]
    best: Branch | None = None
    for position, (stride, low, high, _) in enumerate(terms):
        others = gcd(*strides[:position], *strides[position + 1 :])
        common = gcd(stride, others)
        quotient, remainder = divmod(target, common)
        if remainder:
            return None
        first = max(low, div_up(target - most + stride * high, stride))
        last = min(high, floor_div(target - least + stride * low, stride))
        step = max(1, floor_div(others, common))  # exact: common divides others
        if step > 1:
            # stride/common and step are coprime: d is one residue modulo step
            residue = quotient * pow(floor_div(stride, common), -1, step)
            first += (residue - first) % step
        values = floor_div(last - first, step) + 1
        if values <= 0:
            return None
        if best is None or values < best.values:
            best = Branch(position, first, step, values)
            if values == 1:
                break
    return best


class CheapestSolution:
    """Branch and bound for the least byte over several equations; ``byte`` is the best so far.

    ``steps`` collects the methods used: ``branch``, ``pair`` (two terms in closed form), ``leap`` (first multiple in
    range).
    """

    def __init__(self) -> None:
        self.byte: int | None = None
        self.steps: set[str] = set()
        self._budget = STEP_BUDGET
        self._searched: dict[tuple[tuple[Term, ...], int], int] = {}

    def restart(self) -> None:
        """Forget the best byte, not the budget spent."""
        self.byte = None
        self._searched.clear()

    def search(self, terms: tuple[Term, ...], target: int, byte: int) -> None:
        """Lower ``self.byte`` to ``byte`` plus the equation's least cost, if that is less. Raises ``SearchTooLong``."""
        self._spend(_NODE_STEPS)
        if not terms:
            if target == 0:
                self._found(byte)
            return
        if self.byte is not None and byte + _least_cost(terms, target) >= self.byte:
            return
        branch = narrowest(terms, target)
        if branch is None:
            return
        if len(terms) == 1:
            self._found(byte + terms[0].stride * max(0, branch.first))
            return
        if branch.values > 1:
            # The same rest was searched with a start no higher: it cannot give less now.
            if self._searched.get((terms, target), byte + 1) <= byte:
                return
            self._searched[terms, target] = byte
        if branch.values <= _BRANCH_LIMIT:
            self._branch(terms, target, byte, branch)
        elif len(terms) == 2:
            self._pair(terms, target, byte, branch)
        else:
            self._leap(terms, target, byte)

    def _spend(self, steps: int) -> None:
        self._budget -= steps
        if self._budget < 0:
            raise SearchTooLong

    def _found(self, byte: int) -> None:
        if self.byte is None or byte < self.byte:
            self.byte = byte

    def _branch(self, terms: tuple[Term, ...], target: int, byte: int, branch: Branch) -> None:
        self.steps.add("branch")
        position, first, step, values = branch
        stride = terms[position].stride
        rest = (*terms[:position], *terms[position + 1 :])
        sums = [stride * (first + k * step) for k in range(values)]
        # Most promising first; the sort is stable, so the order is determined.
        sums.sort(key=lambda part: max(0, part) + max(0, target - part))
        for part in sums:
            self.search(rest, target - part, byte + max(0, part))

    def _pair(self, terms: Sequence[Term], target: int, byte: int, branch: Branch) -> None:
        """Two terms: the branch's values are all the solutions, and the cost is convex and piecewise linear along them.

        Its corners are where either term is 0, so its minimum over the lattice is at an end or next to a corner.
        """
        self.steps.add("pair")
        position, first, step, values = branch
        stride = terms[position].stride
        candidates = {0, values - 1}
        for corner in (0, floor_div(target, stride)):
            k = floor_div(corner - first, step)
            candidates |= {min(max(near, 0), values - 1) for near in (k, k + 1)}
        parts = [stride * (first + k * step) for k in candidates]
        self._found(byte + min(max(0, part) + max(0, target - part) for part in parts))

    def _leap(self, terms: tuple[Term, ...], target: int, byte: int) -> None:
        """Two long terms and more: visit only the values of the longest that can meet, from 0 outwards.

        ``max(0, part) + max(0, target - part)`` bounds the cost from below and never falls on the way outwards, so the
        walk ends at the first value whose bound is no better than what is known.
        """
        self.steps.add("leap")
        by_stride = tuple(sorted(terms, key=lambda term: term.stride, reverse=True))
        longest, second, *short = by_stride
        windows = [(target - high, target - low) for low, high in _sums(short)]
        stride, low, high, _ = longest
        # upwards from 0, then downwards from -1
        for signed, near, far in ((stride, max(0, low), high), (-stride, max(1, -high), -low)):
            for p in self._meetings(signed, near, far, second, windows):
                part = signed * p
                if self.byte is not None and byte + max(0, part) + max(0, target - part) >= self.byte:
                    break
                self.search(by_stride[1:], target - part, byte + max(0, part))

    def _meetings(
        self, step: int, near: int, far: int, second: Term, windows: Sequence[tuple[int, int]]
    ) -> Iterator[int]:
        """Yield, ascending, each ``p`` from ``near`` to ``far`` with which the second term can meet a window."""
        reach = (second.low, second.high)
        waiting: list[tuple[int, int]] = []  # a heap of the next p of each window
        self._spend(len(windows))
        for number, window in enumerate(windows):
            p = first_meeting(step, (near, far), second.stride, reach, window)
            if p is not None:
                waiting.append((p, number))
        heapq.heapify(waiting)
        while waiting:
            p = waiting[0][0]
            yield p
            while waiting and waiting[0][0] == p:
                self._spend(1)
                number = waiting[0][1]
                later = first_meeting(step, (p + 1, far), second.stride, reach, windows[number])
                if later is None:
                    heapq.heappop(waiting)
                else:
                    heapq.heapreplace(waiting, (later, number))


def _least_cost(terms: Sequence[Term], target: int) -> int:
    """Bound ``sum(s * max(0, d))`` from below; it is also ``target + sum(s * max(0, -d))``."""
    forced = sum(stride * low for stride, low, _, _ in terms if low > 0)
    negative = sum(stride * high for stride, _, high, _ in terms if high < 0)
    return max(forced, target - negative)


def _sums(terms: Sequence[Term]) -> list[tuple[int, int]]:
    """Cover every value of ``sum(s * d)`` by disjoint inclusive intervals, shortest strides first."""
    intervals = [(0, 0)]
    for stride, low, high, _ in reversed(terms):
        first, last = intervals[0][0], intervals[-1][1]
        if len(intervals) * (high - low + 1) > _INTERVAL_LIMIT or stride <= last - first + 1:
            intervals = [(first, last)]
        if stride <= last - first + 1 or high - low + 1 > _INTERVAL_LIMIT:
            intervals = [(first + stride * low, last + stride * high)]
            continue
        intervals = [(left + stride * d, right + stride * d) for d in range(low, high + 1) for left, right in intervals]
    return intervals


def solutions(terms: Sequence[Term], target: int, limit: int) -> list[dict[int, int]]:
    """Return every solution as ``{key: d}``. Raises ``SearchTooLong`` beyond ``limit`` steps."""
    budget = [limit]
    return list(_solutions(tuple(terms), target, {}, budget))


def _solutions(
    terms: tuple[Term, ...], target: int, known: dict[int, int], budget: list[int]
) -> Iterator[dict[int, int]]:
    budget[0] -= 1
    if not terms:
        if target == 0:
            yield known
        return
    branch = narrowest(terms, target)
    if branch is None:
        return
    position, first, step, values = branch
    if budget[0] < values:
        raise SearchTooLong
    stride, _, _, key = terms[position]
    rest = terms[:position] + terms[position + 1 :]
    for k in range(values):
        d = first + k * step
        yield from _solutions(rest, target - stride * d, {**known, key: d}, budget)
