"""``check``: all static rules over a layout."""

from __future__ import annotations

import itertools

from ..model.errors import SpecError
from .finding import Finding
from .layout import Layout
from .overlap import Undecided
from .references import check_references
from .rules import RULES
from .rules.rule import Rule, inspect
from .values import check_values

FINDINGS_PER_RULE = 20
"""Findings that one rule reports of one layout: a fault of a layer class repeats in every layer."""


def check(
    layout: Layout, *, rules: tuple[Rule, ...] = RULES, limit: int = FINDINGS_PER_RULE, allocated: bool = False
) -> list[Finding]:
    """Return what is wrong with ``layout``: at most ``limit`` findings of each rule, in the order of ``rules``.

    ``allocated`` says that the layout comes from ``allocate``, where its values were checked if need be.

    Raises ``SpecError`` when values are of the wrong type (``values``), when the layout's references do not hold
    (``references``), and when it is beyond what can be decided whether two of its views share a byte (``overlap``).
    """
    if not allocated:
        check_values(layout)
    check_references(layout)
    inspection = inspect(layout)
    findings: list[Finding] = []
    for rule in rules:
        if rule.check is None:
            continue
        try:
            findings += itertools.islice(rule.check(inspection), limit)
        except Undecided as error:
            raise SpecError("layout", f"{rule.name} cannot be decided: {error}") from None
    return findings
