"""``judge_pair``: two deployments of one model, one transfer between them, one verdict.

A pair asks about geometry: slots and byte quotas play no part, and both sides are laid out with as many slots as the
proof needs.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ...model.errors import SpecError, require_int, shown
from ...model.spec import CacheSpec
from ..finding import Finding
from ..layout import Layout
from ..references import check_references
from ..registry import Allocator, allocate, default_allocator, is_shipped
from ..rejection import Rejected
from .method import Method
from .plan import Plan
from .planning import SOUND, plan_transfer

MAX_RANKS = 512
"""Most ranks of one side that hold a request."""


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kvsan", tag="pair"):
    """The two sides of a transfer. The specs' ranks do not count: all ranks that hold the request take part.

    ``source_dp`` and ``destination_dp`` are the attention-DP ranks that hold the request, 0 without attention-DP.
    ``source_allocator`` and ``destination_allocator`` name the shipped allocator of a side that has one of its own;
    None is whichever the pair is judged with.
    """

    version: Literal[1] = 1
    source: CacheSpec
    destination: CacheSpec
    source_dp: int = 0
    destination_dp: int = 0
    source_allocator: str | None = None
    destination_allocator: str | None = None

    def __post_init__(self) -> None:
        for field, spec in (("source", self.source), ("destination", self.destination)):
            if not isinstance(spec, CacheSpec):
                raise SpecError(field, "needs a spec")
            ranks = spec.parallel.tp if spec.parallel.attention_dp else 1
            require_int(f"{field}_dp", getattr(self, f"{field}_dp"), 0, ranks - 1)
            holders = spec.parallel.pp * spec.parallel.cp * (1 if spec.parallel.attention_dp else spec.parallel.tp)
            if holders > MAX_RANKS:
                raise SpecError(field, f"found {holders} ranks that hold a request, needs at most {MAX_RANKS}")
            allocator = getattr(self, f"{field}_allocator")
            if allocator is not None and not is_shipped(allocator):
                problem = "needs null or the name of an allocator from `kvsan allocators`, none of somebody's own"
                raise SpecError(f"{field}_allocator", f"found {shown(allocator)}, {problem}")


class PairVerdict(msgspec.Struct, frozen=True):
    """What came of a pair.

    ``rejected``: an allocator refuses one side (``side``, ``rejection``). ``refused``: the sides do not fit
    (``findings``). ``findings``: bytes arrive wrong. ``clean``: every byte arrives once, by ``plan``.
    """

    status: Literal["clean", "findings", "refused", "rejected"]
    plan: Plan = Plan()
    findings: tuple[Finding, ...] = ()
    side: str = ""
    rejection: Rejected | None = None
    source: tuple[Layout, ...] = ()
    destination: tuple[Layout, ...] = ()


def judge_pair(
    pair: Pair,
    source_allocator: str | Allocator | None = None,
    destination_allocator: str | Allocator | None = None,
    method: Method = SOUND,
) -> PairVerdict:
    """Return the verdict on ``pair``; the destination's allocator is the source's where none is named.

    An allocator that the pair names for a side goes before the ones given here.

    Raises ``SpecError`` for an unknown allocator, and for pools too large to be proved.
    """
    from .proof import prove  # which imports numpy; reading a pair, or the table of faults, does not

    source, destination = comparable(pair)
    sides: list[tuple[Layout, ...]] = []
    for name, spec, dp, allocator in (
        ("source", source, pair.source_dp, pair.source_allocator or source_allocator),
        (
            "destination",
            destination,
            pair.destination_dp,
            pair.destination_allocator or destination_allocator or source_allocator,
        ),
    ):
        try:
            sides.append(lay_out(spec, dp, allocator))
        except Rejected as rejection:
            return PairVerdict("rejected", side=name, rejection=rejection)
    plan = plan_transfer(sides[0], sides[1], method=method, destination_dp=pair.destination_dp)
    if plan.refusals:
        return PairVerdict("refused", plan, plan.refusals, source=sides[0], destination=sides[1])
    findings = tuple(prove(sides[0], sides[1], plan.copies))
    return PairVerdict("findings" if findings else "clean", plan, findings, source=sides[0], destination=sides[1])


def comparable(pair: Pair) -> tuple[CacheSpec, CacheSpec]:
    """Return the two specs with as many slots as a proof needs."""
    from .proof import slots_needed

    needed = slots_needed(pair.source, pair.destination)
    source, destination = (
        msgspec.structs.replace(spec, slots=slots, state_slots=None, quota_bytes=None)
        for spec, slots in zip((pair.source, pair.destination), needed, strict=True)
    )
    return source, destination


def lay_out(spec: CacheSpec, dp: int, allocator: str | Allocator | None) -> tuple[Layout, ...]:
    """Return the layouts of all ranks that hold a request, stage by stage; raise ``Rejected`` for a refusal.

    Our own allocators look at the stage alone, so they are asked once for each. Raises ``SpecError`` for a layout whose
    references do not hold.
    """
    chosen = allocator or default_allocator(spec)
    by_stage = isinstance(chosen, str) and is_shipped(chosen)
    parallel = spec.parallel
    per_stage = parallel.tp * parallel.cp
    layouts = []
    for stage in range(parallel.pp):
        first = stage * per_stage
        ranks = [first + dp] if parallel.attention_dp else list(range(first, first + per_stage))
        known: Layout | None = None
        for rank in ranks:
            if known is None or not by_stage:
                known = allocate(msgspec.structs.replace(spec, rank=rank), chosen)
                check_references(known)
                layouts.append(known)
            else:
                layouts.append(msgspec.structs.replace(known, spec=msgspec.structs.replace(spec, rank=rank)))
    return tuple(layouts)
