"""``SelectionRule`` and ``RuleSet``: a decision as data, ordered tables of which the first rule that applies decides.

Three tables in a row. The *selector* names a manager or refuses; the *validator* looks at a V2 manager beside features
that V2 lacks, and keeps it, falls back to V1 or refuses; the *predictor* says V1 or V2 without having seen either, and
sizes the seats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

TableName: TypeAlias = Literal["selector", "validator", "predictor"]
TABLES: Final[tuple[TableName, ...]] = ("selector", "validator", "predictor")

CANDIDATE_KIND: Final = "candidate_kind"
"""What the validator may ask beside the facts of the inputs: the kind (v1, v2) of the manager that was selected."""


class Outcome(msgspec.Struct, frozen=True):
    """What a rule decides.

    ``hold``: the manager (in the predictor: the kind) of that name. ``keep``: the manager already selected. ``fall
    back``: the manager of that name in its place, with ``message`` as the warning (none where empty). ``refuse``:
    ``message`` is the reason and ``remedy`` the way out.
    """

    does: Literal["hold", "keep", "fall back", "refuse"]
    manager: str = ""
    message: str = ""
    remedy: str = ""

    @property
    def words(self) -> str:
        """The outcome in a few words: the manager's name, ``keep``, ``fall back to v1``, ``refuse``."""
        return {"hold": self.manager, "fall back": f"fall back to {self.manager}"}.get(self.does, self.does)


class SelectionRule(msgspec.Struct, frozen=True):
    """``when`` gives for some facts the values it wants; all must hold. ``source`` is where the rule is public."""

    name: str
    when: dict[str, tuple[Any, ...]]
    then: Outcome
    source: str


class RuleSet(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the decision.

    ``v2_beams`` is whether V2 of that version decodes several beams unless said otherwise. ``estimates_of``: bytes per
    token, warm-up and budget are those of the manager ``held`` or of the one ``asked`` for before any fallback.
    ``rows_for_overlap``: index rows are doubled for the overlap scheduler too, not for disaggregation alone.
    """

    name: str
    summary: str
    selector: tuple[SelectionRule, ...]
    validator: tuple[SelectionRule, ...]
    predictor: tuple[SelectionRule, ...]
    v2_beams: bool = True
    estimates_of: Literal["held", "asked"] = "held"
    rows_for_overlap: bool = True

    def table(self, name: TableName) -> tuple[SelectionRule, ...]:
        """Return one of the three tables."""
        return {"selector": self.selector, "validator": self.validator, "predictor": self.predictor}[name]


def applies(rule: SelectionRule, fact: Callable[[str], Any]) -> bool:
    """Say whether all that ``rule`` wants holds; ``fact`` gives the value of a fact by name."""
    return all(fact(name) in wanted for name, wanted in rule.when.items())


def first_that_applies(table: Sequence[SelectionRule], fact: Callable[[str], Any]) -> int:
    """Return the place of the first rule that applies; the last rule of a table wants nothing, so there is one."""
    return next(place for place, rule in enumerate(table) if applies(rule, fact))
