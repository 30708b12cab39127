"""Rule ``follows-dense-rule``: kernel-only algorithms against the same model without them."""

from __future__ import annotations

import msgspec
import pytest

from kvsan.model.selection import AFTER_21553, BEFORE_21553, CONSISTENT, RuleSet, SelectionInputs, select
from kvsan.sim.finding import Finding
from kvsan.sim.rules.follows_dense import check_follows_dense


def findings(ruleset: RuleSet, **inputs: object) -> list[Finding]:
    with_it = SelectionInputs(**inputs)
    dense = msgspec.structs.replace(with_it, sparse="none")
    return list(check_follows_dense(select(with_it, ruleset), select(dense, ruleset)))


def test_skip_softmax_on_v1_whatever_is_asked_for() -> None:
    (finding,) = findings(BEFORE_21553, sparse="skip_softmax")
    assert finding.rule == "follows-dense-rule"
    assert finding.message == (
        "skip_softmax keeps the dense KV layout, and the model runs on v1 with it where it runs on v2 without it"
    )
    assert findings(AFTER_21553, sparse="skip_softmax") == []


def test_skip_softmax_beside_variable_geometry() -> None:
    assert len(findings(AFTER_21553, sparse="skip_softmax", geometry="variable", v2="false")) == 1
    assert findings(AFTER_21553, sparse="skip_softmax", geometry="variable") == []
    assert findings(CONSISTENT, sparse="skip_softmax", geometry="variable", v2="false") == []


def test_running_where_dense_is_refused_is_a_finding_too() -> None:
    (finding,) = findings(AFTER_21553, sparse="skip_softmax", geometry="variable", v2="false", sleep=True)
    assert "runs on v1 with it where it is refused without it" in finding.message


@pytest.mark.parametrize("sparse", ["none", "dsa", "rocket", "qsa", "minimax_m3", "deepseek_v4", "glm_kpool"])
def test_algorithms_that_store_something_are_no_business_of_this_rule(sparse) -> None:
    assert findings(BEFORE_21553, sparse=sparse) == []


def test_a_warning_may_differ() -> None:
    assert select(SelectionInputs(sparse="skip_softmax", sleep=True), BEFORE_21553).warning is None
    assert findings(BEFORE_21553, sparse="skip_softmax", sleep=True) == []
