"""Exact overlap against brute force: every byte of both views enumerated, on 100,000 random pairs and more.

Random views are small and aim at one path at a time; where small numbers would not reach a path, its limit is set to
almost nothing, so that the same code decides them. ``Refuted`` is raised for any difference, and the last tests plant
errors to show that it would be.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from kvsan.sim.overlap import (
    Collision,
    SlotView,
    bitmaps,
    byte_range,
    elements,
    equation,
    multiples,
    pairs,
    sets,
    trace_collision,
    trace_self_collision,
)

Pair = tuple[SlotView, SlotView]


class Refuted(AssertionError):
    """Brute force found another answer."""


def addresses(view: SlotView) -> np.ndarray:
    """Every byte's address, in the order of ties: slot, index, byte in the item."""
    grid = np.full(1, view.offset_bytes, dtype=np.int64)
    for count, stride in ((view.slot_count, view.slot_stride_bytes), *view.axes, (view.item_bytes, 1)):
        grid = (grid[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return grid


def coordinates(view: SlotView, position: int) -> tuple[int, tuple[int, ...], int]:
    shape = (view.slot_count, *(count for count, _ in view.axes), view.item_bytes)
    slot, *index, byte = (int(x) for x in np.unravel_index(position, shape))
    return slot, tuple(index), byte


def brute_collision(a: SlotView, b: SlotView, distinct_slots: bool) -> Collision | None:
    left, right = addresses(a), addresses(b)
    if not (left.size and right.size):
        return None
    base = min(left.min(), right.min())
    left, right = left - base, right - base
    span = max(left.max(), right.max()) + 1
    shared = (np.bincount(left, minlength=span) > 0) & (np.bincount(right, minlength=span) > 0)
    if not distinct_slots:
        if not shared.any():
            return None
        byte = int(shared.argmax())
        first, second = int((left == byte).argmax()), int((right == byte).argmax())
        return Collision(byte + int(base), *coordinates(a, first), *coordinates(b, second))
    left_cell, right_cell = left.size // a.slot_count, right.size // b.slot_count
    for byte in np.flatnonzero(shared).tolist():
        # first position in each slot that contains the byte; sorted by slot
        xs, ys = np.flatnonzero(left == byte).tolist(), np.flatnonzero(right == byte).tolist()
        pairs_of_slots = [(x // left_cell, y // right_cell, x, y) for x in xs for y in ys]
        distinct = [pair for pair in pairs_of_slots if pair[0] != pair[1]]
        if distinct:
            _, _, x, y = min(distinct)
            return Collision(byte + int(base), *coordinates(a, x), *coordinates(b, y))
    return None


def brute_self_collision(a: SlotView) -> Collision | None:
    all_bytes = addresses(a)
    if not all_bytes.size:
        return None
    base = all_bytes.min()
    twice = np.bincount(all_bytes - base) > 1
    if not twice.any():
        return None
    byte = int(twice.argmax() + base)
    x, y, *_ = (int(position) for position in np.flatnonzero(all_bytes == byte))
    return Collision(byte, *coordinates(a, x), *coordinates(a, y))


def check_pair(a: SlotView, b: SlotView, distinct_slots: bool) -> frozenset[str]:
    answer, methods = trace_collision(a, b, distinct_slots=distinct_slots)
    expected = brute_collision(a, b, distinct_slots)
    if answer != expected:
        raise Refuted(f"{a} and {b}, distinct_slots={distinct_slots}: {answer} instead of {expected}")
    return methods


def check_self(a: SlotView) -> frozenset[str]:
    answer, methods = trace_self_collision(a)
    expected = brute_self_collision(a)
    if answer != expected:
        raise Refuted(f"{a}: {answer} instead of {expected}")
    return methods


# Families of views. Each has at most some hundred bytes.


def runs(rng: random.Random) -> Pair:
    """Bare runs over slots, the stride equal or not."""
    strides = [rng.randint(1, 40)] * 2 if rng.random() < 0.5 else [rng.randint(-40, 40), rng.randint(-40, 40)]
    first, second = (SlotView(rng.randint(-30, 30), rng.randint(1, 12), s, (), rng.randint(1, 9)) for s in strides)
    return first, second


def anything(rng: random.Random) -> Pair:
    """Any strides: negative, 0, overlapping; counts of 0 and 1."""

    def view() -> SlotView:
        axes = tuple(
            (rng.choice((0, 1, 2, 2, 3, 3, 4)) or rng.randint(0, 2), rng.randint(-24, 24))
            for _ in range(rng.randint(0, 3))
        )
        return SlotView(
            rng.randint(-60, 60), rng.randint(0, 5) or rng.randint(0, 1), rng.randint(-50, 50), axes, rng.randint(1, 4)
        )

    return view(), view()


def pages(rng: random.Random) -> Pair:
    """Two planes of one slot, as layouts have them: nested strides in any order, often the same ones on both sides."""
    item = rng.choice((1, 2, 4))
    counts = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    gap = rng.choice((1, 1, 2, 3))
    stride, axes = item * gap, []
    for count in counts:
        axes.append((count, stride))
        stride *= count + rng.choice((0, 0, 0, 1))
    slot = stride * rng.choice((1, 1, 2)) + rng.choice((0, 0, 0, -1, 1))
    rng.shuffle(axes)

    def plane() -> SlotView:
        own = [axis for axis in axes if rng.random() < 0.9]
        if rng.random() < 0.3:
            rng.shuffle(own)
        if own and rng.random() < 0.2:
            own[0] = (max(1, own[0][0] + rng.choice((-1, 1))), own[0][1])
        return SlotView(
            rng.randint(-stride, 2 * stride) if rng.random() < 0.5 else item * rng.randint(0, 3),
            rng.randint(1, 4),
            slot,
            tuple(own),
            item * rng.choice((1, 1, gap)) + (rng.random() < 0.1),
        )

    return plane(), plane()


def size_classes(rng: random.Random) -> Pair:
    """Pages of two sizes over one pool, with gaps inside."""
    step = rng.choice((1, 1, 2, 4, 8))

    def klass() -> SlotView:
        tokens, token_bytes = rng.randint(1, 4), step * rng.randint(1, 4)
        size = tokens * token_bytes + step * rng.randint(0, 3)
        return SlotView(
            step * rng.randint(-8, 20), rng.randint(1, 14), size, ((tokens, token_bytes),), rng.randint(1, token_bytes)
        )

    return klass(), klass()


def sides(rng: random.Random) -> Pair:
    """K and V side by side in each token and head, with or without a gap, a little off now and then."""
    item, dims = rng.choice((1, 2)), (rng.randint(1, 3), rng.randint(1, 3))
    content = item * sum(dims) + rng.choice((0, 0, 1, -1))
    heads, tokens = rng.randint(1, 3), rng.randint(1, 3)
    axes = [(heads, content), (tokens, heads * content + rng.choice((0, 0, 0, 2)))]
    slots, step = rng.randint(1, 3), tokens * axes[1][1] + rng.choice((0, 0, 0, 3, -1))
    views = []
    for dim, offset in zip(dims, (0, item * dims[0]), strict=True):
        own = [*axes, (dim, item)]
        rng.shuffle(own)
        views.append(SlotView(offset + (rng.random() < 0.1), slots, step, tuple(own), item))
    return views[0], views[1]


FAMILIES: tuple[Callable[[random.Random], Pair], ...] = (runs, anything, pages, size_classes, sides)


def campaign(seed: int, rounds: int) -> Counter[str]:
    """Check ``rounds`` pairs of each family, half with distinct slots, and every second pair's first view by itself."""
    rng = random.Random(seed)
    used: Counter[str] = Counter()
    for number in range(rounds):
        for family in FAMILIES:
            a, b = family(rng)
            distinct = rng.random() < 0.5
            methods = check_pair(a, b, distinct)
            used.update(f"{method} distinct" if distinct else method for method in methods)
            used["pairs"] += 1
            if number % 2:
                used.update(f"{method} self" for method in check_self(a))
                used["self"] += 1
    return used


def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach the leaps, the joined intervals and the exclusion of many equal slots with small numbers."""
    monkeypatch.setattr(equation, "_BRANCH_LIMIT", 1)
    monkeypatch.setattr(equation, "_INTERVAL_LIMIT", 4)
    monkeypatch.setattr(pairs, "_EQUAL_SLOTS_LIMIT", 3)


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_brute_force(seed: int) -> None:
    used = campaign(seed, 3_000)
    assert used["pairs"] == 15_000
    assert used["self"] == 7_500
    for method in (
        *("empty", "ranges", "cells", "bounds", "branch", "branch distinct", "nested self", "broadcast self"),
        *("interleaved", "interleaved distinct"),
    ):
        assert used[method] >= 25, (method, used)


@pytest.mark.parametrize("seed", range(10, 13))
def test_leaps_agree_with_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_limits(monkeypatch)
    used = campaign(seed, 3_000)
    assert used["pairs"] == 15_000
    for method in ("leap", "leap distinct", "leap self", "pair", "pair distinct", "pair self"):
        assert used[method] >= 25, (method, used)


def test_bitmaps_agree_with_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equation, "STEP_BUDGET", 0)
    monkeypatch.setattr(elements, "_STEP_LIMIT", 0)
    monkeypatch.setattr(sets, "_least", None)
    used = campaign(21, 2_000)
    for method in ("bitmap", "bitmap distinct", "bitmap self"):
        assert used[method] >= 500, (method, used)


def test_the_set_library_agrees_with_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equation, "STEP_BUDGET", 0)
    monkeypatch.setattr(elements, "_STEP_LIMIT", 0)
    monkeypatch.setattr(bitmaps, "EXTENT_LIMIT", 0)
    used = campaign(20, 250)
    for method in ("sets", "sets distinct", "sets self"):
        assert used[method] >= 25, (method, used)


def test_page_like_sizes_agree_with_brute_force() -> None:
    """Tokens x heads x head dim in any order, padded and not, over a few slots of two sizes."""
    rng = random.Random(5)
    used: Counter[str] = Counter()

    def plane() -> SlotView:
        item = rng.choice((1, 2, 4))
        counts = [rng.choice((16, 32)), rng.choice((1, 2, 4)), rng.choice((24, 32, 64))]
        rng.shuffle(counts)
        stride, axes = item, []
        for count in counts:
            axes.append((count, stride))
            stride = stride * count + rng.choice((0, 0, 0, item, 16))
        rng.shuffle(axes)
        slot = stride * rng.choice((1, 2, 3)) + rng.choice((0, 0, -16, 64, 1))
        return SlotView(
            rng.choice((0, 0, stride, rng.randint(0, 3 * stride))), rng.randint(1, 9), slot, tuple(axes), item
        )

    for _ in range(300):
        a, b = plane(), plane()
        if rng.random() < 0.5:
            b = SlotView(b.offset_bytes, b.slot_count, a.slot_stride_bytes, b.axes, b.item_bytes)
        used.update(check_pair(a, b, distinct_slots=False))
        check_self(a)
    assert used["branch"] > 100, used


def test_first_multiple_in_range_agrees_with_trying() -> None:
    for modulus in range(1, 22):
        for step in range(-modulus, 2 * modulus):
            residues = [k * step % modulus for k in range(modulus)]
            for low in range(modulus):
                for high in range(low, modulus):
                    expected = next((k for k, residue in enumerate(residues) if low <= residue <= high), None)
                    assert multiples.first_multiple_in_range(step, modulus, low, high) == expected


def test_first_meeting_agrees_with_trying() -> None:
    rng = random.Random(3)
    for _ in range(20_000):
        step = rng.choice((-1, 1)) * rng.randint(1, 30)
        other = rng.randint(1, 30)
        reach, other_reach, window = ((low := rng.randint(-9, 9), low + rng.randint(0, 12)) for _ in range(3))
        window = (window[0] * 9, window[0] * 9 + rng.randint(0, 20))
        expected = next(
            (
                p
                for p in range(reach[0], reach[1] + 1)
                if any(
                    window[0] <= p * step + q * other <= window[1] for q in range(other_reach[0], other_reach[1] + 1)
                )
            ),
            None,
        )
        assert multiples.first_meeting(step, reach, other, other_reach, window) == expected


def test_byte_range_agrees_with_brute_force() -> None:
    rng = random.Random(4)
    for _ in range(2_000):
        view, _ = anything(rng)
        every = addresses(view)
        expected = (int(every.min()), int(every.max()) + 1) if every.size else (view.offset_bytes,) * 2
        assert byte_range(view) == expected


# Planted errors: each must be refuted, or the tests above prove nothing.


def _later(k: int | None) -> int | None:
    return None if k is None else k + 1


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the first multiple is one too late": lambda patch: patch.setattr(
        multiples,
        "first_multiple_in_range",
        lambda *a, real=multiples.first_multiple_in_range: _later(real(*a)),
    ),
    "the witness is one byte too high": lambda patch: patch.setattr(
        pairs,
        "_collision",
        lambda byte, x, y, real=pairs._collision: real(byte + 1, (*x[:-1], x[-1] + 1), (*y[:-1], y[-1] + 1)),
    ),
    "ranges that touch count as apart one byte too soon": lambda patch: patch.setattr(
        pairs,
        "_ranges_apart",
        lambda a, b: byte_range(a)[1] - 1 <= byte_range(b)[0] or byte_range(b)[1] <= byte_range(a)[0],
    ),
    "equal slots count as distinct": lambda patch: patch.setattr(pairs, "_smallest_distinct", pairs._smallest_shared),
    "the bound on the cost is one too high": lambda patch: patch.setattr(
        equation, "_least_cost", lambda terms, target, real=equation._least_cost: real(terms, target) + 1
    ),
    "runs side by side need no room between the steps": lambda patch: patch.setattr(
        pairs, "_nested", lambda shape: all(stride > 0 for _, stride in shape)
    ),
    "strides join over a gap": lambda patch: patch.setattr(
        pairs,
        "_joined",
        lambda counts: {1: tuple(max(1, sum(s * (n[i] - 1) for s, n in counts.items()) + 1) for i in (0, 1))},
    ),
    "the last owner is named, not the first": lambda patch: patch.setattr(
        elements, "_elements", lambda *a, real=elements._elements: real(*a)[::-1]
    ),
}


@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_refuted(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_limits(monkeypatch)
    PLANTED[error](monkeypatch)
    with pytest.raises((Refuted, AssertionError, RuntimeError)):  # the solver notices some contradictions itself
        campaign(30, 400)


def test_a_witness_that_is_off_by_one_is_refuted() -> None:
    """The oracle by its definition: both elements contain the byte, and no smaller byte is shared."""
    rng = random.Random(31)
    seen = 0
    for _ in range(300):
        a, b = pages(rng)
        collision, _ = trace_collision(a, b)
        if collision is None:
            continue
        seen += 1
        where = [
            view.offset_bytes
            + slot * view.slot_stride_bytes
            + sum(i * stride for i, (_, stride) in zip(index, view.axes, strict=True))
            + byte
            for view, slot, index, byte in (
                (a, collision.slot_a, collision.index_a, collision.byte_in_item_a),
                (b, collision.slot_b, collision.index_b, collision.byte_in_item_b),
            )
        ]
        assert where == [collision.byte] * 2
        shared = set(addresses(a).tolist()) & set(addresses(b).tolist())
        assert collision.byte in shared
        assert not any(byte < collision.byte for byte in shared)
        assert collision.byte + 1 != min(shared)
        assert collision.byte - 1 not in shared
    assert seen > 100
