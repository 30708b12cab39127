"""``reduce_pair``: a failing pair made small, with the reducer of specs on one side after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from ..model.errors import SpecError
from ..model.spec import CacheSpec
from ..sim.transfer.pair import Pair
from .reducer import reduce_spec
from .transfer_minima import pair_key

_OWN: dict[str, Any] = {"source_dp": 0, "destination_dp": 0, "source_allocator": None, "destination_allocator": None}
"""What a pair has beside its specs, at its simplest."""


def reduce_pair(pair: Pair, fails: Callable[[Pair], bool], *others: Pair, max_checks: int = 5_000) -> Pair:
    """Return the simplest pair reached from ``pair`` for which ``fails`` is true; both sides keep one model.

    The source is reduced with the destination following in all that both share, then the destination alone, until
    neither gets simpler. Further starts (``others``) are reduced too where there are any: a single one may lead to a
    pair that is small, and not the smallest. Raises ``ValueError`` for a pair that does not fail.
    """
    return min((_reduced(start, fails, max_checks) for start in (pair, *others)), key=pair_key)


def _reduced(pair: Pair, fails: Callable[[Pair], bool], max_checks: int) -> Pair:
    for field, simplest in _OWN.items():
        if getattr(pair, field) == simplest:
            continue
        simpler = msgspec.structs.replace(pair, **{field: simplest})
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
