"""The whole grid: the same as one decision at a time, and ``consistent`` beside the others, exhaustively."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvsan.ci.selection_grid import (
    NAMES,
    POINTS,
    SHAPE,
    JudgedGrid,
    disagreements_of,
    judge_grid,
    outcome_of,
    rule_places,
    values_at,
)
from kvsan.model.selection import (
    AFTER_21553,
    AXES,
    BEFORE_21553,
    CONSISTENT,
    MANAGERS,
    RULE_SETS,
    RuleSet,
    SelectionInputs,
    rule_set_named,
    select,
)
from kvsan.model.selection.faulty import FAULTY_RULE_SETS
from kvsan.model.selection.rules import TABLES


@pytest.fixture(scope="module")
def grids() -> dict[str, JudgedGrid]:
    return {ruleset.name: judge_grid(ruleset) for ruleset in RULE_SETS}


def random_places(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    numbers = random.Random(seed)
    return [tuple(numbers.randrange(size) for size in SHAPE) for _ in range(count)]


def agree_on(places: list[tuple[int, ...]], ruleset: RuleSet, grid: JudgedGrid) -> None:
    for place in places:
        decision = select(SelectionInputs(**values_at(place)), ruleset)
        assert grid.meaning[grid.outcomes[place]] == outcome_of(decision)
        assert {signature for signature, where in grid.where.items() if where[place]} == set(
            disagreements_of(decision, ruleset)
        )


def test_the_grid_holds_every_input() -> None:
    assert POINTS == 14_155_776
    fields = set(SelectionInputs.__struct_fields__)
    assert set(NAMES) == fields - {"max_batch"}, "the batch is a factor of all counts"
    for name, values in AXES.items():
        assert values[0] == getattr(SelectionInputs(), name) or name == "sparse"


@pytest.mark.parametrize("ruleset", RULE_SETS, ids=lambda ruleset: ruleset.name)
def test_random_points_are_decided_as_one_by_one(ruleset, grids) -> None:
    agree_on(random_places(1500), ruleset, grids[ruleset.name])


@pytest.mark.parametrize("name", ["fault:owner-falls-back", "fault:rows-for-disaggregation-alone"])
def test_random_points_of_faulty_rule_sets_too(name) -> None:
    ruleset = rule_set_named(name)
    agree_on(random_places(600, 1), ruleset, judge_grid(ruleset))


def test_disagreeing_points_are_decided_as_one_by_one(grids) -> None:
    """Random points seldom disagree, so some of those that do are looked at as well."""
    for ruleset in (BEFORE_21553, AFTER_21553):
        places = np.argwhere(grids[ruleset.name].disagreeing)
        chosen = random.Random(2).sample(range(len(places)), 500)
        agree_on([tuple(places[index]) for index in chosen], ruleset, grids[ruleset.name])


def test_consistent_has_no_disagreement_on_the_whole_grid(grids) -> None:
    assert grids["consistent"].where == {}
    assert not grids["consistent"].disagreeing.any()
    assert grids["after-21553"].disagreeing.any()


def meanings(grid: JudgedGrid, where: np.ndarray, other: JudgedGrid) -> set[tuple[object, object]]:
    """Return the pairs of outcomes that two rule sets have at the points ``where``."""
    size = len(other.meaning)
    pairs = np.flatnonzero(np.bincount(grid.outcomes[where] * size + other.outcomes[where]))
    return {(grid.meaning[pair // size], other.meaning[pair % size]) for pair in pairs}


def test_consistent_changes_no_decision_that_was_no_disagreement(grids) -> None:
    """Manager, refusal, warning, seats and index rows at every point where after-21553 agrees with itself."""
    after, consistent = grids["after-21553"], grids["consistent"]
    changed = {pair for pair in meanings(after, ~after.disagreeing, consistent) if pair[0] != pair[1]}
    assert changed == set()
    assert any(one != two for one, two in meanings(after, after.disagreeing, consistent)), "it changes the others"


def test_consistent_keeps_the_managers_of_before_too(grids) -> None:
    """Beside before-21553 the wording may be new: skip_softmax gives V1 there unasked, or refuses by its name."""
    before, consistent = grids["before-21553"], grids["consistent"]
    for one, two in meanings(before, ~before.disagreeing, consistent):
        assert (one[0], one[3], one[4]) == (two[0], two[3], two[4])
        assert (one[1] is None) == (two[1] is None)
        assert one[2] in (None, two[2])


def test_only_seats_move_where_only_the_predictor_was_wrong(grids) -> None:
    """Dense models with variable geometry keep V2, and get the seats of V2."""
    after, consistent = grids["after-21553"], grids["consistent"]
    place = tuple(
        AXES[name].index(value)
        for name, value in (
            {name: values[0] for name, values in AXES.items()}
            | {"geometry": "variable", "v2": "false", "attention_dp": True}
        ).items()
    )
    assert after.meaning[after.outcomes[place]] == ("v2", None, None, 8, 16)
    assert consistent.meaning[consistent.outcomes[place]] == ("v2", None, None, 16, 16)


@pytest.mark.parametrize("ruleset", RULE_SETS, ids=lambda ruleset: ruleset.name)
def test_every_rule_decides_somewhere(ruleset) -> None:
    row_kinds = np.array(
        ["" if rule.then.does == "refuse" else MANAGERS[rule.then.manager].kind for rule in ruleset.selector]
    )
    kinds = row_kinds[rule_places(ruleset.selector)]
    for name in TABLES:
        places = rule_places(ruleset.table(name), lambda wanted: np.isin(kinds, wanted))
        if name == "validator":
            places = np.where(kinds == "", -1, places)
        reached = set(np.unique(places)) - {-1}
        assert reached == set(range(len(ruleset.table(name))))


def test_a_table_that_asks_for_the_seats_inputs_is_refused() -> None:
    import msgspec

    rule = msgspec.structs.replace(CONSISTENT.selector[0], name="by-overlap", when={"overlap": (True,)})
    ruleset = msgspec.structs.replace(CONSISTENT, selector=(rule, *CONSISTENT.selector))
    with pytest.raises(ValueError, match="asks for one of attention_dp, pp, overlap"):
        judge_grid(ruleset)
    selector = (msgspec.structs.replace(rule, when={"candidate_kind": ("v1",)}), *CONSISTENT.selector)
    with pytest.raises(ValueError, match="which only the validator knows"):
        judge_grid(msgspec.structs.replace(CONSISTENT, selector=selector))


def test_faulty_rule_sets_differ_from_their_base_in_what_they_say() -> None:
    for ruleset in FAULTY_RULE_SETS:
        changed = [
            field for field in RuleSet.__struct_fields__ if getattr(ruleset, field) != getattr(CONSISTENT, field)
        ]
        assert sorted(changed)[:1] != []
        assert {"name", "summary"} < set(changed)
        assert len(changed) == 3
