"""Exact overlap of strided byte sets, with the smallest shared byte as the witness.

    left = SlotView(offset_bytes=0, slot_count=4, slot_stride_bytes=256, axes=((2, 100),), item_bytes=64)
    right = SlotView(offset_bytes=64, slot_count=4, slot_stride_bytes=256, axes=(), item_bytes=37)
    assert smallest_collision(left, right).byte == 100

Invariant: every answer is exact, for any Python integers. ``None`` is a proof that no byte is shared, and a
``Collision`` names the smallest shared byte; nothing is sampled. Method, cheapest first:

1. ranges that do not meet;
2. one linear equation in the *differences* of the two sides' indices, solved by a search that branches on the index
   with the fewest values left (bounds from outside, greatest common divisors from inside);
3. where two long axes with different strides meet (the pages of two size classes), a Euclid-like "first multiple in a
   range", so that 2**40 slots cost as much as ten (``multiples``);
4. bitmaps, once the search has spent its budget of steps, where the views are not too long for them (``bitmaps``);
5. for longer ones the integer set library, imported only then (``sets``).

Cost: 1 to 3 take microseconds, and some milliseconds at most (``equation.STEP_BUDGET``). 4 takes milliseconds, up to a
second for views of 128 MiB (of more, where strides and items have a common divisor). 5 takes milliseconds, up to
some seconds: integer programming is NP-hard in the number of axes. Beyond ``sets.OPERATION_LIMIT`` it raises
``Undecided``, which is no answer. ``trace_collision`` and ``trace_self_collision`` say what was used.
"""

from __future__ import annotations

from .pairs import smallest_collision, smallest_self_collision, trace_collision, trace_self_collision
from .sets import Undecided
from .views import Collision, SlotView, byte_range

__all__ = [
    "Collision",
    "SlotView",
    "Undecided",
    "byte_range",
    "smallest_collision",
    "smallest_self_collision",
    "trace_collision",
    "trace_self_collision",
]
