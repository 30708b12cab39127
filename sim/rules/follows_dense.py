"""Rule ``follows-dense-rule``: a kernel-only algorithm changes no manager. Judged on a pair of decisions."""

from __future__ import annotations

from collections.abc import Iterator

from ...model.selection import KERNEL_ONLY, Decision
from ..finding import Finding, Where
from .rule import Rule


def check_follows_dense(decision: Decision, dense: Decision) -> Iterator[Finding]:
    """Yield where ``decision`` differs from ``dense``, the same inputs with no sparse algorithm.

    Only the manager and whether the engine starts count: a warning may name the algorithm.
    """
    if decision.inputs.sparse not in KERNEL_ONLY or decision.manager == dense.manager:
        return
    yield Finding(
        rule="follows-dense-rule",
        message=f"{decision.inputs.sparse} keeps the dense KV layout, and the model {_outcome(decision)} with it where "
        f"it {_outcome(dense)} without it",
        remedy="decide by whether an algorithm stores anything beside K and V, not by its name",
        where=(Where(manager=decision.manager),),
    )


def _outcome(decision: Decision) -> str:
    return "is refused" if decision.manager is None else f"runs on {decision.manager}"


RULE = Rule(
    "follows-dense-rule",
    "a sparse algorithm that changes kernels alone gets the manager of the dense model",
    "Some sparse algorithms (skip_softmax) only skip work inside a kernel: the cache holds the same pages as for "
    "dense attention. Such a model must get the manager that it would get without the algorithm, or be refused where "
    "it would be. A registry that maps names of algorithms to managers breaks this as soon as the dense rule learns "
    "something new. Judged by `kvsan select`, on decisions rather than layouts.",
    None,
)
