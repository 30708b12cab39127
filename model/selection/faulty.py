"""Rule sets that are wrong on purpose, each a small variation of ``consistent``; ``docs/faults.md`` tells them."""

from __future__ import annotations

from typing import Final

import msgspec

from .rules import Outcome, RuleSet, SelectionRule
from .rulesets import (
    CONSISTENT,
    PREDICTS_ASKED,
    PREDICTS_GEOMETRY,
    SKIP_SOFTMAX_BY_FLAG,
    SKIP_SOFTMAX_ON_V1,
    before,
    edited,
    without,
)

_FIRST_DENSE: Final = "dense-asks-for-v2"


def _warnings_dropped(table: tuple[SelectionRule, ...]) -> tuple[SelectionRule, ...]:
    return tuple(
        msgspec.structs.replace(rule, then=Outcome("fall back", rule.then.manager))
        if rule.then.does == "fall back"
        else rule
        for rule in table
    )


def _flag_read_as_it_stands(table: tuple[SelectionRule, ...]) -> tuple[SelectionRule, ...]:
    """Return the predictor with the flag compared to true, so that ``auto`` counts as V1 whatever the model prefers."""
    unresolved = SelectionRule(
        PREDICTS_ASKED.name, {"flag_is_true": (True,)}, PREDICTS_ASKED.then, PREDICTS_ASKED.source
    )
    return tuple(unresolved if rule.name == PREDICTS_ASKED.name else rule for rule in table)


FAULTY_RULE_SETS: Final[tuple[RuleSet, ...]] = (
    edited(
        CONSISTENT,
        "fault:skip-softmax-pinned-to-v1",
        "the selector gives skip_softmax V1 by its name, and the predictor treats it as dense",
        selector=before(CONSISTENT.selector, _FIRST_DENSE, SKIP_SOFTMAX_ON_V1),
    ),
    edited(
        CONSISTENT,
        "fault:predictor-ignores-geometry",
        "variable geometry gives V2 whatever the flag says, and the predictor looks at the flag",
        predictor=without(CONSISTENT.predictor, PREDICTS_GEOMETRY.name),
    ),
    edited(
        CONSISTENT,
        "fault:registry-ignores-geometry",
        "skip_softmax gets its manager by the flag alone, before anybody asks for the geometry",
        selector=before(CONSISTENT.selector, _FIRST_DENSE, *SKIP_SOFTMAX_BY_FLAG),
    ),
    edited(
        CONSISTENT,
        "fault:predictor-reads-auto-as-v1",
        "the predictor compares the flag with true before auto is resolved to what the model prefers",
        predictor=_flag_read_as_it_stands(CONSISTENT.predictor),
    ),
    edited(
        CONSISTENT,
        "fault:silent-fall-back",
        "the fall-back from V2 to V1 warns nobody",
        validator=_warnings_dropped(CONSISTENT.validator),
    ),
    edited(
        CONSISTENT,
        "fault:owner-falls-back",
        "a sparse algorithm that owns its manager falls back to V1 as a dense model does",
        validator=without(CONSISTENT.validator, "sparse-cannot-fall-back"),
    ),
    edited(
        CONSISTENT,
        "fault:rows-for-disaggregation-alone",
        "index rows are doubled for disaggregation, and seats for the overlap scheduler too",
        rows_for_overlap=False,
    ),
    edited(
        CONSISTENT,
        "fault:estimates-of-asked-manager",
        "bytes per token, warm-up and budget are computed before the fall-back and kept after it",
        estimates_of="asked",
    ),
)
"""All faulty rule sets."""
