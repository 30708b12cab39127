"""``run_pairs``: a campaign over drawn pairs, and ``reduce_pair``: a failing pair made small.

Chunks of 500 pairs have seeds of their own, as in campaigns over specs, so equal seeds give equal pairs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from ..model.errors import SpecError
from ..model.spec import CacheSpec
from ..sim.registry import Allocator
from ..sim.transfer.method import Method
from ..sim.transfer.pair import Pair, judge_pair
from ..sim.transfer.planning import SOUND
from .determinism import chunk_seed, chunk_sizes, without_folder, without_local_constants
from .reducer import reduce_spec
from .transfer_minima import pair_key


class PairHit(msgspec.Struct, frozen=True):
    """The first pair on which a rule broke, its message, and how many pairs had been tried."""

    rule: str
    message: str
    pair: Pair
    examples_to_find: int


class PairResult(msgspec.Struct, frozen=True):
    """A whole campaign: how many pairs came to which verdict, and what was found first of each rule."""

    examples: int
    seconds: float
    statuses: dict[str, int]
    hits: tuple[PairHit, ...]


def run_pairs(
    examples: int,
    *,
    seed: int = 0,
    method: Method = SOUND,
    allocator: str | Allocator | None = None,
    stop_at_first: bool = False,
    refusals: str = "",
    **drawn: Any,
) -> PairResult:
    """Judge ``examples`` drawn pairs; ``drawn`` are options of ``strategies.peers.peer_pairs``.

    Refusals of pairs count as findings where their message contains ``refusals``, if that is given: two deployments of
    one model that do not fit are no fault of the transfer, but may be one of an allocator.

    An exception of any kind ends the campaign: refusals are verdicts, and nothing else may be raised.
    """
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    from ..strategies.peers import peer_pairs

    started = time.monotonic()
    statuses: Counter[str] = Counter()
    hits: dict[str, PairHit] = {}

    def look(pair: Pair) -> None:
        if stop_at_first and hits:
            return
        verdict = judge_pair(pair, allocator, method=method)
        statuses[verdict.status] += 1
        refused = bool(refusals) and verdict.status == "refused"
        if refused or verdict.status == "findings":
            for finding in verdict.findings:
                if refused and refusals not in finding.message:
                    continue
                found = PairHit(finding.rule, finding.message, pair, statuses.total())
                hits.setdefault(finding.rule, found)

    with without_local_constants(), without_folder():
        for chunk, size in enumerate(chunk_sizes(examples)):
            if stop_at_first and hits:
                break
            quiet = settings(
                max_examples=size,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            seeded(chunk_seed(seed, chunk))(quiet(given(peer_pairs(**drawn))(look)))()
    return PairResult(statuses.total(), time.monotonic() - started, dict(statuses), tuple(hits.values()))


def reduce_pair(pair: Pair, fails: Callable[[Pair], bool], *, max_checks: int = 5_000) -> Pair:
    """Return the simplest pair reached from ``pair`` for which ``fails`` is true; both sides keep one model.

    The source is reduced with the destination following in all that both share, then the destination alone, until
    neither gets simpler.
    """

    for changes in ({"source_dp": 0}, {"destination_dp": 0}):
        simpler = msgspec.structs.replace(pair, **changes)
        if _holds(fails, simpler):
            pair = simpler
    while True:
        source = reduce_spec(pair.source, partial(_source_fails, fails, pair), max_checks=max_checks).spec
        smaller = _followed(pair, source)
        destination = reduce_spec(
            smaller.destination, partial(_destination_fails, fails, smaller), max_checks=max_checks
        ).spec
        smaller = msgspec.structs.replace(smaller, destination=destination)
        if pair_key(smaller) >= pair_key(pair):
            return pair
        pair = smaller


def _holds(fails: Callable[[Pair], bool], pair: Pair) -> bool:
    try:
        return fails(pair)
    except SpecError:
        return False


def _source_fails(fails: Callable[[Pair], bool], pair: Pair, source: CacheSpec) -> bool:
    try:
        return _holds(fails, _followed(pair, source))
    except SpecError:  # the destination cannot follow: more stages than layers
        return False


def _destination_fails(fails: Callable[[Pair], bool], pair: Pair, destination: CacheSpec) -> bool:
    if destination.layers != pair.source.layers:
        return False
    return _holds(fails, msgspec.structs.replace(pair, destination=destination))


def _followed(pair: Pair, source: CacheSpec) -> Pair:
    """Return ``pair`` with another source, and the destination changed alike in all that both had in common."""
    old, other = pair.source, pair.destination
    shared = {
        field: getattr(source, field)
        for field in CacheSpec.__struct_fields__
        if getattr(old, field) == getattr(other, field) and field != "rank"
    }
    shared["layers"] = source.layers
    destination = msgspec.structs.replace(other, **shared)
    return msgspec.structs.replace(pair, source=source, destination=destination)
