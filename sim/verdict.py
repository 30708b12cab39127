"""``judge``: one spec, one allocator, one verdict."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..model.spec import CacheSpec
from .checking import check
from .finding import Finding
from .layout import Layout
from .registry import Allocator, allocate
from .rejection import Rejected


class Verdict(msgspec.Struct, frozen=True):
    """What came of a spec: a clean layout, a layout with findings, or a refusal.

    ``faults`` are what an allocator is to blame for: its findings, or its refusal where it had no right to refuse (a
    spec that it declares to
    support, or a refusal that explains nothing).
    """

    status: Literal["clean", "findings", "rejected"]
    layout: Layout | None
    findings: tuple[Finding, ...] = ()
    rejection: Rejected | None = None

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings, or the refusal as one where it is a fault of the allocator."""
        refusal = self.rejection
        if refusal is None:
            return self.findings
        if refusal.supported or refusal.rule != "rejected":
            return (Finding(rule=refusal.rule, message=refusal.message, remedy=refusal.remedy, where=refusal.where),)
        return ()


def judge(spec: CacheSpec, allocator: str | Allocator | None = None) -> Verdict:
    """Return the verdict on ``spec``; raise ``SpecError`` for an unknown allocator or a broken layout."""
    try:
        layout = allocate(spec, allocator)
    except Rejected as rejection:
        return Verdict("rejected", None, (), rejection)
    findings = tuple(check(layout, allocated=True))
    return Verdict("findings" if findings else "clean", layout, findings)
