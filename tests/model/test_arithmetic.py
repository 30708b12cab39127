from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsan.model.arithmetic import InexactDivision, div_up, exact_div, round_up

WHOLE = st.integers(-(10**30), 10**30)
POSITIVE = st.integers(1, 10**30)


@given(WHOLE, WHOLE)
def test_exact_division_refuses_a_remainder(dividend: int, divisor: int) -> None:
    if divisor == 0 or dividend % divisor:
        with pytest.raises(InexactDivision) as caught:
            exact_div(dividend, divisor, "pages in a slot")
        assert str(caught.value) == f"pages in a slot: {dividend} is not a multiple of {divisor}"
        assert (caught.value.dividend, caught.value.divisor) == (dividend, divisor)
    else:
        assert exact_div(dividend, divisor, "pages in a slot") * divisor == dividend


@given(WHOLE, POSITIVE)
def test_exact_division_undoes_a_product(quotient: int, divisor: int) -> None:
    assert exact_div(quotient * divisor, divisor, "what") == quotient


@given(WHOLE, POSITIVE)
def test_rounding_up(value: int, step: int) -> None:
    assert div_up(value, step) == ceil(Fraction(value, step))
    rounded = round_up(value, step)
    assert rounded % step == 0
    assert value <= rounded < value + step


def test_an_inexact_division_is_an_arithmetic_error() -> None:
    assert issubclass(InexactDivision, ArithmeticError)
