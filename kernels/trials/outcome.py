"""``Outcome``: what came of one trial."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ..reference.bounds import Bound, Difference, compare


class Outcome(msgspec.Struct, frozen=True):
    """The worst difference of a trial, what it was found in, and remarks for the report."""

    what: str
    difference: Difference
    remarks: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether everything was within its bound."""
        return self.difference.within

    @property
    def text(self) -> str:
        """The outcome in one line."""
        found = self.difference
        place = f"{self.what}{list(found.place)} is {found.got:.6g}, the reference says {found.wanted:.6g}"
        return f"{place} (relative L2 {found.relative_l2:.2e}, worst element {found.worst:.2e})"


def judge(results: list[tuple[str, Any, Any, Bound]]) -> Outcome:
    """Return the outcome of several results, each (name, result, reference, bound): the first bad one, else the worst.

    Comparison happens where the results are.
    """
    outcomes = [Outcome(name, compare(got, wanted, bound)) for name, got, wanted, bound in results]
    for outcome in outcomes:
        if not outcome.passed:
            return outcome
    return max(outcomes, key=lambda outcome: outcome.difference.relative_l2)


def poisoned(shape: tuple[int, ...], device: Any) -> Any:
    """Return an output full of NaN: what a kernel does not write never passes."""
    return torch.full(shape, float("nan"), dtype=torch.float32, device=device)
