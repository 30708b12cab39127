"""Exact overlap: known answers, numbers too large to enumerate, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from kvsan.sim.overlap import (
    Collision,
    SlotView,
    Undecided,
    bitmaps,
    byte_range,
    equation,
    sets,
    smallest_collision,
    smallest_self_collision,
    trace_collision,
    trace_self_collision,
)
from kvsan.sim.overlap.elements import least_element

SLOTS = 2**40
PAGE = 2**20


def run(offset: int, stride: int, length: int = 1, count: int = SLOTS) -> SlotView:
    """One run of ``length`` bytes in every slot."""
    return SlotView(offset, count, stride, (), length)


def test_readme_example() -> None:
    left = SlotView(offset_bytes=0, slot_count=4, slot_stride_bytes=256, axes=((2, 100),), item_bytes=64)
    right = SlotView(offset_bytes=64, slot_count=4, slot_stride_bytes=256, axes=(), item_bytes=37)
    assert smallest_collision(left, right) == Collision(100, 0, (1,), 0, 0, (), 36)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (run(0, PAGE, 512), run(512, PAGE, PAGE - 512)),  # the two parts of a page
        (run(0, PAGE, 512), SlotView(1024, SLOTS, PAGE, ((511, 2048),), 1024)),  # a comb behind a run
        (
            SlotView(0, SLOTS, PAGE, ((32, 1024),), 512),
            SlotView(512, SLOTS, PAGE, ((32, 1024),), 512),
        ),  # K and V by turns
        (run(0, PAGE, 512, count=0), run(0, PAGE)),
        (run(0, PAGE, 512), SlotView(0, SLOTS, PAGE, ((4, 8), (0, 8)), 1)),
        (run(0, 6, 2), run(5, 9)),  # modulo 3: residues 0 and 1 against 2
    ],
)
def test_apart(a: SlotView, b: SlotView) -> None:
    for distinct in (False, True):
        assert smallest_collision(a, b, distinct_slots=distinct) is None
        assert smallest_collision(b, a, distinct_slots=distinct) is None


def test_residues_that_meet() -> None:
    assert smallest_collision(run(0, 6, 2), run(4, 9)) == Collision(13, 2, (), 1, 1, (), 0)


def test_planes_of_one_page_that_overlap_by_one_byte() -> None:
    a, b = run(0, PAGE, 513), run(512, PAGE, 512)
    assert smallest_collision(a, b) == Collision(512, 0, (), 512, 0, (), 0)
    assert smallest_collision(a, b, distinct_slots=True) is None


def test_a_page_that_runs_into_the_next_slot() -> None:
    page = run(0, PAGE, PAGE + 1)
    assert smallest_collision(page, page) == Collision(0, 0, (), 0, 0, (), 0)
    assert smallest_collision(page, page, distinct_slots=True) == Collision(PAGE, 0, (), PAGE, 1, (), 0)
    assert smallest_self_collision(page) == Collision(PAGE, 0, (), PAGE, 1, (), 0)
    assert smallest_self_collision(run(0, PAGE, PAGE)) is None


@pytest.mark.parametrize("stride", [2**20, 2**39, 2**75])
def test_the_first_meeting_of_coprime_strides(stride: int) -> None:
    """``s * P == 1 + t * (P + 1)`` first for ``s = P``, ``t = P - 1``, as ``P * P == 1 + (P - 1) * (P + 1)``."""
    a, b = run(0, stride, count=stride + 1), run(1, stride + 1, count=stride)
    met = Collision(stride**2, stride, (), 0, stride - 1, (), 0)
    assert smallest_collision(a, b) == met
    assert smallest_collision(a, b, distinct_slots=True) == met
    assert smallest_collision(run(0, stride, count=stride), b) is None
    assert smallest_collision(a, run(1, stride + 1, count=stride - 1)) is None


@pytest.mark.parametrize("stride", [2**20, 2**75])
def test_the_set_library_takes_large_numbers(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equation, "STEP_BUDGET", 0)
    monkeypatch.setattr(bitmaps, "EXTENT_LIMIT", 0)
    met = Collision(stride**2, stride, (), 0, stride - 1, (), 0)
    a, b = run(0, stride, count=stride + 1), run(1, stride + 1, count=stride)
    for distinct in (False, True):
        answer, methods = trace_collision(a, b, distinct_slots=distinct)
        assert answer == met
        assert "sets" in methods
    assert smallest_collision(run(0, stride, count=stride), b) is None


def test_combs_of_two_page_sizes_meet_first_far_away() -> None:
    """Two size classes with a gap at the end of each token, both with 2**40 slots: a leap, not a walk."""
    a = SlotView(0, SLOTS, 2**30 + 2, ((4, 8),), 4)
    b = SlotView(4, SLOTS, 2**30, ((4, 8),), 4)
    answer, methods = trace_collision(a, b)
    # slot s of a lies 2 * s bytes later in its page, so slot 1 is the first whose bytes 4, 5 reach b's gap
    assert answer == Collision(2**30 + 4, 1, (0,), 2, 1, (0,), 0)
    assert "leap" in methods
    # Different slots: a's page must be late by a whole page, 2 * s + 8 * i + u == 2**30 + 4 + 8 * j + v. The left side
    # exceeds 2 * s by at most 27, so 2 * s is at least 2**30 - 22, and that with i = 3, u = 2, j = v = 0 is a solution.
    late = 2**29 - 11
    expected = Collision(late * (2**30 + 2) + 26, late, (3,), 2, late + 1, (0,), 0)
    assert smallest_collision(a, b, distinct_slots=True) == expected


def test_offsets_beyond_64_bits_shift_the_answer() -> None:
    a = SlotView(3, SLOTS, PAGE - 4, ((8, 128), (2, -40)), 16)
    b = SlotView(-PAGE, SLOTS, PAGE, ((4, 512),), 8)
    for distinct in (False, True):
        near = smallest_collision(a, b, distinct_slots=distinct)
        assert near is not None
        for shift in (2**64, -(2**80) - 1):
            far_a, far_b = (msgspec.structs.replace(v, offset_bytes=v.offset_bytes + shift) for v in (a, b))
            far = smallest_collision(far_a, far_b, distinct_slots=distinct)
            assert far == msgspec.structs.replace(near, byte=near.byte + shift)


def test_negative_strides_name_the_slot_at_the_lowest_address() -> None:
    view = run(0, -PAGE, PAGE)
    last = SLOTS - 1
    assert byte_range(view) == (-last * PAGE, PAGE)
    assert smallest_collision(view, run(-last * PAGE, PAGE)) == Collision(-last * PAGE, last, (), 0, 0, (), 0)


def test_broadcast_collides_with_itself_at_its_first_byte() -> None:
    broadcast = SlotView(7, 2, PAGE, ((3, -8), (5, 0)), 4)
    assert smallest_self_collision(broadcast) == Collision(7 - 16, 0, (2, 0), 0, 0, (2, 1), 0)
    assert smallest_self_collision(run(5, 0, 4)) == Collision(5, 0, (), 0, 1, (), 0)
    assert smallest_self_collision(run(5, 0, 4, count=1)) is None


def test_distinct_slots_of_slots_that_all_lie_on_each_other() -> None:
    same, one = run(0, 0, 4), run(0, 0, 4, count=1)
    assert smallest_collision(same, same, distinct_slots=True) == Collision(0, 0, (), 0, 1, (), 0)
    assert smallest_collision(same, one, distinct_slots=True) == Collision(0, 1, (), 0, 0, (), 0)
    assert smallest_collision(one, same, distinct_slots=True) == Collision(0, 0, (), 0, 1, (), 0)
    assert smallest_collision(one, one, distinct_slots=True) is None


def test_an_element_is_found_by_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    view = SlotView(5, SLOTS, PAGE, ((8, 64), (4, -16)), 16)
    byte = 5 + (SLOTS - 1) * PAGE + 3 * 64 - 2 * 16 + 9
    element = (SLOTS - 1, 3, 2, 9)
    assert least_element(view, byte) == (element, "branch")
    monkeypatch.setattr("kvsan.sim.overlap.elements._STEP_LIMIT", 0)
    assert least_element(view, byte) == (element, "sets")
    assert least_element(view, byte, other_slot_than=SLOTS - 1) == (None, "sets")
    view, byte = msgspec.structs.replace(view, slot_count=5), byte - (SLOTS - 5) * PAGE
    assert least_element(view, byte) == ((4, 3, 2, 9), "bitmap")
    assert least_element(view, byte, other_slot_than=4) == (None, "bitmap")


def test_giving_up_is_an_error_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equation, "STEP_BUDGET", 0)
    monkeypatch.setattr(bitmaps, "EXTENT_LIMIT", 0)
    monkeypatch.setattr(sets, "OPERATION_LIMIT", 1)
    view = SlotView(0, SLOTS, PAGE - 1, ((8, 129), (7, 31)), 5)
    with pytest.raises(Undecided, match="simplify the strides"):
        smallest_collision(view, run(4, PAGE))
    with pytest.raises(Undecided):
        smallest_self_collision(view)


@pytest.mark.parametrize(("slot_count", "axes", "item_bytes"), [(-1, (), 1), (1, ((-1, 4),), 1), (1, (), -1)])
def test_negative_counts_are_refused(slot_count: int, axes: tuple[tuple[int, int], ...], item_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        SlotView(0, slot_count, 8, axes, item_bytes)


def test_answers_repeat() -> None:
    a = SlotView(0, SLOTS, 41985, ((64, 656),), 600)
    b = SlotView(500, SLOTS, 131071, ((32, 4096),), 4000)
    assert len({trace_collision(a, b, distinct_slots=True) for _ in range(5)}) == 1
    assert len({trace_self_collision(SlotView(0, SLOTS, 8192 - 16, ((32, 256), (128, 2)), 2)) for _ in range(5)}) == 1


def test_the_fast_paths_import_neither_numpy_nor_islpy() -> None:
    script = """
import sys
from kvsan.sim.overlap import SlotView, smallest_collision, smallest_self_collision
a, b = SlotView(0, 2**40, 2**20, ((32, 512),), 512), SlotView(3, 2**40, 41984, ((64, 656),), 656)
assert smallest_collision(a, b, distinct_slots=True) and smallest_self_collision(a) is None
assert not {"numpy", "islpy"} & set(sys.modules), "imported"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
