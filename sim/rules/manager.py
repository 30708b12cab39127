"""Rule ``manager``: the manager that is held is the one that everything was sized for.

It is judged on a decision (``model.selection``), not on a layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...model.selection import OWNERS, Decision, needed_roles
from ..finding import Finding, Where
from .rule import Rule


class Problem(NamedTuple):
    """One way in which a decision is wrong; ``aspect`` is a short name for it."""

    aspect: str
    message: str
    remedy: str


def manager_problems(decision: Decision) -> Iterator[Problem]:
    """Yield what is wrong with the manager held and the numbers derived from one; a refusal holds none."""
    held = decision.held
    if held is None:
        return
    if held.kind != decision.predicted:
        yield Problem(
            "prediction",
            f"the manager held is {held.name}, and the seats were sized for a {decision.predicted.upper()} manager: "
            f"{decision.seats} seats",
            "let the predictor ask for every reason for which the selector takes V1 or V2, geometry and algorithm too",
        )
    yield from _numbers(decision)
    if decision.fell_back and decision.warning is None:
        yield Problem(
            "warning",
            f"{decision.asked} was asked for, {held.name} is held in its place, and nobody is warned",
            "warn with the feature that V2 lacks, or refuse",
        )
    if decision.fell_back and decision.inputs.sparse in OWNERS:
        yield Problem(
            "owner",
            f"{decision.inputs.sparse} brings its own manager ({decision.asked}), and the model falls back to "
            f"{held.name}",
            "refuse where an algorithm that owns its manager meets a feature that the manager lacks",
        )
    if missing := [role for role in needed_roles(decision.inputs) if role not in held.roles]:
        yield Problem(
            "roles",
            f"{held.name} has no buffer for {', '.join(missing)}, which the model stores",
            "take the manager that registers every role of every layer, or refuse",
        )
    if decision.index_rows is not None and decision.seats is not None and decision.index_rows < decision.seats:
        yield Problem(
            "rows",
            f"{decision.seats} seats have {decision.index_rows} index rows: some admitted request gets no block table",
            "widen the index rows wherever the seats are widened (overlap scheduler and disaggregation)",
        )


def _numbers(decision: Decision) -> Iterator[Problem]:
    """Yield numbers taken from another manager than the one held; the seats are the prediction's own problem."""
    for number in decision.numbers:
        if number.name != "seats" and number.manager != decision.manager:
            yield Problem(
                "numbers",
                f"{number.name} comes from {number.manager}, and {decision.manager} is held",
                "compute it again once the manager is settled, from the one held",
            )


def check_manager(decision: Decision) -> Iterator[Finding]:
    """Yield the problems of ``decision`` as findings."""
    for problem in manager_problems(decision):
        yield Finding(
            rule="manager",
            message=problem.message,
            remedy=problem.remedy,
            where=(Where(manager=decision.manager),),
        )


RULE = Rule(
    "manager",
    "the cache manager that is held is the one that everything was sized for",
    "One part of an engine chooses the cache manager, another predicts the choice to size the sequence slots. Where "
    "they disagree the engine runs on one manager with the other one's numbers. So the prediction equals the choice; "
    "every derived number (seats, index rows, bytes per token, warm-up and budget estimates) comes from the manager "
    "held; a fall-back warns; an algorithm that owns its manager refuses rather than falls back; there are at least "
    "as many index rows as seats; and the manager has a buffer for every role of every layer. Judged by `kvsan "
    "select`, on decisions rather than layouts.",
    None,
)
