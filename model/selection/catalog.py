"""Rule sets and KV policies by name, the faulty ones too."""

from __future__ import annotations

from typing import Final

from ..errors import SpecError, shown
from .faulty import FAULTY_RULE_SETS
from .rules import RuleSet
from .rulesets import AFTER_21553, BEFORE_21553, CONSISTENT

RULE_SETS: Final = (BEFORE_21553, AFTER_21553, CONSISTENT)
"""The shipped rule sets, the oldest first."""


def rule_set_named(name: str, field: str = "ruleset") -> RuleSet:
    """Return the rule set called ``name``, a faulty one (``fault:NAME``) too; raise ``SpecError`` listing them."""
    for entry in (*RULE_SETS, *FAULTY_RULE_SETS):
        if entry.name == name:
            return entry
    shipped = ", ".join(entry.name for entry in RULE_SETS)
    faults = ", ".join(entry.name for entry in FAULTY_RULE_SETS)
    needs = f"one of {faults}" if name.startswith("fault:") else f"one of {shipped}, or fault:NAME"
    raise SpecError(field, f"unknown rule set {shown(name)}, needs {needs}")
