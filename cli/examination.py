"""``examine``: one spec, one allocator, and what comes of it."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ..model.errors import SpecError
from ..model.spec import CacheSpec
from ..sim.checking import check
from ..sim.finding import Finding
from ..sim.layout import Layout
from ..sim.registry import Allocator, allocate
from ..sim.rejection import Rejected

Status: TypeAlias = Literal["clean", "findings", "rejected"]


class NamedAllocator(msgspec.Struct, frozen=True):
    """An allocator and its name; one that is ``by_stage`` looks at no more of a rank than its pipeline stage."""

    name: str
    function: Allocator
    by_stage: bool
    asked_for: bool = True


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """The layout with its findings, or the refusal; ``inferred`` says what of the spec was concluded, not given."""

    allocator: NamedAllocator
    spec: CacheSpec
    layout: Layout | None = None
    findings: tuple[Finding, ...] = ()
    rejection: Rejected | None = None
    inferred: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """The verdict in one word."""
        if self.rejection is not None:
            return "rejected"
        return "findings" if self.findings else "clean"

    @property
    def message(self) -> str | None:
        """What the refusal or the first finding says, None when all is well."""
        if self.rejection is not None:
            return self.rejection.message
        return self.findings[0].message if self.findings else None

    @property
    def rules(self) -> list[str]:
        """The rules that are broken, each once, in the order found; a refusal counts as its rule."""
        if self.rejection is not None:
            return [self.rejection.rule]
        return list(dict.fromkeys(finding.rule for finding in self.findings))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the report."""
        return self.inferred + (self.layout.notes if self.layout is not None else ())


def examine(spec: CacheSpec, allocator: NamedAllocator, inferred: tuple[str, ...] = ()) -> Examination:
    """Return what ``allocator`` makes of ``spec`` and what the rules say of it.

    Raises ``SpecError`` naming the allocator when it answers with something that is no layout.
    """
    named = f"{allocator.name}: "
    try:
        layout = laid_out(spec, allocator)
    except Rejected as rejection:
        return Examination(allocator=allocator, spec=spec, rejection=rejection, inferred=inferred)
    try:
        findings = tuple(check(layout, allocated=True))
    except SpecError as error:
        raise SpecError("--allocator", named + str(error)) from None
    except Exception as error:  # a layout of somebody's own making may hold anything
        if allocator.by_stage:
            raise
        problem = f"returned a layout that cannot be checked ({type(error).__name__}: {error})"
        raise SpecError("--allocator", named + problem) from None
    return Examination(allocator=allocator, spec=spec, layout=layout, findings=findings, inferred=inferred)


def laid_out(spec: CacheSpec, allocator: NamedAllocator) -> Layout:
    """Return the layout of ``spec``; raises ``Rejected``, and ``SpecError`` naming the allocator."""
    try:
        return allocate(spec, allocator.function)
    except SpecError as error:
        problem = error.problem if error.field == "allocator" else str(error)
        raise SpecError("--allocator", f"{allocator.name}: {problem}") from None


def worst(examinations: list[Examination]) -> Examination:
    """Return the first of the worst: refused before findings before clean."""
    severity = {"rejected": 2, "findings": 1, "clean": 0}
    return max(examinations, key=lambda examination: severity[examination.status])
