"""The coverage ledger: every spec has one answer per axis, counts add up, and gaps are named."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from kvsan.ci.ledger import AXES, PAIRS_LISTED, SavedCases, coverage_of, row_of
from kvsan.model.formats import KV_FORMATS, STATE_FORMATS
from kvsan.model.layers import RECURRENT_KINDS, HybridLayer, LatentLayer, RecurrentLayer, SidePlane, UncachedLayer
from kvsan.model.spec import AttentionLayer, CacheSpec, Consumer, Draft, ParallelLayout
from kvsan.strategies import FAMILIES, cache_specs

LAYER = AttentionLayer(kv_heads=2, head_dim=64)
WINDOW = AttentionLayer(kv_heads=2, head_dim=64, window=128)
SINKS = AttentionLayer(kv_heads=2, head_dim=64, window=128, sink_tokens=4)
LATENT = LatentLayer(latent_dim=512)
MAMBA = RecurrentLayer(algorithm="mamba2", heads=4, head_dim=64, state_dim=128, groups=1)
PLANE = SidePlane(role="index_key", dim=64, format=KV_FORMATS[2])
RANK_PLANE = SidePlane(role="qsa_index_position", dim=3, format=KV_FORMATS[2], scope="rank")


def answers(spec: CacheSpec) -> dict[str, str]:
    return dict(zip([axis.name for axis in AXES], row_of(spec), strict=True))


SPECS = [
    ({"layers": (LAYER,)}, {"layers": "attention", "tensor": "tp1", "pipeline": "pp1", "recurrent": "none"}),
    ({"layers": (LAYER,)}, {"state_format": "none", "window": "none", "side_planes": "none", "geometries": "one"}),
    ({"layers": (LAYER,), "kv_format": "nvfp4"}, {"kv_format": "nvfp4", "kv_formats": "one", "draft": "none"}),
    ({"layers": (LAYER, WINDOW)}, {"window": "some"}),
    ({"layers": (WINDOW,)}, {"window": "all"}),
    ({"layers": (LAYER, SINKS)}, {"window": "sinks"}),
    ({"layers": (LATENT, MAMBA)}, {"layers": "latent+recurrent", "recurrent": "mamba2", "state_format": "bf16"}),
    ({"layers": (HybridLayer(attention=LAYER, recurrent=MAMBA),)}, {"layers": "hybrid", "recurrent": "mamba2"}),
    ({"layers": (LAYER, MAMBA), "state_format": "fp32"}, {"layers": "attention+recurrent", "state_format": "fp32"}),
    ({"layers": (MAMBA,)}, {"layers": "recurrent", "window": "none"}),
    ({"layers": (UncachedLayer(),)}, {"layers": "uncached", "window": "none", "geometries": "one"}),
    ({"layers": (LAYER,), "parallel": ParallelLayout(tp=2)}, {"tensor": "tp", "context": "cp1"}),
    ({"layers": (LAYER,), "parallel": ParallelLayout(tp=2, ep=2)}, {"tensor": "tep"}),
    ({"layers": (LAYER,), "parallel": ParallelLayout(tp=2, attention_dp=True)}, {"tensor": "adp"}),
    ({"layers": (LAYER,) * 4, "parallel": ParallelLayout(pp=2)}, {"pipeline": "even"}),
    ({"layers": (LAYER,) * 3, "parallel": ParallelLayout(pp=2)}, {"pipeline": "uneven"}),
    ({"layers": (LAYER,) * 3, "parallel": ParallelLayout(pp=2, pp_partition=(2, 1))}, {"pipeline": "partition"}),
    ({"layers": (LAYER,), "parallel": ParallelLayout(cp=2)}, {"context": "cp"}),
    (
        {"layers": (LAYER,), "draft": Draft(mode="folded", layers=(LATENT,))},
        {"draft": "folded", "geometries": "several"},
    ),
    ({"layers": (LAYER,), "consumer": Consumer(kv_layout="NHD")}, {"kv_layout": "NHD"}),
    (
        {"layers": (LAYER, AttentionLayer(kv_heads=2, head_dim=64, kv_format=KV_FORMATS[3]))},
        {"kv_formats": "several", "geometries": "one"},
    ),
    ({"layers": (LAYER, AttentionLayer(kv_heads=4, head_dim=64))}, {"geometries": "several", "kv_formats": "one"}),
    ({"layers": (AttentionLayer(kv_heads=2, head_dim=64, side_planes=(PLANE,)),)}, {"side_planes": "per layer"}),
    (
        {"layers": (AttentionLayer(kv_heads=2, head_dim=64, side_planes=(PLANE, RANK_PLANE)),)},
        {"side_planes": "per layer and rank"},
    ),
]


@pytest.mark.parametrize(("fields", "wanted"), SPECS, ids=[str(number) for number in range(len(SPECS))])
def test_an_axis_says_what_the_spec_is(fields, wanted) -> None:
    found = answers(CacheSpec(**fields))
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_every_drawn_spec_has_a_declared_answer_on_every_axis(family: str) -> None:
    rows: Counter[tuple[str, ...]] = Counter()

    @seed(1)
    @settings(
        max_examples=500,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cache_specs(family=family))
    def draw(spec: CacheSpec) -> None:
        row = row_of(spec)
        assert [answer in axis.values for axis, answer in zip(AXES, row, strict=True)] == [True] * len(AXES), row
        rows[row] += 1

    draw()
    coverage = coverage_of(rows, Counter(), ())
    for axis in AXES:
        counts = coverage.values[axis.name]
        assert tuple(counts) == axis.values
        assert sum(counts.values()) == 500
        assert coverage.never[axis.name] == [value for value in axis.values if counts[value] == 0]
    pairs = {
        (one, row[one], other, row[other]) for row in rows for one, other in itertools.combinations(range(len(AXES)), 2)
    }
    assert coverage.pairs_seen == len(pairs)
    if family == "any":
        assert sum(len(values) for values in coverage.never.values()) <= 3, coverage.never


def test_values_are_declared_once_and_cover_the_formats() -> None:
    by_name = {axis.name: axis.values for axis in AXES}
    assert all(len(set(values)) == len(values) for values in by_name.values())
    assert set(by_name["kv_format"]) == {found.value for found in KV_FORMATS}
    assert set(by_name["state_format"]) == {found.value for found in STATE_FORMATS} | {"none"}
    assert set(by_name["recurrent"]) == {*RECURRENT_KINDS, "several", "none"}


def test_pairs_that_never_met_are_named() -> None:
    lengths = [len(axis.values) for axis in AXES]
    total = sum(one * other for one, other in itertools.combinations(lengths, 2))
    nothing = coverage_of(Counter(), Counter(), ("a class",))
    assert (nothing.pairs_seen, nothing.pairs_total) == (0, total)
    assert len(nothing.pairs_never) == PAIRS_LISTED
    assert nothing.pairs_never[0] == "kv_format=fp32 with state_format=fp32"
    assert nothing.never["draft"] == ["none", "folded", "separate"]
    row = row_of(CacheSpec(layers=(LAYER,)))
    one = coverage_of(Counter({row: 3}), Counter(), ())
    assert one.pairs_seen == len(AXES) * (len(AXES) - 1) >> 1
    assert one.values["kv_format"]["bf16"] == 3
    assert "bf16" not in one.never["kv_format"]


def test_all_but_one_pair() -> None:
    """Every pair but one: the one is named."""
    rows = Counter(
        dict.fromkeys(itertools.product(*[axis.values[:2] for axis in AXES[:2]], *[[a.values[0]] for a in AXES[2:]]), 1)
    )
    gone = tuple(axis.values[1] for axis in AXES[:2]) + tuple(axis.values[0] for axis in AXES[2:])
    whole, less = coverage_of(rows, Counter(), ()), coverage_of(rows - Counter({gone: 1}), Counter(), ())
    assert whole.pairs_seen - less.pairs_seen == 1
    assert f"kv_format={gone[0]} with state_format={gone[1]}" in less.pairs_never


def test_classes_that_were_wanted_and_never_drawn_are_named() -> None:
    classes = Counter({"a": 2})
    assert coverage_of(Counter(), classes, iter("abc")).classes_never == ["b", "c"]
    found = coverage_of(Counter(), classes, "abc", {"a", "b"})
    assert found.classes == {"a": 2, "b": 0, "c": 0}
    assert found.classes_never == ["b"]


def test_saved_cases_are_listed_in_order() -> None:
    cases = SavedCases(("b", "a"), ("b",), ("d", "c"), ("f", "e"))
    found = coverage_of(Counter(), Counter(), (), None, cases)
    assert (found.cases_run, found.cases_failing, found.cases_not_run) == (["a", "b"], ["b"], ["c", "d"])
    assert found.cases_unreadable == ["e", "f"]
