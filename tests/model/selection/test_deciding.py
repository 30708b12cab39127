"""The decision: known cases of every rule set, the paths of rules, and the tables against nested branches."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings

from kvsan.model.errors import SpecError
from kvsan.model.selection import (
    AFTER_21553,
    AXES,
    BEFORE_21553,
    CONSISTENT,
    MANAGERS,
    RULE_SETS,
    SelectionInputs,
    rule_set_named,
    select,
)
from kvsan.model.selection.faulty import FAULTY_RULE_SETS
from kvsan.model.selection.inputs import FACTS
from kvsan.model.selection.rules import CANDIDATE_KIND, TABLES
from kvsan.strategies import selection_inputs

EVERY = (*RULE_SETS, *FAULTY_RULE_SETS)
by_rule_set = pytest.mark.parametrize("ruleset", RULE_SETS, ids=lambda ruleset: ruleset.name)

KNOWN = [
    # inputs, before, after, consistent: the manager held (or refused), and the kind predicted
    ({}, "v2 v2", "v2 v2", "v2 v2"),
    ({"v2": "false"}, "v1 v1", "v1 v1", "v1 v1"),
    ({"v2": "auto"}, "v1 v1", "v1 v1", "v1 v1"),
    ({"v2": "auto", "model_prefers_v2": True}, "v2 v1", "v2 v1", "v2 v2"),
    ({"sleep": True}, "v1 v1", "v1 v1", "v1 v1"),
    ({"sparse": "skip_softmax"}, "v1 v2", "v2 v2", "v2 v2"),
    ({"sparse": "skip_softmax", "v2": "false"}, "v1 v1", "v1 v1", "v1 v1"),
    ({"sparse": "skip_softmax", "sleep": True}, "v1 v1", "v1 v1", "v1 v1"),
    ({"sparse": "skip_softmax", "geometry": "variable", "v2": "false"}, "v1 v1", "v1 v1", "v2 v2"),
    ({"sparse": "skip_softmax", "hybrid": "some"}, "v2-hybrid v2", "v2-hybrid v2", "v2-hybrid v2"),
    ({"sparse": "skip_softmax", "hybrid": "zero"}, "v1 v2", "v2 v2", "v2 v2"),
    ({"geometry": "variable", "v2": "false"}, "v2 v1", "v2 v1", "v2 v2"),
    ({"geometry": "variable", "sleep": True}, "refused v1", "refused v1", "refused v2"),
    ({"fp4_mla": True, "sleep": True}, "refused v1", "refused v1", "refused v1"),
    ({"hybrid": "some", "sleep": True}, "refused v1", "refused v1", "refused v1"),
    ({"sparse": "dsa"}, "v2-dsa v2", "v2-dsa v2", "v2-dsa v2"),
    ({"sparse": "dsa", "v2": "false"}, "v1-dsa v1", "v1-dsa v1", "v1-dsa v1"),
    ({"sparse": "dsa", "sleep": True}, "refused v1", "refused v1", "refused v1"),
    ({"sparse": "dsa", "beam_width": 4, "v2_beams": False}, "refused v1", "refused v1", "refused v1"),
    ({"sparse": "rocket"}, "v1-rocket v2", "v1-rocket v2", "v1-rocket v1"),
    ({"sparse": "rocket", "block_reuse": True}, "refused v2", "refused v2", "refused v1"),
    ({"sparse": "deepseek_v4", "v2": "false"}, "v2-deepseek-v4 v1", "v2-deepseek-v4 v1", "v2-deepseek-v4 v2"),
    ({"sparse": "minimax_m3", "v2": "false"}, "v2-minimax-m3 v1", "v2-minimax-m3 v1", "v2-minimax-m3 v2"),
    ({"sparse": "qsa", "hybrid": "some"}, "v2-hybrid-qsa v2", "v2-hybrid-qsa v2", "v2-hybrid-qsa v2"),
    ({"sparse": "qsa", "v2": "false"}, "refused v1", "refused v1", "refused v1"),
    ({"sparse": "glm_kpool", "v2": "false"}, "refused v1", "refused v1", "refused v1"),
    ({"sparse": "rocket", "hybrid": "some", "v2": "false"}, "refused v1", "refused v1", "refused v1"),
    ({"hybrid": "some", "v2": "false"}, "v1-hybrid-cpp v1", "v1-hybrid-cpp v1", "v1-hybrid-cpp v1"),
    ({"hybrid": "some", "v2": "false", "py_mamba": True}, *("v1-hybrid-python v1",) * 3),
    ({"hybrid": "some", "v2": "false", "mamba_preference": "mixed"}, *("v1-hybrid-python v1",) * 3),
    ({"hybrid": "some", "v2": "false", "mamba_preference": "mixed", "block_reuse": True}, *("refused v1",) * 3),
    ({"hybrid": "zero", "v2": "false", "py_mamba": True}, "v1 v1", "v1 v1", "v1 v1"),
    ({"hybrid": "some", "mamba_preference": "cpp"}, "refused v2", "refused v2", "refused v2"),
    ({"hybrid": "some", "disaggregated": True}, "refused v2", "refused v2", "refused v2"),
    ({"hybrid": "some", "disaggregated": True, "transceiver_runtime": "python"}, *("v2-hybrid v2",) * 3),
    (
        {
            "hybrid": "some",
            "disaggregated": True,
            "transceiver_runtime": "python",
            "transceiver_backend": "ucx",
        },
        *("refused v2",) * 3,
    ),
    ({"hybrid": "some", "block_reuse": True, "rebalance": True}, "refused v2", "refused v2", "refused v2"),
    ({"block_reuse": True, "rebalance": True}, "v2 v2", "v2 v2", "v2 v2"),
]


@pytest.mark.parametrize(("inputs", "before", "after", "consistent"), KNOWN, ids=lambda value: str(value)[:60])
def test_known_cases(inputs, before, after, consistent) -> None:
    for ruleset, expected in zip(RULE_SETS, (before, after, consistent), strict=True):
        decision = select(SelectionInputs(**inputs), ruleset)
        assert f"{decision.manager or 'refused'} {decision.predicted}" == expected, ruleset.name


@pytest.mark.parametrize(
    ("attention_dp", "pp", "overlap", "v2", "hybrid", "mrope", "seats"),
    [
        (True, 1, True, "true", "no", False, 16),
        (False, 1, True, "true", "no", False, 8),
        (True, 1, False, "true", "no", False, 8),
        (True, 2, True, "true", "no", False, 16),
        (True, 4, True, "true", "no", False, 32),
        (True, 1, True, "false", "no", False, 8),
        (True, 1, True, "true", "some", False, 8),
        (True, 1, True, "true", "zero", False, 16),
        (True, 1, True, "true", "no", True, 8),
        (False, 4, False, "true", "no", False, 32),
    ],
)
def test_seats_follow_the_manager_and_the_scheduler(attention_dp, pp, overlap, v2, hybrid, mrope, seats) -> None:
    inputs = SelectionInputs(
        attention_dp=attention_dp, pp=pp, overlap=overlap, v2=v2, hybrid=hybrid, mrope_delta_cache=mrope, max_batch=8
    )
    decision = select(inputs)
    assert decision.seats == seats
    assert decision.index_rows is not None
    assert decision.index_rows >= seats


@pytest.mark.parametrize(
    ("disaggregated", "pp", "overlap", "rows"),
    [
        (False, 1, True, 16),
        (False, 1, False, 8),
        (True, 1, False, 16),
        (True, 1, True, 16),
        (False, 2, True, 16),
        (True, 2, False, 32),
    ],
)
def test_index_rows(disaggregated, pp, overlap, rows) -> None:
    assert select(SelectionInputs(disaggregated=disaggregated, pp=pp, overlap=overlap)).index_rows == rows


def test_skip_softmax_had_the_seats_of_v2_on_v1() -> None:
    inputs = SelectionInputs(sparse="skip_softmax", attention_dp=True)
    before, after = select(inputs, BEFORE_21553), select(inputs, AFTER_21553)
    assert (before.manager, before.seats) == ("v1", 16)
    assert (after.manager, after.seats) == ("v2", 16)
    assert select(msgspec.structs.replace(inputs, v2="false"), AFTER_21553).seats == 8


def test_a_fall_back_warns_and_a_refusal_says_why_and_what_to_do() -> None:
    fallen = select(SelectionInputs(sleep=True, beam_width=4, v2_beams=False))
    assert fallen.fell_back
    assert (fallen.asked, fallen.manager) == ("v2", "v1")
    assert fallen.warning == "V2 of this build does not have several beams and sleep: the model runs on V1"
    refused = select(SelectionInputs(sparse="dsa", sleep=True))
    assert refused.refusal is not None
    assert (refused.manager, refused.seats, refused.index_rows, refused.numbers) == (None, None, None, ())
    assert refused.refusal.message == "V2 lacks sleep, and the sparse algorithm keeps its V2 manager"
    assert refused.refusal.remedy


def test_the_path_holds_the_rules_that_decided() -> None:
    decision = select(SelectionInputs(sparse="dsa", sleep=True))
    assert [step.words for step in decision.path] == [
        "selector: dsa-v2 -> v2-dsa",
        "validator: sparse-cannot-fall-back -> refuse",
        "predictor: otherwise-v1 -> v1",
    ]
    consulted = [step.rule for step in decision.consulted if step.table == "validator"]
    assert consulted == ["v1-needs-no-check", "v2-has-all-features", "sparse-cannot-fall-back"]
    refused = select(SelectionInputs(sparse="qsa", v2="false"))
    assert [step.table for step in refused.path] == ["selector", "predictor"]


def test_several_beams_are_a_matter_of_the_build() -> None:
    assert [ruleset.v2_beams for ruleset in RULE_SETS] == [False, True, True]
    skip = SelectionInputs(sparse="skip_softmax", beam_width=4)
    assert select(skip).manager == "v2"
    assert select(msgspec.structs.replace(skip, v2_beams=False)).manager == "v1"


@pytest.mark.parametrize("ruleset", EVERY, ids=lambda ruleset: ruleset.name)
def test_tables_are_well_formed(ruleset) -> None:
    for name in TABLES:
        table = ruleset.table(name)
        names = [rule.name for rule in table]
        assert len(set(names)) == len(names)
        assert not table[-1].when, "the last rule of a table applies always"
        assert all(rule.when for rule in table[:-1]), "a rule behind one that always applies is never asked"
        for rule in table:
            assert rule.source.startswith(("https://github.com/NVIDIA/TensorRT-LLM", "docs/selection.md"))
            for fact, wanted in rule.when.items():
                if fact == CANDIDATE_KIND:
                    assert name == "validator"
                    continue
                values = set(
                    itertools.starmap(FACTS[fact].ask, itertools.product(*(AXES[of] for of in FACTS[fact].of)))
                )
                assert set(wanted) <= values, f"{rule.name} wants a value that {fact} never has"
                assert set(wanted) != values, f"{rule.name} wants any value of {fact}"
            if rule.then.does in ("hold", "fall back") and name != "predictor":
                assert rule.then.manager in MANAGERS
            if rule.then.does == "refuse":
                assert rule.then.message
                assert rule.then.remedy


@by_rule_set
def test_the_tables_agree_with_nested_branches(ruleset, oracle) -> None:
    @settings(max_examples=400, deadline=None)
    @given(selection_inputs())
    def agree(inputs: SelectionInputs) -> None:
        decision = select(inputs, ruleset)
        assert decision.asked == oracle.selector(inputs, ruleset.name)
        assert decision.manager == oracle.held(inputs, ruleset.name)
        expected = oracle.predicted(inputs, ruleset.name)
        if expected == "refused":
            return
        assert decision.predicted == expected
        if decision.manager is not None:
            assert decision.seats == oracle.seats(inputs, expected)
            assert decision.index_rows == oracle.index_rows(inputs)

    agree()


def test_rule_sets_go_by_name() -> None:
    assert [ruleset.name for ruleset in RULE_SETS] == ["before-21553", "after-21553", "consistent"]
    assert all(rule_set_named(ruleset.name) is ruleset for ruleset in EVERY)
    with pytest.raises(SpecError, match=r"ruleset: unknown rule set 'x', needs one of before-21553, .*fault:NAME"):
        rule_set_named("x")
    with pytest.raises(SpecError, match="needs one of fault:skip-softmax-pinned-to-v1, "):
        rule_set_named("fault:x")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sparse": "dense"}, "sparse: found 'dense', needs one of none, skip_softmax"),
        ({"v2": True}, "v2: found True, needs one of true, false, auto"),
        ({"sleep": 1}, "sleep: found 1, needs true or false"),
        ({"beam_width": 0}, "beam_width: found 0, needs a whole number from 1 to"),
        ({"max_batch": 2.0}, "max_batch: found 2.0"),
        ({"pp": True}, "pp: found True"),
        ({"hybrid": "two"}, "hybrid: found 'two'"),
    ],
)
def test_wrong_inputs_are_named(wrong, message) -> None:
    with pytest.raises(SpecError) as caught:
        SelectionInputs(**wrong)
    assert str(caught.value).startswith(message)


def test_decisions_are_plain_data() -> None:
    decision = select(SelectionInputs(sparse="skip_softmax"), CONSISTENT)
    assert msgspec.json.decode(msgspec.json.encode(decision), type=type(decision)) == decision
    assert hash(decision.inputs) == hash(SelectionInputs(sparse="skip_softmax"))
