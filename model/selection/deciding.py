"""``select``: one configuration under one rule set, with the manager, the prediction, the seats and the path of rules.

Seats and index rows, with B requests of a batch and P pipeline stages:

    headroom    attention-DP, one stage, the overlap scheduler, a V2 manager that holds no recurrent states, and no
                position-delta cache
    seats       B * P with several stages, else 2 * B with headroom, else B
    index rows  B * P, doubled for disaggregation, and for the overlap scheduler with one stage
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from .inputs import SelectionInputs, fact_of
from .managers import MANAGERS, Manager
from .rules import CANDIDATE_KIND, Outcome, RuleSet, SelectionRule, TableName, first_that_applies
from .rulesets import DEFAULT_RULE_SET

ESTIMATES: Final = ("bytes per token", "warm-up", "budget")
"""What is computed by the manager's class before the manager itself exists."""


class Step(msgspec.Struct, frozen=True):
    """A rule that was consulted: whether it applied, and if so what it decided."""

    table: TableName
    rule: str
    applied: bool
    outcome: str
    source: str

    @property
    def words(self) -> str:
        """The step in a line, such as ``selector: dsa-v2 -> v2-dsa``."""
        return f"{self.table}: {self.rule}" + (f" -> {self.outcome}" if self.applied else " does not apply")


class Refusal(msgspec.Struct, frozen=True):
    """The engine does not start: the rule that says so, the cause and the way out."""

    rule: str
    message: str
    remedy: str


class Number(msgspec.Struct, frozen=True):
    """A number derived from a manager: ``manager`` is the one that it was derived from (``v1`` or ``v2`` for the seats,
    which are sized before anybody knows more). ``value`` is None where no model was given."""

    name: str
    manager: str
    value: int | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What comes of one configuration.

    ``asked`` is the manager that the selector named, ``manager`` the one held in the end: None where the engine
    refuses, and then there are no seats either. ``predicted`` is what the seats were sized for.
    """

    ruleset: str
    inputs: SelectionInputs
    asked: str | None
    manager: str | None
    predicted: Literal["v1", "v2"]
    fell_back: bool = False
    warning: str | None = None
    refusal: Refusal | None = None
    seats: int | None = None
    index_rows: int | None = None
    numbers: tuple[Number, ...] = ()
    consulted: tuple[Step, ...] = ()

    @property
    def path(self) -> tuple[Step, ...]:
        """The rules that decided, one of each table that was asked."""
        return tuple([step for step in self.consulted if step.applied])

    @property
    def held(self) -> Manager | None:
        """The manager held, with what it stores."""
        return None if self.manager is None else MANAGERS[self.manager]


def select(inputs: SelectionInputs, ruleset: RuleSet = DEFAULT_RULE_SET) -> Decision:
    """Return what ``ruleset`` makes of ``inputs``."""
    consulted: list[Step] = []
    state: dict[str, Any] = {}

    def fact(name: str) -> Any:
        return state[name] if name in state else fact_of(inputs, name)

    def decide(name: TableName) -> SelectionRule:
        table = ruleset.table(name)
        place = first_that_applies(table, fact)
        for rule in table[: place + 1]:
            applied = rule is table[place]
            consulted.append(Step(name, rule.name, applied, rule.then.words if applied else "", rule.source))
        return table[place]

    chosen = decide("selector")
    asked: str | None = None
    if chosen.then.does != "refuse":
        asked = chosen.then.manager
        state[CANDIDATE_KIND] = MANAGERS[asked].kind
        validated = decide("validator")
        chosen = chosen if validated.then.does == "keep" else validated
    predicted: Literal["v1", "v2"] = "v2" if decide("predictor").then.manager == "v2" else "v1"
    decision = Decision(
        ruleset=ruleset.name,
        inputs=inputs,
        asked=asked,
        manager=None,
        predicted=predicted,
        consulted=tuple(consulted),
    )
    if chosen.then.does == "refuse" or asked is None:
        return msgspec.structs.replace(decision, refusal=_refusal(inputs, chosen))
    return _held(decision, ruleset, asked, chosen.then)


def _refusal(inputs: SelectionInputs, rule: SelectionRule) -> Refusal:
    return Refusal(rule.name, _with_features(inputs, rule.then.message), rule.then.remedy)


def _with_features(inputs: SelectionInputs, message: str) -> str:
    """Return ``message`` with the features named, where it speaks of one that V2 lacks."""
    features = " and ".join(fact_of(inputs, "lacking"))
    return message.replace("a feature that is asked for", features)


def _held(decision: Decision, ruleset: RuleSet, asked: str, outcome: Outcome) -> Decision:
    """Return ``decision`` with the manager held and the numbers that follow."""
    inputs = decision.inputs
    manager = outcome.manager
    estimated = manager if ruleset.estimates_of == "held" else asked
    seats = seats_of(inputs, decision.predicted)
    rows = index_rows_of(inputs, for_overlap=ruleset.rows_for_overlap)
    numbers = (
        Number("seats", decision.predicted, seats),
        Number("index rows", manager, rows),
        *[Number(name, estimated) for name in ESTIMATES],
    )
    fell_back = outcome.does == "fall back"
    warning = _with_features(inputs, outcome.message) if fell_back and outcome.message else None
    return msgspec.structs.replace(
        decision,
        manager=manager,
        fell_back=fell_back,
        warning=warning,
        seats=seats,
        index_rows=rows,
        numbers=numbers,
    )


def has_headroom(inputs: SelectionInputs, kind: str) -> bool:
    """Say whether a request may hold its seat while its successor is seated, under a manager of ``kind``."""
    return (
        inputs.attention_dp
        and inputs.pp == 1
        and inputs.overlap
        and kind == "v2"
        and inputs.hybrid != "some"
        and not inputs.mrope_delta_cache
    )


def seats_of(inputs: SelectionInputs, kind: str) -> int:
    """Return the sequence slots of an executor whose manager is of ``kind`` (``v1`` or ``v2``)."""
    if inputs.pp > 1:
        return inputs.max_batch * inputs.pp
    return inputs.max_batch * (2 if has_headroom(inputs, kind) else 1)


def index_rows_of(inputs: SelectionInputs, *, for_overlap: bool = True) -> int:
    """Return the sequences that the block table has rows for, dummy rows left out."""
    overlapped = for_overlap and inputs.overlap and inputs.pp == 1
    return inputs.max_batch * inputs.pp * (2 if inputs.disaggregated or overlapped else 1)
