"""``reduce_pair``: a failing pair made small, with the reducer of specs on one side after the other.

No move of one side turns the pair around, or splits stages on the one instead of the other, and few lead from one kind
of layer to another: so every two of a few layouts are tried as well, the two sides in each other's place, and models of
a single layer of each kind.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
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

_OWN: dict[str, Any] = {"source_dp": 0, "destination_dp": 0, "source_allocator": None, "destination_allocator": None}
"""What a pair has beside its specs, at its simplest."""
_LAYOUTS: Final = (ParallelLayout(), ParallelLayout(tp=2), ParallelLayout(tp=4), ParallelLayout(pp=2))
"""Layouts that are tried on both sides, beside the pair's own."""
_STATES: Final = [
    RecurrentLayer(
        algorithm="gdn", heads=heads, head_dim=1, groups=heads, state_dim=1, conv_kernel=2, ssm_format=format
    )
    for heads in (1, 2)
    for format in (None, ElementFormat.FP32)
]
_LAYERS: Final = (AttentionLayer(kv_heads=1, head_dim=128), LatentLayer(latent_dim=128), *_STATES)
"""Layers that are tried as the whole model."""
MAX_TRIED_LAYERS: Final = 64
"""Layers up to which they are tried."""


def reduce_pair(pair: Pair, fails: Callable[[Pair], bool], *others: Pair, max_checks: int = 5_000) -> Pair:
    """Return the simplest pair reached from ``pair`` for which ``fails`` is true; both sides keep one model.

    The source is reduced with the destination following in all that both share, then the destination alone, then both
    are laid out anew, until none of it makes the pair simpler. Further starts (``others``) are reduced too where there
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
        smaller = next((found for found in _followers(pair, source) if _holds(fails, found)), pair)
        destination = reduce_spec(
            smaller.destination, partial(_destination_fails, fails, smaller), max_checks=max_checks
        ).spec
        smaller = msgspec.structs.replace(smaller, destination=destination)
        smaller = _laid_out_anew(smaller, fails)
        if pair_key(smaller) >= pair_key(pair):
            return pair
        pair = smaller


def _laid_out_anew(pair: Pair, fails: Callable[[Pair], bool]) -> Pair:
    """Return the simplest failing pair under any two layouts, turned around, or of one layer; else ``pair``."""
    if len(pair.source.layers) > MAX_TRIED_LAYERS:
        return pair
    own = pair.source.parallel, pair.destination.parallel
    even = [msgspec.structs.replace(layout, pp_partition=None) for layout in own]
    candidates = [_turned(pair)]
    for one, other in itertools.product(dict.fromkeys((*own, *even, *_LAYOUTS)), repeat=2):
        with contextlib.suppress(SpecError):  # more stages than layers, or no such attention-DP rank
            source = msgspec.structs.replace(pair.source, parallel=one)
            destination = msgspec.structs.replace(pair.destination, parallel=other)
            candidates.append(msgspec.structs.replace(pair, source=source, destination=destination))
    for layer in _LAYERS:
        with contextlib.suppress(SpecError):
            candidates += _followers(pair, msgspec.structs.replace(pair.source, layers=(layer,)))
    simpler = sorted([entry for entry in candidates if pair_key(entry) < pair_key(pair)], key=pair_key)
    return next((entry for entry in simpler if _holds(fails, entry)), pair)


def _turned(pair: Pair) -> Pair:
    """Return ``pair`` with its sides in each other's place."""
    fields = ("", "_dp", "_allocator")
    turned = {f"source{field}": getattr(pair, f"destination{field}") for field in fields}
    turned |= {f"destination{field}": getattr(pair, f"source{field}") for field in fields}
    return msgspec.structs.replace(pair, **turned)


def _holds(fails: Callable[[Pair], bool], pair: Pair) -> bool:
    try:
        return fails(pair)
    except SpecError:
        return False


def _source_fails(fails: Callable[[Pair], bool], pair: Pair, source: CacheSpec) -> bool:
    return any(_holds(fails, followed) for followed in _followers(pair, source))


def _destination_fails(fails: Callable[[Pair], bool], pair: Pair, destination: CacheSpec) -> bool:
    if destination.layers != pair.source.layers:
        return False
    return _holds(fails, msgspec.structs.replace(pair, destination=destination))


def _followers(pair: Pair, source: CacheSpec) -> Iterator[Pair]:
    """Yield ``pair`` with another source, and the destination changed alike in all that both had in common.

    A split of the destination's own that no longer suits its layers becomes an even one. Nothing is yielded where it
    cannot follow: more stages than layers.
    """
    old, other = pair.source, pair.destination
    shared = {
        field: getattr(source, field)
        for field in CacheSpec.__struct_fields__
        if getattr(old, field) == getattr(other, field) and field != "rank"
    }
    shared["layers"] = source.layers
    parallels = [shared.get("parallel", other.parallel)]
    if len(source.layers) != len(old.layers) and parallels[0].pp_partition is not None:
        parallels.append(msgspec.structs.replace(parallels[0], pp_partition=None))
    for parallel in parallels:
        with contextlib.suppress(SpecError):
            destination = msgspec.structs.replace(other, **shared | {"parallel": parallel})
            yield msgspec.structs.replace(pair, source=source, destination=destination)
