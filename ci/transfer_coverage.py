"""What a campaign over pairs exercised: verdicts, reasons of refusals, and situations of pairs that were moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from ..model.layers import AttentionLayer, paged_part
from ..model.spec import CacheSpec
from ..sim.layout import SIDE_PLANES
from ..sim.transfer.pair import Pair
from .ledger import SavedCases
from .transfer_judging import JudgedTransfer, reason_of

SITUATIONS: Final = (
    "one layout on both sides",
    "more shards at the destination",
    "fewer shards at the destination",
    "replicas at the source",
    "replicas at the destination",
    "other stages",
    "uneven stages",
    "attention-DP to tensor parallel",
    "tensor parallel to attention-DP",
    "an attention-DP rank beyond 0",
    "other tokens per block",
    "tokens outside heads",
    "block scales",
    "side planes",
    "packed side planes",
    "windows",
    "recurrent states",
    "draft layers",
    "another draft mode",
)
"""What a pair can be that was moved, whether or not it arrived."""


class PairCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of each verdict, refused pairs of each reason, and pairs moved in each situation (``classes``).

    ``classes_never`` are situations that never came about; ``cases_unreadable`` files that are no case known here.
    """

    verdicts: dict[str, int]
    reasons: dict[str, int]
    classes: dict[str, int]
    classes_never: list[str]
    cases_run: list[str] = []
    cases_failing: list[str] = []
    cases_not_run: list[str] = []
    cases_unreadable: list[str] = []


class PairCounts(msgspec.Struct):
    """Counts as they grow; those of several chunks can be added up."""

    verdicts: Counter[str]
    reasons: Counter[str]
    classes: Counter[str]

    def count(self, pair: Pair, judged: JudgedTransfer) -> None:
        """Add one pair that was judged."""
        status = judged.verdict.status
        self.verdicts[status] += 1
        if status == "refused":
            self.reasons.update({reason_of(fault) for fault in judged.faults})
        elif status != "rejected":
            self.classes.update(situations_of(pair, judged))

    def add(self, other: PairCounts) -> None:
        """Add the counts of another chunk."""
        self.verdicts.update(other.verdicts)
        self.reasons.update(other.reasons)
        self.classes.update(other.classes)


def new_counts() -> PairCounts:
    """Return counts of nothing."""
    return PairCounts(Counter(), Counter(), Counter())


def coverage_of_pairs(counts: PairCounts, cases: SavedCases) -> PairCoverage:
    """Return the coverage that ``counts`` amount to."""
    return PairCoverage(
        verdicts=dict(sorted(counts.verdicts.items())),
        reasons=dict(sorted(counts.reasons.items())),
        classes={name: counts.classes[name] for name in SITUATIONS},
        classes_never=[name for name in SITUATIONS if not counts.classes[name]],
        cases_run=sorted(cases.run),
        cases_failing=sorted(cases.failing),
        cases_not_run=sorted(cases.not_run),
        cases_unreadable=sorted(cases.unreadable),
    )


def situations_of(pair: Pair, judged: JudgedTransfer) -> Iterator[str]:
    """Yield the situations that a pair is in which was moved."""
    source, destination = pair.source, pair.destination
    one, other = source.parallel, destination.parallel
    heads = _heads(source)
    shards, others = ({min(count, spec.parallel.attention_tp) for count in heads} for spec in (source, destination))
    paged = [layer for layer in map(paged_part, source.layers) if layer is not None]
    for name, holds in (
        ("one layout on both sides", one == other),
        ("more shards at the destination", max(shards, default=1) < max(others, default=1)),
        ("fewer shards at the destination", max(shards, default=1) > max(others, default=1)),
        ("replicas at the source", any(count < one.attention_tp for count in heads)),
        ("replicas at the destination", any(count < other.attention_tp for count in heads)),
        ("other stages", one.pp != other.pp),
        ("uneven stages", any(len(spec.layers) % spec.parallel.pp for spec in (source, destination))),
        ("attention-DP to tensor parallel", one.attention_dp and not other.attention_dp),
        ("tensor parallel to attention-DP", other.attention_dp and not one.attention_dp),
        ("an attention-DP rank beyond 0", bool(pair.source_dp or pair.destination_dp)),
        ("other tokens per block", source.tokens_per_block != destination.tokens_per_block),
        ("tokens outside heads", source.consumer.kv_layout == "NHD" and bool(heads)),
        ("block scales", any((layer.kv_format or source.kv_format).block_scaled for layer in paged)),
        ("side planes", any(layer.side_planes for layer in paged)),
        (
            "packed side planes",
            any(buffer.role == SIDE_PLANES for layout in judged.verdict.source for buffer in layout.buffers),
        ),
        ("windows", any(layer.window is not None for layer in paged)),
        ("recurrent states", source.has_recurrent),
        ("draft layers", bool(source.draft.layers)),
        ("another draft mode", source.draft.mode != destination.draft.mode),
    ):
        if holds:
            yield name


def _heads(spec: CacheSpec) -> list[int]:
    """Return the KV heads of the model's attention layers."""
    paged = [paged_part(layer) for layer in spec.layers]
    return [layer.kv_heads for layer in paged if isinstance(layer, AttentionLayer)]
