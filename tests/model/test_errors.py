from __future__ import annotations

import math

import pytest

from kvsan.model.errors import SpecError, require_choice, require_int, shown


def test_an_error_names_its_field() -> None:
    error = SpecError("layers[3].head_dim", "found 0, needs a whole number from 1 to 8")
    assert str(error) == "layers[3].head_dim: found 0, needs a whole number from 1 to 8"
    assert (error.field, error.problem) == ("layers[3].head_dim", "found 0, needs a whole number from 1 to 8")
    assert str(SpecError("", "malformed")) == "malformed"
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    "value", [10**5000, -(10**5000), "x" * 10**6, [0] * 10**5, "a\nb\nc", {"a": {"b": []}}], ids=type
)
def test_a_value_is_shown_on_one_short_line(value: object) -> None:
    assert len(shown(value)) <= 60
    assert "\n" not in shown(value)


def test_small_values_are_shown_whole() -> None:
    assert [shown(value) for value in (7, "tp4", None, True, 2**128 - 1)] == [
        "7",
        "'tp4'",
        "None",
        "True",
        "340282366920938463463374607431768211455",
    ]
    assert shown(10**5000) == "a whole number of 16610 bits"


@pytest.mark.parametrize("value", [0, 9, -1, 1.0, 2.5, math.nan, math.inf, True, "3", None, [3], 10**5000], ids=shown)
def test_what_is_no_whole_number_in_range(value: object) -> None:
    with pytest.raises(SpecError) as caught:
        require_int("tp", value, 1, 8)
    assert str(caught.value) == f"tp: found {shown(value)}, needs a whole number from 1 to 8"


def test_what_is() -> None:
    assert [require_int("tp", value, 1, 8) for value in (1, 8)] == [1, 8]


@pytest.mark.parametrize("value", ["", "hnd", None, 3, ["HND"], {}])
def test_a_choice(value: object) -> None:
    require_choice("kv_layout", "HND", ("HND", "NHD"))
    with pytest.raises(SpecError, match="needs one of HND, NHD"):
        require_choice("kv_layout", value, ("HND", "NHD"))
