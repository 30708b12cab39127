"""The first multiple in a range, in as many steps as Euclid's algorithm.

Two size classes of pages with strides ``P`` and ``Q`` over one pool meet where ``p * P - q * Q`` falls into a window:
``p * P`` modulo ``Q`` in a range. Trying every ``p`` would take as many steps as there are slots.
"""

from __future__ import annotations

from ...model.arithmetic import div_up


def floor_div(dividend: int, divisor: int) -> int:
    """Return the largest ``k`` with ``k * divisor <= dividend`` (``divisor`` positive): floored on purpose."""
    return divmod(dividend, divisor)[0]


def first_multiple_in_range(step: int, modulus: int, low: int, high: int) -> int | None:
    """Return the smallest ``k >= 0`` with ``low <= (k * step) % modulus <= high``, or None.

    Needs ``0 <= low <= high < modulus``. Why it is exact. Reduced to ``0 < step < modulus`` and ``low > 0``:

    - Mirroring, ``(k * step) % m in [low, high]`` is ``(k * (m - step)) % m in [m - high, m - low]`` (no residue 0 in
      the range), so ``2 * step <= m`` may be assumed.
    - If a multiple of ``step`` lies in the range, the least ``k`` is ``ceil(low / step)``: nothing has wrapped by then.
    - Otherwise ``k * step - y * m`` must lie in the range for some ``y >= 1``. Modulo ``step`` this is
      ``(-y * m) % step in [low % step, high % step]``, a range that does not wrap, since no multiple of ``step`` lies
      between ``low`` and ``high``. Conversely every such ``y`` has exactly one ``k``, ``ceil((low + y * m) / step)``,
      which grows with ``y``: the least ``y`` gives the least ``k``.

    The modulus at least halves on each descent, so the depth is at most its bit length.
    """
    step %= modulus
    if low == 0:
        return 0
    if step == 0:
        return None
    if 2 * step > modulus:
        step, low, high = modulus - step, modulus - high, modulus - low
    k = div_up(low, step)
    if k * step <= high:
        return k
    wraps = first_multiple_in_range(-modulus % step, step, low % step, high % step)
    return None if wraps is None else div_up(low + wraps * modulus, step)


def first_meeting(
    step: int, reach: tuple[int, int], other: int, other_reach: tuple[int, int], window: tuple[int, int]
) -> int | None:
    """Return the smallest ``p`` in ``reach`` with ``p * step + q * other`` in ``window`` for a ``q`` in its.

    Ranges are inclusive, ``other`` is positive, ``step`` is not 0. Write ``v = p * step`` and ``window = [w0, w1]``.
    A ``q`` exists only if ``w0 - other * q_high <= v <= w1 - other * q_low``, which bounds ``p``. If the window holds
    ``other`` integers or more, the windows of consecutive ``q`` touch and that is enough. Otherwise at most one ``q``
    fits, ``q = -floor((v - w0) / other)``, exactly when ``(v - w0) % other <= w1 - w0``, and the bounds on ``v`` put it
    into ``other_reach``.
    """
    low, high = window
    least, most = low - other * other_reach[1], high - other * other_reach[0]
    if step < 0:
        least, most = -most, -least
    first = max(reach[0], div_up(least, abs(step)))
    last = min(reach[1], floor_div(most, abs(step)))
    if first > last:
        return None
    width = high - low
    if width >= other - 1:
        return first
    # The range of residues for k = p - first; where it wraps around 0, it contains 0 and k = 0 is the answer.
    start = (low - first * step) % other
    if start + width >= other:
        return first
    k = first_multiple_in_range(step, other, start, start + width)
    return None if k is None or first + k > last else first + k
