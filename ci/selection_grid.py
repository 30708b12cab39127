"""A rule set on the whole grid of inputs at once.

The tables of a rule set are data, so NumPy finds for every point which rule of each table applies. Points at which the
same rules apply, and which agree in whatever else a decision looks at, form a class; one point of each class is decided
and judged by the ordinary code (``select`` and the rules), and its class shares the result.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ..model.selection import AXES, KERNEL_ONLY, MANAGERS, Decision, RuleSet, SelectionInputs, SelectionRule, select
from ..model.selection.inputs import FACTS, Fact
from ..model.selection.rules import CANDIDATE_KIND
from ..sim.rules.follows_dense import check_follows_dense
from ..sim.rules.manager import manager_problems

Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

NAMES: Final = tuple(AXES)
SHAPE: Final = tuple(len(values) for values in AXES.values())
POINTS: Final = int(np.prod(SHAPE))
SEAT_AXES: Final = ("attention_dp", "pp", "overlap", "mrope_delta_cache")
"""Axes that no table asks for: they only size the seats and the index rows. They are the last ones of the grid."""
_SEAT_SHAPE: Final = SHAPE[-len(SEAT_AXES) :]
_REFUSED: Final = "refused"


class Signature(msgspec.Struct, frozen=True, order=True):
    """What kind of disagreement a point has: the rule and its aspect, the manager held and the one compared with.

    ``selected`` is the kind of manager held (or ``refused``), ``other`` the one predicted or, for a kernel-only
    algorithm, the manager held without it.
    """

    check: str
    aspect: str
    selected: str
    other: str


class JudgedGrid(msgspec.Struct, frozen=True):
    """A rule set on the grid; all arrays are over the axes in the order of ``AXES``.

    ``where`` says for each kind of disagreement at which points it is; ``outcomes`` numbers what comes of each point
    (manager, refusal, warning, seats, index rows), ``meaning`` tells what the numbers stand for.
    """

    where: dict[Signature, Booleans]
    outcomes: Integers
    meaning: list[tuple[Any, ...]]

    def __repr__(self) -> str:
        """The arrays have an axis for each input, and NumPy would spell out every point."""
        return f"JudgedGrid({len(self.where)} kinds of disagreement, {len(self.meaning)} outcomes)"

    @property
    def disagreeing(self) -> Booleans:
        """The points with any disagreement."""
        return functools.reduce(np.logical_or, self.where.values(), np.zeros(SHAPE, dtype=bool))


def values_at(place: Sequence[int]) -> dict[str, Any]:
    """Return the values of the inputs at a place of the grid."""
    return {name: values[index] for (name, values), index in zip(AXES.items(), place, strict=True)}


def rule_places(table: Sequence[SelectionRule], kinds: Callable[[tuple[Any, ...]], Booleans] | None = None) -> Integers:
    """Return for each point the place of the first rule of ``table`` that applies, over the axes that matter.

    The result has the grid's rank and size 1 along axes that no rule asks for. ``kinds`` gives where the candidate is
    of one of some kinds.
    """
    places: Integers = np.full((1,) * len(SHAPE), -1, dtype=np.int64)
    for place, rule in reversed(list(enumerate(table))):
        holds: Booleans = np.ones((1,) * len(SHAPE), dtype=bool)
        for fact, wanted in rule.when.items():
            if fact == CANDIDATE_KIND:
                if kinds is None:
                    raise ValueError(f"rule {rule.name} asks for the candidate, which only the validator knows")
                holds = holds & kinds(wanted)
            else:
                holds = holds & _fact_in(fact, wanted)
        places = np.where(holds, place, places)
    return places


def _fact_in(name: str, wanted: tuple[Any, ...]) -> Booleans:
    """Return where a fact has one of the ``wanted`` values, of size 1 along axes that it does not depend on."""
    fact = FACTS[name]
    holds: Booleans = _along(fact, [value in wanted for value in _values_of(fact)])
    return holds


def _values_of(fact: Fact) -> list[Any]:
    return [fact.ask(*values) for values in itertools.product(*(AXES[field] for field in fact.of))]


def _along(fact: Fact, values: Sequence[int]) -> Any:
    """Return ``values``, one for each combination of the inputs that ``fact`` depends on, along the grid's axes."""
    axes = [NAMES.index(field) for field in fact.of]
    table = np.array(values).reshape([len(AXES[field]) for field in fact.of]).transpose(np.argsort(axes))
    return table.reshape([size if axis in axes else 1 for axis, size in enumerate(SHAPE)])


def judge_grid(ruleset: RuleSet) -> JudgedGrid:
    """Return ``ruleset`` on the whole grid."""
    classes = _classes(ruleset)
    flat_shape = classes.shape[: -len(SEAT_AXES)]
    _, firsts, members = np.unique(classes.ravel(), return_index=True, return_inverse=True)
    members = members.reshape(flat_shape)
    seats = list(itertools.product(*(AXES[name] for name in SEAT_AXES)))
    found: dict[Signature, Booleans] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    outcomes = np.zeros((len(firsts), len(seats)), dtype=np.int64)
    for row, first in enumerate(firsts):
        inputs = values_at([*np.unravel_index(first, flat_shape), *(0,) * len(SEAT_AXES)])
        for column, values in enumerate(seats):
            decision = select(SelectionInputs(**(inputs | dict(zip(SEAT_AXES, values, strict=True)))), ruleset)
            for signature in disagreements_of(decision, ruleset):
                found.setdefault(signature, np.zeros_like(outcomes, dtype=bool))[row, column] = True
            outcomes[row, column] = numbers.setdefault(outcome_of(decision), len(numbers))

    def spread(table: Any) -> Any:
        return table[members].reshape(SHAPE)

    where = {signature: spread(found[signature]) for signature in sorted(found)}
    return JudgedGrid(where, spread(outcomes), list(numbers))


def _classes(ruleset: RuleSet) -> Integers:
    """Return a number for each point: points with one number are decided and judged alike, seats apart."""
    selector = rule_places(ruleset.selector)
    row_kinds = np.array([_kind(rule) for rule in ruleset.selector])
    kinds = row_kinds[selector]
    validator = rule_places(ruleset.validator, lambda wanted: np.isin(kinds, wanted))
    validator = np.where(kinds == _REFUSED, 0, validator)
    predictor = rule_places(ruleset.predictor)
    dense = [AXES["sparse"].index("none")]
    axis = NAMES.index("sparse")
    parts: list[tuple[Integers, int]] = [
        (selector, len(ruleset.selector)),
        (validator, len(ruleset.validator)),
        (predictor, len(ruleset.predictor)),
        (np.take(selector, dense, axis), len(ruleset.selector)),
        (np.take(validator, dense, axis), len(ruleset.validator)),
    ]
    runs = kinds != _REFUSED
    for name, matters in (("sparse", True), ("hybrid", runs), ("disaggregated", runs), ("lacking", runs)):
        values = _values_of(FACTS[name])
        known = list(dict.fromkeys(values))
        numbered = _along(FACTS[name], [known.index(value) for value in values])
        parts.append((np.where(matters, numbered, 0), len(known)))
    number: Integers = np.zeros((1,) * len(SHAPE), dtype=np.int64)
    for part, size in parts:
        number = number * size + part
    if number.shape[-len(SEAT_AXES) :] != (1,) * len(SEAT_AXES):
        raise ValueError(f"a rule of {ruleset.name} asks for one of {', '.join(SEAT_AXES)}, which only size the seats")
    return np.broadcast_to(number, SHAPE[: -len(SEAT_AXES)] + (1,) * len(SEAT_AXES))


def _kind(rule: SelectionRule) -> str:
    return _REFUSED if rule.then.does == "refuse" else MANAGERS[rule.then.manager].kind


def without_sparse(decision: Decision, ruleset: RuleSet) -> Decision:
    """Return what the same model gets with no sparse algorithm."""
    return select(msgspec.structs.replace(decision.inputs, sparse="none"), ruleset)


def disagreements_of(decision: Decision, ruleset: RuleSet) -> Iterator[Signature]:
    """Yield what is wrong with one decision, each kind once."""
    selected = _REFUSED if decision.held is None else decision.held.kind
    yield from dict.fromkeys(
        Signature("manager", problem.aspect, selected, decision.predicted) for problem in manager_problems(decision)
    )
    if decision.inputs.sparse in KERNEL_ONLY:
        dense = without_sparse(decision, ruleset)
        for finding in check_follows_dense(decision, dense):
            yield Signature(finding.rule, "dense", decision.manager or _REFUSED, dense.manager or _REFUSED)


def outcome_of(decision: Decision) -> tuple[Any, ...]:
    """Return what a user notices of a decision: manager, refusal, warning, seats and index rows."""
    refusal = None if decision.refusal is None else (decision.refusal.message, decision.refusal.remedy)
    return decision.manager, refusal, decision.warning, decision.seats, decision.index_rows
