"""Whole-number arithmetic on sizes: every division says what it intends.

A size is never a float and never silently floored: ``exact_div`` refuses a remainder, ``div_up`` and ``round_up`` say
that they round.
"""

from __future__ import annotations


class InexactDivision(ArithmeticError):
    """A division that must be exact left a remainder; the message names both operands."""

    def __init__(self, dividend: int, divisor: int, what: str) -> None:
        self.dividend = dividend
        self.divisor = divisor
        super().__init__(f"{what}: {dividend} is not a multiple of {divisor}")


def exact_div(dividend: int, divisor: int, what: str) -> int:
    """Return ``dividend / divisor``, which must be a whole number.

    ``what`` names the quantity for the error. Raises ``InexactDivision`` on a remainder and on a divisor of zero.
    """
    if divisor == 0:
        raise InexactDivision(dividend, divisor, what)
    quotient, remainder = divmod(dividend, divisor)
    if remainder:
        raise InexactDivision(dividend, divisor, what)
    return quotient


def div_up(dividend: int, divisor: int) -> int:
    """Return ``dividend / divisor`` rounded up to a whole number (``divisor`` positive)."""
    return -(-dividend // divisor)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` (positive) that is at least ``value``."""
    return div_up(value, multiple) * multiple
