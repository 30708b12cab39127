"""``reduce_pair``: a failing pair made small, with the reducer of specs on one side after the other.

Some steps change both sides at once: the sides change places, a layer goes while one side's stages were counted out,
one side's ranks become more so that the other's may be fewer. So a pair that neither side gets simpler of is looked at
from farther away: with any one or two of its layers, or a single layer of each kind, under any two of a few parallel
layouts, the simplest first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from ..model.errors import SpecError
from ..model.formats import ElementFormat
from ..model.layers import AttentionLayer, LatentLayer, RecurrentLayer
from ..model.parallel import ParallelLayout
from ..model.spec import CacheSpec
from ..sim.transfer.pair import Pair
from .reducer import reduce_spec
from .transfer_minima import pair_key

_LAYOUTS: Final = (ParallelLayout(), ParallelLayout(tp=2), ParallelLayout(tp=4), ParallelLayout(pp=2))
_STATES: Final = [
    RecurrentLayer(
        algorithm="gdn", heads=heads, head_dim=1, groups=heads, state_dim=1, conv_kernel=2, ssm_format=format
    )
    for heads in (1, 2)
    for format in (None, ElementFormat.FP32)
]
_LAYERS: Final = (AttentionLayer(kv_heads=1, head_dim=128), LatentLayer(latent_dim=128), *_STATES)
"""Layers that are tried as the whole model."""
_OWN: dict[str, Any] = {"source_dp": 0, "destination_dp": 0, "source_allocator": None, "destination_allocator": None}
"""What a pair has beside its specs, at its simplest."""


def reduce_pair(pair: Pair, fails: Callable[[Pair], bool], *others: Pair, max_checks: int = 5_000) -> Pair:
    """Return the simplest pair reached from ``pair`` for which ``fails`` is true; both sides keep one model.

    The source is reduced with the destination following in all that both share, then the destination alone, until
    neither gets simpler, and no jump leads to a simpler pair. Further starts (``others``) are reduced too where there
    are any: a single one may lead to a pair that is small, and not the smallest. Raises ``ValueError`` for a pair that
    does not fail.
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
            jump = next((other for other in _jumps(pair) if _holds(fails, other)), None)
            if jump is None:
                return pair
            smaller = jump
        pair = smaller


def _jumps(pair: Pair) -> list[Pair]:
    """Return simpler pairs with some of the layers of ``pair`` under other parallel layouts, the simplest first."""
    distinct = list(dict.fromkeys(pair.source.layers))
    singles = [(layer,) for layer in (*distinct, *_LAYERS)]
    some = [pair.source.layers, *singles, *itertools.product(distinct, repeat=2)]
    found = []
    for layers, source, destination in itertools.product(dict.fromkeys(some), _LAYOUTS, _LAYOUTS):
        sides = (("source", pair.source, source), ("destination", pair.destination, destination))
        try:
            specs = {
                name: msgspec.structs.replace(spec, layers=layers, parallel=parallel, rank=0)
                for name, spec, parallel in sides
            }
            found.append(msgspec.structs.replace(pair, **_OWN, **specs))
        except SpecError:  # more stages than layers, say
            continue
    found.append(_exchanged(pair))
    held = pair_key(pair)
    return sorted((other for other in found if pair_key(other) < held), key=pair_key)


def _exchanged(pair: Pair) -> Pair:
    """Return ``pair`` with its sides in each other's place."""
    return Pair(
        source=pair.destination,
        destination=pair.source,
        source_dp=pair.destination_dp,
        destination_dp=pair.source_dp,
        source_allocator=pair.destination_allocator,
        destination_allocator=pair.source_allocator,
    )


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
