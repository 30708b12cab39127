"""Coverage ledger: which values of which axes, and which pairs of them, a campaign has exercised.

An axis is a question about a spec with a fixed list of answers. Every example adds one row of answers; counts of values
and of pairs follow from the rows. What was never exercised is what a reader wants to see, so that is listed by name.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Final

import msgspec

from ..model.formats import KV_FORMATS, STATE_FORMATS
from ..model.layers import RECURRENT_KINDS, AttentionLayer, HybridLayer, LatentLayer, Layer, RecurrentLayer
from ..model.parallel import pipeline_stages
from ..model.spec import CacheSpec

Row = tuple[str, ...]


class Axis(msgspec.Struct, frozen=True):
    """A question about a spec, its possible answers, and what answers it from the spec and its distinct layers."""

    name: str
    values: tuple[str, ...]
    answer: Callable[[CacheSpec, tuple[Layer, ...]], str]


def _tensor(spec: CacheSpec, _: tuple[Layer, ...]) -> str:
    parallel = spec.parallel
    if parallel.tp == 1:
        return "tp1"
    return "adp" if parallel.attention_dp else "tep" if parallel.ep == parallel.tp else "tp"


def _pipeline(spec: CacheSpec, _: tuple[Layer, ...]) -> str:
    parallel = spec.parallel
    if parallel.pp == 1:
        return "pp1"
    if parallel.pp_partition is not None:
        return "partition"
    stages = pipeline_stages(len(spec.layers), parallel.pp, None)
    return "even" if len(stages[0]) == len(stages[-1]) else "uneven"


def _kinds(_: CacheSpec, layers: tuple[Layer, ...]) -> str:
    if any(isinstance(layer, HybridLayer) for layer in layers):
        return "hybrid"
    paged = "latent" if any(isinstance(layer, LatentLayer) for layer in layers) else ""
    paged = "attention" if any(isinstance(layer, AttentionLayer) for layer in layers) else paged
    recurrent = "recurrent" if any(isinstance(layer, RecurrentLayer) for layer in layers) else ""
    return "+".join(filter(None, (paged, recurrent))) or "uncached"


def _recurrent(_: CacheSpec, layers: tuple[Layer, ...]) -> str:
    found = {layer.algorithm for layer in layers if isinstance(layer, RecurrentLayer)}
    found |= {layer.recurrent.algorithm for layer in layers if isinstance(layer, HybridLayer)}
    return "none" if not found else found.pop() if len(found) == 1 else "several"


def _paged(layers: tuple[Layer, ...]) -> list[AttentionLayer | LatentLayer]:
    halves = [layer.attention if isinstance(layer, HybridLayer) else layer for layer in layers]
    return [layer for layer in halves if isinstance(layer, AttentionLayer | LatentLayer)]


def _window(_: CacheSpec, layers: tuple[Layer, ...]) -> str:
    windows = {(layer.window is not None, bool(layer.sink_tokens)) for layer in _paged(layers)}
    if (True, True) in windows:
        return "sinks"
    return "none" if windows <= {(False, False)} else "all" if (False, False) not in windows else "some"


def _planes(_: CacheSpec, layers: tuple[Layer, ...]) -> str:
    planes = [plane for layer in _paged(layers) for plane in layer.side_planes]
    if not planes:
        return "none"
    return "per layer and rank" if any(plane.scope == "rank" for plane in planes) else "per layer"


def _state(spec: CacheSpec, layers: tuple[Layer, ...]) -> str:
    return "none" if _recurrent(spec, layers) == "none" else spec.state_format.value


def _formats(spec: CacheSpec, layers: tuple[Layer, ...]) -> str:
    return "one" if len({layer.kv_format or spec.kv_format for layer in _paged(layers)}) < 2 else "several"


def _geometries(_: CacheSpec, layers: tuple[Layer, ...]) -> str:
    sizes = {
        (layer.kv_heads, layer.head_dim) if isinstance(layer, AttentionLayer) else layer.row_dim
        for layer in _paged(layers)
    }
    return "one" if len(sizes) < 2 else "several"


AXES: Final = (
    Axis("kv_format", tuple(f.value for f in KV_FORMATS), lambda spec, _: spec.kv_format.value),
    Axis("state_format", (*(f.value for f in STATE_FORMATS), "none"), _state),
    Axis("tensor", ("tp1", "tp", "tep", "adp"), _tensor),
    Axis("pipeline", ("pp1", "even", "uneven", "partition"), _pipeline),
    Axis("context", ("cp1", "cp"), lambda spec, _: "cp1" if spec.parallel.cp == 1 else "cp"),
    Axis("draft", ("none", "folded", "separate"), lambda spec, _: spec.draft.mode),
    Axis(
        "layers",
        ("attention", "latent", "recurrent", "attention+recurrent", "latent+recurrent", "hybrid", "uncached"),
        _kinds,
    ),
    Axis("recurrent", (*RECURRENT_KINDS, "several", "none"), _recurrent),
    Axis("window", ("none", "some", "all", "sinks"), _window),
    Axis("side_planes", ("none", "per layer", "per layer and rank"), _planes),
    Axis("kv_formats", ("one", "several"), _formats),
    Axis("geometries", ("one", "several"), _geometries),
    Axis("kv_layout", ("HND", "NHD"), lambda spec, _: spec.consumer.kv_layout),
)


def row_of(spec: CacheSpec) -> Row:
    """Return the answers of ``spec`` on every axis, in the order of ``AXES``."""
    layers = tuple(dict.fromkeys(spec.layers + spec.draft.layers))
    return tuple([axis.answer(spec, layers) for axis in AXES])


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger for a reader: counts by axis and value, pairs seen out of all, values never seen, classes, saved cases.

    ``classes_never`` are those that the campaign was to draw and never did. Of the saved cases in the campaign's folder
    ``cases_run`` were judged again, ``cases_failing`` are those among them that still break a rule, and
    ``cases_not_run`` name another allocator; ``cases_unreadable`` are files that are no case of a version known here.
    """

    values: dict[str, dict[str, int]]
    never: dict[str, list[str]]
    pairs_seen: int
    pairs_total: int
    pairs_never: list[str]
    classes: dict[str, int]
    classes_never: list[str]
    cases_run: list[str] = []
    cases_failing: list[str] = []
    cases_not_run: list[str] = []
    cases_unreadable: list[str] = []


class SavedCases(msgspec.Struct, frozen=True):
    """The file names of the saved cases that a campaign judged again, and of those of them that failed.

    ``not_run`` are those of other allocators, ``unreadable`` the files that are no case of a version known here.
    """

    run: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


_NO_CASES: Final = SavedCases()

PAIRS_LISTED: Final = 50
"""Pairs that were never exercised and are listed by name; the rest is in the count."""


def coverage_of(
    rows: Counter[Row],
    classes: Counter[str],
    known_classes: Iterable[str],
    wanted_classes: Container[str] | None = None,
    cases: SavedCases = _NO_CASES,
) -> Coverage:
    """Return the coverage that ``rows`` of answers and counts of ``classes`` amount to.

    ``wanted_classes`` are those that should have been drawn (None: all of ``known_classes``).
    """
    known_classes = tuple(known_classes)
    values: dict[str, dict[str, int]] = {}
    for index, axis in enumerate(AXES):
        counts: Counter[str] = Counter()
        for row, times in rows.items():
            counts[row[index]] += times
        values[axis.name] = {value: counts[value] for value in axis.values}
    seen = {
        (one, row[one], other, row[other]) for row in rows for one, other in itertools.combinations(range(len(AXES)), 2)
    }
    every = [
        (one, left, other, right)
        for one, other in itertools.combinations(range(len(AXES)), 2)
        for left in AXES[one].values
        for right in AXES[other].values
    ]
    missing = [pair for pair in every if pair not in seen]
    return Coverage(
        values=values,
        never={name: [value for value, times in counts.items() if not times] for name, counts in values.items()},
        pairs_seen=len(every) - len(missing),
        pairs_total=len(every),
        pairs_never=[
            f"{AXES[one].name}={left} with {AXES[other].name}={right}"
            for one, left, other, right in missing[:PAIRS_LISTED]
        ],
        classes={name: classes[name] for name in known_classes},
        classes_never=[
            name for name in known_classes if not classes[name] and (wanted_classes is None or name in wanted_classes)
        ],
        cases_run=sorted(cases.run),
        cases_failing=sorted(cases.failing),
        cases_not_run=sorted(cases.not_run),
        cases_unreadable=sorted(cases.unreadable),
    )
