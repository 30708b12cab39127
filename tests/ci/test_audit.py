"""The audit: what the public thread describes, what follows from it, and causes that are truly minimal."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from kvsan.ci.audit import Audit, audit, causes_of, ordinary
from kvsan.ci.faults import ALL_FAULTS, FAULTS
from kvsan.ci.kv_audit import audit_kv
from kvsan.ci.selection_faults import SELECTION_FAULTS
from kvsan.ci.selection_grid import NAMES, POINTS, SHAPE, judge_grid
from kvsan.model.selection import AFTER_21553, AXES, BEFORE_21553, CONSISTENT, RULE_SETS, rule_set_named
from kvsan.model.selection.faulty import FAULTY_RULE_SETS
from kvsan.model.selection.kv_dtype import FAULTY_POLICIES, SOUND_POLICY
from kvsan.sim.rules import RULES

PREDICTOR_ONLY = [
    ("manager", {"v2": "false", "geometry": "variable"}, "v2", "v1"),
    ("manager", {"v2": "auto", "geometry": "variable"}, "v2", "v1"),
    ("manager", {"v2": "auto", "model_prefers_v2": True}, "v2", "v1"),
    ("manager", {"sparse": "deepseek_v4", "v2": "auto"}, "v2-deepseek-v4", "v1"),
    ("manager", {"sparse": "deepseek_v4", "v2": "false"}, "v2-deepseek-v4", "v1"),
    ("manager", {"sparse": "minimax_m3", "v2": "auto"}, "v2-minimax-m3", "v1"),
    ("manager", {"sparse": "minimax_m3", "v2": "false"}, "v2-minimax-m3", "v1"),
    ("manager", {"sparse": "rocket", "v2": "true"}, "v1-rocket", "v2"),
]


@pytest.fixture(scope="module")
def audits() -> dict[str, Audit]:
    return {ruleset.name: audit(ruleset) for ruleset in RULE_SETS}


def rows(result: Audit, check: str) -> list[tuple[str, dict, str, str]]:
    found = [(row.check, row.inputs, row.selected, row.predicted) for row in result.disagreements]
    return [row for row in found if row[0] == check]


def ordered(entries: list[tuple]) -> list[str]:
    return sorted(str((check, sorted(inputs.items()), *rest)) for check, inputs, *rest in entries)


def test_before_and_after_21553_disagree_on_the_manager_exactly_so(audits) -> None:
    assert ordered(rows(audits["after-21553"], "manager")) == ordered(PREDICTOR_ONLY)
    skip = ("manager", {"sparse": "skip_softmax", "v2": "true"}, "v1", "v2")
    assert ordered(rows(audits["before-21553"], "manager")) == ordered([skip, *PREDICTOR_ONLY])


def test_what_the_thread_describes_is_there_and_all_else_is_marked_derived(audits) -> None:
    published = {
        "before-21553": [
            ("follows-dense-rule", {"sparse": "skip_softmax", "v2": "true"}),
            ("follows-dense-rule", {"sparse": "skip_softmax", "v2": "false", "geometry": "variable"}),
            ("manager", {"sparse": "skip_softmax", "v2": "true"}),
            ("manager", {"v2": "false", "geometry": "variable"}),
        ],
        "after-21553": [
            ("follows-dense-rule", {"sparse": "skip_softmax", "v2": "false", "geometry": "variable"}),
            ("manager", {"v2": "false", "geometry": "variable"}),
        ],
        "consistent": [],
    }
    for name, expected in published.items():
        found = [(row.check, row.inputs) for row in audits[name].disagreements if not row.derived]
        assert ordered(found) == ordered(expected)
        assert all((row.source == "derived") == row.derived for row in audits[name].disagreements)


def test_a_kernel_only_algorithm_and_variable_geometry(audits) -> None:
    """After the change skip_softmax differs from dense only beside variable geometry without V2 being asked for."""
    for row in audits["after-21553"].disagreements:
        if row.check == "follows-dense-rule":
            assert row.inputs["sparse"] == "skip_softmax"
            assert row.inputs["geometry"] == "variable"
            assert row.inputs["v2"] in ("false", "auto")
            assert row.selected == "v1"


def test_consistent_has_none(audits) -> None:
    assert audits["consistent"] == Audit("consistent", POINTS, [])


def test_the_documents_count_them(audits, root) -> None:
    text = (root / "docs" / "selection.md").read_text(encoding="utf-8")
    counted = re.findall(r"^\| `([\w-]+)` \| .* \| (\d+) \|$", text, re.MULTILINE)
    assert counted == [(name, str(len(result.disagreements))) for name, result in audits.items()]
    assert f"{POINTS:,} points" in text
    findings = (root / "docs" / "findings.md").read_text(encoding="utf-8").partition("## Selection of")[2]
    for result in audits.values():
        for row in result.disagreements:
            assert all(str(value) in findings for value in row.inputs.values() if isinstance(value, str))


def test_rows_tell_the_path(audits) -> None:
    (row,) = [
        row for row in audits["after-21553"].disagreements if row.inputs == {"v2": "false", "geometry": "variable"}
    ]
    assert row.path == [
        "selector: dense-variable-geometry -> v2",
        "validator: v2-has-all-features -> keep",
        "predictor: otherwise-v1 -> v1",
    ]
    (row,) = [
        row
        for row in audits["after-21553"].disagreements
        if row.inputs == {"sparse": "skip_softmax", "v2": "false", "geometry": "variable"}
    ]
    assert row.path[-2:] == [
        "without skip_softmax: selector: dense-variable-geometry -> v2",
        "without skip_softmax: validator: v2-has-all-features -> keep",
    ]


@pytest.mark.parametrize("ruleset", [BEFORE_21553, AFTER_21553], ids=lambda ruleset: ruleset.name)
def test_causes_are_minimal_and_explain_every_point(ruleset) -> None:
    """Any part of a cause, with the flag, does not disagree that way; every disagreeing point contains a cause."""
    usual = ordinary(ruleset)
    for where in judge_grid(ruleset).where.values():
        explained = np.zeros(SHAPE, dtype=bool)
        for inputs, points in causes_of(ruleset, where):
            for count in range(len(inputs)):
                for kept in itertools.combinations([name for name in inputs if name != "v2"], count):
                    part = {name: inputs[name] for name in (*kept, "v2")}
                    if part == inputs:
                        continue
                    values = usual | part
                    assert not where[tuple(AXES[name].index(values[name]) for name in NAMES)], (inputs, part)
            inside = tuple(AXES[name].index(inputs[name]) if name in inputs else slice(None) for name in NAMES)
            assert points == np.count_nonzero(where[inside]) > 0
            explained[inside] = True
        assert not (where & ~explained).any()


# The faults.

by_fault = pytest.mark.parametrize("fault", SELECTION_FAULTS, ids=lambda fault: fault.name)


def test_the_table_holds_every_faulty_rule_set_and_policy_once() -> None:
    names = [fault.name for fault in SELECTION_FAULTS]
    assert names == [entry.name for entry in (*FAULTY_RULE_SETS, *FAULTY_POLICIES)]
    assert ALL_FAULTS[: len(FAULTS) + len(SELECTION_FAULTS)] == (*FAULTS, *SELECTION_FAULTS)
    assert len({fault.name for fault in ALL_FAULTS}) == len(ALL_FAULTS)
    assert {fault.kind for fault in ALL_FAULTS} == {"layout", "trace", "selection", "transfer"}


def audited(name: str) -> Audit:
    policy = next((entry for entry in FAULTY_POLICIES if entry.name == name), None)
    return audit(rule_set_named(name)) if policy is None else audit_kv(policy)


@by_fault
def test_a_fault_is_caught_by_its_rules_and_shrinks_to_its_known_minima(fault) -> None:
    found = audited(fault.name).disagreements
    checks = {row.check for row in found}
    assert set(fault.rules) <= checks <= {*fault.rules, *fault.follow}
    causes = [row.inputs for row in found if row.check == fault.rules[0]]
    assert all(minimum in causes for minimum in fault.minima)
    assert min(map(len, causes)) == fault.size
    assert fault.minima[0] in [cause for cause in causes if len(cause) == fault.size]


@by_fault
def test_the_table_says_all_that_there_is_to_say(fault) -> None:
    assert {*fault.rules, *fault.follow} <= {rule.name for rule in RULES}
    assert fault.cause
    assert fault.base == CONSISTENT.name
    planted = fault.source.startswith("planted: ")
    assert planted or fault.source.startswith("https://github.com/NVIDIA/TensorRT-LLM/pull/")
    assert not (fault.code and planted)


def test_the_published_minima_of_d2() -> None:
    """V2 asked for; and layers that differ in head dim with V2 switched off."""
    fault = next(fault for fault in SELECTION_FAULTS if fault.name == "fault:skip-softmax-pinned-to-v1")
    assert (fault.code, fault.rules) == ("D2", ("manager",))
    assert fault.minima == (
        {"sparse": "skip_softmax", "v2": "true"},
        {"sparse": "skip_softmax", "v2": "false", "geometry": "variable"},
    )


def test_the_sound_policy_breaks_nothing() -> None:
    result = audit_kv(SOUND_POLICY)
    assert (result.points, result.disagreements) == (8768, [])
