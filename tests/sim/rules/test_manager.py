"""Rule ``manager``: each promise broken on its own, and decisions that keep them all."""

from __future__ import annotations

import msgspec
import pytest

from kvsan.model.selection import BEFORE_21553, CONSISTENT, Decision, Number, SelectionInputs, select
from kvsan.sim.rules.manager import check_manager, manager_problems

replace = msgspec.structs.replace


def sound(**inputs) -> Decision:
    return select(SelectionInputs(**inputs), CONSISTENT)


def aspects(decision: Decision) -> list[str]:
    return [problem.aspect for problem in manager_problems(decision)]


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"sleep": True},
        {"sparse": "dsa"},
        {"sparse": "dsa", "sleep": True},
        {"geometry": "variable", "v2": "false"},
        {"sparse": "qsa", "hybrid": "some", "attention_dp": True},
        {"sparse": "rocket"},
        {"hybrid": "some", "v2": "false", "py_mamba": True},
    ],
)
def test_sound_decisions_have_no_finding(inputs) -> None:
    assert list(check_manager(sound(**inputs))) == []


def test_the_manager_held_is_not_the_one_predicted() -> None:
    decision = select(SelectionInputs(sparse="skip_softmax", attention_dp=True), BEFORE_21553)
    (finding,) = check_manager(decision)
    assert finding.rule == "manager"
    assert finding.message == "the manager held is v1, and the seats were sized for a V2 manager: 16 seats"
    assert finding.where[0].manager == "v1"
    assert "geometry and algorithm" in finding.remedy


@pytest.mark.parametrize("name", ["index rows", "bytes per token", "warm-up", "budget"])
def test_a_number_of_another_manager(name) -> None:
    decision = sound(sleep=True)
    assert (decision.asked, decision.manager) == ("v2", "v1")
    numbers = [Number(number.name, "v2", 1) if number.name == name else number for number in decision.numbers]
    (finding,) = check_manager(replace(decision, numbers=tuple(numbers)))
    assert finding.message == f"{name} comes from v2, and v1 is held"


def test_a_fall_back_without_a_warning() -> None:
    assert aspects(replace(sound(sleep=True), warning=None)) == ["warning"]
    assert aspects(replace(sound(), warning=None)) == []


def test_an_owner_that_falls_back_loses_its_buffers() -> None:
    decision = replace(sound(sleep=True), inputs=SelectionInputs(sparse="dsa", sleep=True))
    assert aspects(decision) == ["owner", "roles"]
    (_, roles) = check_manager(decision)
    assert roles.message == "v1 has no buffer for index_key, which the model stores"


@pytest.mark.parametrize(
    ("inputs", "missing"),
    [
        ({"hybrid": "some"}, "ssm_state, conv_state"),
        ({"sparse": "qsa", "hybrid": "some"}, "index_key, qsa_index_position, ssm_state, conv_state"),
        ({"sparse": "rocket"}, "kt_cache"),
        ({"sparse": "deepseek_v4"}, "compressor, indexer, sliding"),
    ],
)
def test_every_role_of_every_layer_needs_a_buffer(inputs, missing) -> None:
    decision = replace(sound(), inputs=SelectionInputs(**inputs))
    (finding,) = check_manager(decision)
    assert finding.message == f"v2 has no buffer for {missing}, which the model stores"


def test_fewer_index_rows_than_seats() -> None:
    decision = sound(attention_dp=True)
    assert (decision.seats, decision.index_rows) == (16, 16)
    (finding,) = check_manager(replace(decision, index_rows=15))
    assert finding.message.startswith("16 seats have 15 index rows")
    assert aspects(replace(decision, seats=8)) == []


def test_a_refusal_holds_no_manager() -> None:
    decision = sound(sparse="qsa", v2="false")
    assert decision.manager is None
    assert aspects(replace(decision, predicted="v2")) == []
