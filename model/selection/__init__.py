"""Which cache manager a model gets, who predicts it, and what follows: seats, index rows, effective KV formats.

    >>> decision = select(SelectionInputs(sparse="skip_softmax", v2="true"), BEFORE_21553)
    >>> decision.manager, decision.predicted
    ('v1', 'v2')

The decision is data: ordered tables of rules over frozen inputs (``rulesets``), applied by ``select``.
"""

from __future__ import annotations

from .catalog import RULE_SETS, rule_set_named
from .deciding import Decision, Number, Refusal, Step, select
from .inputs import AXES, KERNEL_ONLY, OWNERS, SPARSE_CHOICES, SelectionInputs
from .kv_dtype import AccuracyReference, KvDecision, KvRequest, decide_kv_format, find_reference
from .managers import MANAGERS, Manager, needed_roles
from .reading import inputs_of, priced
from .rules import Outcome, RuleSet, SelectionRule
from .rulesets import AFTER_21553, BEFORE_21553, CONSISTENT, DEFAULT_RULE_SET

__all__ = [
    "AFTER_21553",
    "AXES",
    "BEFORE_21553",
    "CONSISTENT",
    "DEFAULT_RULE_SET",
    "KERNEL_ONLY",
    "MANAGERS",
    "OWNERS",
    "RULE_SETS",
    "SPARSE_CHOICES",
    "AccuracyReference",
    "Decision",
    "KvDecision",
    "KvRequest",
    "Manager",
    "Number",
    "Outcome",
    "Refusal",
    "RuleSet",
    "SelectionInputs",
    "SelectionRule",
    "Step",
    "decide_kv_format",
    "find_reference",
    "inputs_of",
    "needed_roles",
    "priced",
    "rule_set_named",
    "select",
]
