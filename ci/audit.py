"""``audit``: every disagreement of a rule set on the whole grid, each as the smallest set of inputs that causes it.

A *cause* is a set of inputs with values: with all other inputs ordinary (the first value of their axis), the point
disagrees, and no part of the set causes the same disagreement. The V2 flag belongs to every cause, since
no value of it is ordinary. Causes are listed by size until every disagreeing point of the grid contains one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np

from ..model.selection import AXES, KERNEL_ONLY, RuleSet, SelectionInputs, select
from ..model.selection.rulesets import PR_SELECTION
from .selection_grid import NAMES, POINTS, Booleans, Signature, judge_grid, without_sparse

_ALWAYS: Final = "v2"


class Published(msgspec.Struct, frozen=True):
    """A disagreement that a public thread describes; all others are derived from the rules."""

    check: str
    inputs: dict[str, Any]
    source: str


PUBLISHED: Final = (
    Published("manager", {"sparse": "skip_softmax", "v2": "true"}, f"{PR_SELECTION} (description)"),
    Published("follows-dense-rule", {"sparse": "skip_softmax", "v2": "true"}, f"{PR_SELECTION} (description)"),
    Published("manager", {"geometry": "variable", "v2": "false"}, f"{PR_SELECTION} (review)"),
    Published(
        "follows-dense-rule",
        {"sparse": "skip_softmax", "geometry": "variable", "v2": "false"},
        f"{PR_SELECTION} (review)",
    ),
)


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """One cause: ``inputs`` are those that must be as they are, the others ordinary.

    ``selected`` is the manager held (or ``refused``), ``predicted`` the kind that the seats were sized for. ``path`` is
    the rules that decided, a line each. ``points`` counts the grid points that contain the cause and disagree alike.
    """

    check: str
    inputs: dict[str, Any]
    selected: str
    predicted: str
    path: list[str]
    derived: bool
    source: str
    points: int


class Audit(msgspec.Struct, frozen=True):
    """All disagreements of a rule set on ``points`` points."""

    ruleset: str
    points: int
    disagreements: list[Disagreement]


def audit(ruleset: RuleSet) -> Audit:
    """Return the disagreements of ``ruleset``, those that a thread describes first, then by size."""
    found: dict[tuple[str, str], Disagreement] = {}
    for signature, where in judge_grid(ruleset).where.items():
        for inputs, points in causes_of(ruleset, where):
            entry = _disagreement(ruleset, signature, inputs, points)
            found.setdefault((entry.check, str(inputs)), entry)  # one row, whichever aspects of the rule it breaks
    ordered = sorted(found.items(), key=lambda item: (item[1].derived, len(item[1].inputs), item[0]))
    return Audit(ruleset.name, POINTS, [entry for _, entry in ordered])


def ordinary(ruleset: RuleSet) -> dict[str, Any]:
    """Return the ordinary value of every input: the first of its axis; beams on V2 as the version has them."""
    return {name: values[0] for name, values in AXES.items()} | {"v2_beams": ruleset.v2_beams}


def causes_of(ruleset: RuleSet, where: Booleans) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the causes of one kind of disagreement, the smallest first, with the number of points that contain each.

    ``where`` says at which points of the grid it is.
    """
    usual = ordinary(ruleset)
    home = [AXES[name].index(usual[name]) for name in NAMES]
    free = [axis for axis, name in enumerate(NAMES) if name != _ALWAYS]
    flag = NAMES.index(_ALWAYS)
    left = where.copy()
    known: list[dict[int, int]] = []
    for count in range(len(free) + 1):
        if not left.any():
            return
        for axes in itertools.combinations(free, count):
            chosen = [flag, *axes]
            others = [[place for place in range(len(AXES[NAMES[axis]])) if place != home[axis]] for axis in axes]
            for places in itertools.product(range(len(AXES[_ALWAYS])), *others):
                cause = dict(zip(chosen, places, strict=True))
                point = tuple(cause.get(axis, home[axis]) for axis in range(len(NAMES)))
                if not where[point] or any(smaller.items() <= cause.items() for smaller in known):
                    continue
                known.append(cause)
                inside = tuple(cause.get(axis, slice(None)) for axis in range(len(NAMES)))
                yield (
                    {NAMES[axis]: AXES[NAMES[axis]][place] for axis, place in sorted(cause.items())},
                    int(np.count_nonzero(where[inside])),
                )
                left[inside] = False


def _disagreement(ruleset: RuleSet, signature: Signature, inputs: dict[str, Any], points: int) -> Disagreement:
    decision = select(SelectionInputs(**(ordinary(ruleset) | inputs)), ruleset)
    path = [step.words for step in decision.path]
    if signature.check == "follows-dense-rule" and decision.inputs.sparse in KERNEL_ONLY:
        dense = without_sparse(decision, ruleset)
        path += [f"without {decision.inputs.sparse}: {step.words}" for step in dense.path if step.table != "predictor"]
    source = next(
        (entry.source for entry in PUBLISHED if entry.check == signature.check and entry.inputs == inputs), "derived"
    )
    return Disagreement(
        check=signature.check,
        inputs=inputs,
        selected=decision.manager or "refused",
        predicted=decision.predicted,
        path=path,
        derived=source == "derived",
        source=source,
        points=points,
    )
