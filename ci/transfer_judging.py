"""``judge_transfer``: what is wrong with a pair under a named transfer or allocator, and which of it counts.

Two deployments of one model that do not fit are no fault of the transfer, so a campaign passes over refused pairs,
unless it is asked for those that say certain words: they may well be the fault of an allocator.
"""

from __future__ import annotations

import re

import msgspec

from ..model.errors import SpecError, shown
from ..model.spec import CacheSpec
from ..sim.allocators.faulty import base_of
from ..sim.cache.faulty import faulty_entry
from ..sim.finding import Finding
from ..sim.limits import excused_by, limits_of
from ..sim.registry import default_allocator, is_foreign, is_shipped, resolve
from ..sim.transfer.names import is_faulty_transfer, transfer_named
from ..sim.transfer.pair import Pair, PairVerdict, judge_pair
from ..sim.transfer.planning import SOUND


class JudgedTransfer(msgspec.Struct, frozen=True):
    """A verdict on a pair. ``faults`` are the findings, the reasons of a refusal, or the refusal of an allocator that
    claims to support the spec; ``excused`` those of them that known limits of the allocators explain."""

    verdict: PairVerdict
    faults: tuple[Finding, ...]
    excused: tuple[Finding, ...]

    @property
    def rules(self) -> list[str]:
        """The rules broken, each once, in the order of the faults."""
        return list(dict.fromkeys(fault.rule for fault in self.faults))

    def outside(self, refusals: str = "") -> tuple[Finding, ...]:
        """Return what a campaign counts: faults outside of known limits; of refusals those that say ``refusals``."""
        if self.verdict.status == "refused":
            return tuple([fault for fault in self.faults if refusals and refusals in fault.message])
        return tuple([fault for fault in self.faults if fault not in self.excused])

    def alike(self, fault: Finding) -> Finding | None:
        """Return the fault here that is of the same kind: of one rule, and where pairs are refused, one reason."""
        return next((other for other in self.faults if _kind(other, self) == _kind(fault, self)), None)


def judge_transfer(pair: Pair, allocator: str) -> JudgedTransfer:
    """Return the verdict on ``pair`` under ``allocator`` (see ``sim.transfer.names``).

    Raises ``SpecError`` for an unknown name, and for pools too large to be proved.
    """
    method, name = transfer_named(allocator)
    verdict = judge_pair(pair, name, method=method)
    refusal, faults = verdict.rejection, verdict.findings
    if refusal is not None and (refusal.supported or refusal.rule != "rejected"):
        message = f"the {verdict.side}: {refusal.message}"
        faults = (Finding(rule=refusal.rule, message=message, remedy=refusal.remedy, where=refusal.where),)
    if not faults or refusal is None:
        return JudgedTransfer(verdict, faults, ())
    spec = pair.source if verdict.side == "source" else pair.destination
    own = pair.source_allocator if verdict.side == "source" else pair.destination_allocator
    limits = limits_of(own or name or default_allocator(spec))
    stages = [msgspec.structs.replace(spec, rank=rank) for rank in _one_rank_of_each_stage(spec)]
    matching = [limit for limit in limits if any(map(limit.matches, stages))]
    return JudgedTransfer(verdict, faults, excused_by(matching, faults))


def _one_rank_of_each_stage(spec: CacheSpec) -> range:
    """Return the first rank of every pipeline stage: a limit may hold on one of them alone."""
    parallel = spec.parallel
    return range(0, parallel.world_size, parallel.tp * parallel.cp)


def require_transfer(allocator: str) -> None:
    """Raise ``SpecError`` unless ``allocator`` names what a pair can be judged with; imports an allocator's module."""
    if allocator == SOUND.name or is_faulty_transfer(allocator):
        return
    if faulty_entry(allocator) is not None:
        raise SpecError("allocator", f"{allocator} is a fault of running caches: use --traces instead of --peers")
    if allocator.startswith("fault:") and not is_shipped(allocator):
        problem = "needs the fault of a transfer or of an allocator (see docs/faults.md)"
        raise SpecError("allocator", f"unknown fault {shown(allocator)}, {problem}")
    resolve(allocator)


def family_of_pairs(allocator: str) -> str:
    """Return the family of specs that pairs for ``allocator`` are drawn from."""
    from ..strategies.families import family_of

    if allocator == SOUND.name or is_faulty_transfer(allocator) or is_foreign(allocator):
        return "any"
    return family_of(base_of(allocator))


def reason_of(refusal: Finding) -> str:
    """Return what tells a refusal from others: its text up to a colon, without numbers and what was counted.

    >>> reason_of(Finding(rule="peer", message="layer 3's key differs in shards: 3 on the source", remedy=""))
    "layer #'s key differs in shards"
    """
    head, _, rest = refusal.message.partition(": ")
    text = f"{head}: {rest}" if "cannot register" in head else head
    return re.sub(r"\d+(, (\d+|\.\.\.))*", "#", text)


def _kind(fault: Finding, judged: JudgedTransfer) -> tuple[str, str]:
    return fault.rule, reason_of(fault) if judged.verdict.status == "refused" else ""
