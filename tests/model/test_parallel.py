from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsan.model.errors import SpecError
from kvsan.model.parallel import (
    MAX_RANKS,
    ParallelLayout,
    RankCoordinates,
    pipeline_stages,
    rank_head_range,
    rank_heads,
)

# Names.


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("tp1", {}),
        ("tp2", {"tp": 2}),
        ("tep4", {"tp": 4, "ep": 4}),
        ("adp4", {"tp": 4, "attention_dp": True}),
        ("adp1", {"attention_dp": True}),
        ("adp4ep2", {"tp": 4, "ep": 2, "attention_dp": True}),
        ("tp4ep2", {"tp": 4, "ep": 2}),
        ("tp2pp3", {"tp": 2, "pp": 3}),
        ("tp1pp5", {"pp": 5}),
        ("tp2cp2", {"tp": 2, "cp": 2}),
        ("tep8pp2cp4", {"tp": 8, "ep": 8, "pp": 2, "cp": 4}),
        ("tp16384", {"tp": 16384}),
    ],
)
def test_names(name: str, degrees: dict[str, Any]) -> None:
    layout = ParallelLayout(**degrees)
    assert layout.name == name
    assert ParallelLayout.parse(name) == layout


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("TP4", "tp4"), (" tep4 ", "tep4"), ("pp2", "tp1pp2"), ("tep1", "tp1"), ("pp2tp4", "tp4pp2"), ("tp4ep4", "tep4")],
)
def test_other_spellings(spelling: str, name: str) -> None:
    assert ParallelLayout.parse(spelling).name == name


DEGREES = st.sampled_from([1, 2, 3, 4, 8, 16])


@given(tp=DEGREES, pp=DEGREES, cp=DEGREES, attention_dp=st.booleans(), ep=DEGREES)
def test_a_name_says_everything(tp: int, pp: int, cp: int, attention_dp: bool, ep: int) -> None:
    if tp % ep:
        with pytest.raises(SpecError, match=f"ep: found {ep}, needs a divisor of the tensor-parallel size {tp}"):
            ParallelLayout(tp=tp, pp=pp, cp=cp, ep=ep, attention_dp=attention_dp)
        return
    layout = ParallelLayout(tp=tp, pp=pp, cp=cp, ep=ep, attention_dp=attention_dp)
    assert ParallelLayout.parse(layout.name) == layout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "unknown parallel layout ''"),
        ("xx4", "unknown parallel layout 'xx4', needs a name such as tp4, tep4, adp4 or tp2pp2"),
        ("tp", "unknown parallel layout"),
        ("4", "unknown parallel layout"),
        ("tp-4", "unknown parallel layout"),
        ("tp 4", "unknown parallel layout"),
        ("tp4x", "unknown parallel layout"),
        ("tp4,pp2", "unknown parallel layout"),
        ("tp1.5", "unknown parallel layout"),
        ("tp٣", "unknown parallel layout"),
        ("tp" + "9" * 5000, "unknown parallel layout"),
        ("tp\n4", "unknown parallel layout"),
        ("tp0", "tp: found 0, needs a whole number from 1 to 16384"),
        ("tp16385", "tp: found 16385"),
        ("pp0", "pp: found 0"),
        ("tp2tp2", "gives tp twice"),
        ("pp2tp2pp3", "gives pp twice"),
        ("tp2tep2", "mixes tp, tep, adp and ep"),
        ("tp2adp2", "mixes tp, tep, adp and ep"),
        ("tep4ep2", "mixes tp, tep, adp and ep, needs one of tpN, tpNepM, tepN, adpN"),
        ("ep2", "ep: found 2, needs a divisor of the tensor-parallel size 1"),
        ("tp6ep4", "ep: found 4, needs a divisor of the tensor-parallel size 6"),
    ],
)
def test_what_is_no_name(name: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        ParallelLayout.parse(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("axis", ["tp", "pp", "ep", "cp"])
@pytest.mark.parametrize("value", [0, -1, 1.0, float("nan"), True, "2", None, [], MAX_RANKS + 1, 10**400], ids=repr)
def test_degrees_are_whole_numbers(axis: str, value: object) -> None:
    with pytest.raises(SpecError, match=f"^{axis}: found .*needs a whole number from 1 to {MAX_RANKS}$"):
        ParallelLayout(**{axis: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 1, 1.0, "yes", None, [], (), {}])
def test_attention_dp_is_true_or_false(value: object) -> None:
    """1 equals True, and would be written otherwise."""
    with pytest.raises(SpecError, match=r"^attention_dp: found .*needs "):
        ParallelLayout(attention_dp=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ((1,), "pp_partition: found 1 "),
        ((1, 1, 1), "pp_partition: found 3 "),
        ((), "pp_partition: found 0 "),
        ((0, 2), "found 0, needs a whole number from 1 to 10000"),
        ((-1, 2), "found -1, needs a whole number from 1"),
        ((1.5, 2), "found 1.5, needs a whole number from 1"),
        ((True, 2), "found True, needs a whole number from 1"),
        ((1, 10**12), "found 1000000000000, needs a whole number from 1"),
        ("11", "pp_partition"),
        (3, "pp_partition: found 3"),
        (2.5, "pp_partition: found 2.5"),
        ({1: 1, 2: 2}, "pp_partition"),
    ],
)
def test_a_bad_partition(partition: Any, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        ParallelLayout(pp=2, pp_partition=partition)
    assert words in str(caught.value)


def test_a_list_is_as_good_as_a_tuple() -> None:
    listed = ParallelLayout(pp=2, pp_partition=[3, 4])  # type: ignore[arg-type]
    assert listed == ParallelLayout(pp=2, pp_partition=(3, 4))
    assert msgspec.json.decode(msgspec.json.encode(listed), type=ParallelLayout) == listed


# Ranks.


@given(tp=st.integers(1, 5), cp=st.integers(1, 4), pp=st.integers(1, 4))
def test_ranks_are_numbered_tensor_parallel_innermost(tp: int, cp: int, pp: int) -> None:
    layout = ParallelLayout(tp=tp, cp=cp, pp=pp)
    assert layout.world_size == tp * cp * pp
    expected = [RankCoordinates(t, c, p) for p, c, t in itertools.product(range(pp), range(cp), range(tp))]
    assert [layout.coordinates(rank) for rank in range(layout.world_size)] == expected


@pytest.mark.parametrize("rank", [-1, 4, 1.0, True, None, "0", 10**30])
def test_a_rank_that_is_not_there(rank: Any) -> None:
    with pytest.raises(SpecError, match=r"^rank: found .*needs a whole number from 0 to 3$"):
        ParallelLayout(tp=2, pp=2).coordinates(rank)


def test_who_shares_heads() -> None:
    assert (ParallelLayout(tp=4, cp=2).attention_tp, ParallelLayout(tp=4, cp=2).state_tp) == (4, 8)
    whole = ParallelLayout(tp=4, cp=2, attention_dp=True)
    assert (whole.attention_tp, whole.state_tp) == (1, 1)


# Pipeline stages.


@given(layers=st.integers(1, 300), pp=st.integers(1, 40))
def test_an_even_split(layers: int, pp: int) -> None:
    if pp > layers:
        with pytest.raises(SpecError, match=f"^pp: found {pp} pipeline stages for {layers} layers"):
            pipeline_stages(layers, pp, None)
        return
    stages = pipeline_stages(layers, pp, None)
    assert list(itertools.chain(*stages)) == list(range(layers))
    each, extra = divmod(layers, pp)
    assert [len(stage) for stage in stages] == [each + 1] * extra + [each] * (pp - extra)


@given(partition=st.lists(st.integers(1, 20), min_size=1, max_size=8).map(tuple), surplus=st.integers(-5, 30))
def test_a_partition(partition: tuple[int, ...], surplus: int) -> None:
    """Layers beyond its sum go to the last stage; a sum beyond the layers is refused."""
    layers = sum(partition) + surplus
    if len(partition) > layers or surplus < 0:
        with pytest.raises(SpecError):
            pipeline_stages(layers, len(partition), partition)
        return
    stages = pipeline_stages(layers, len(partition), partition)
    assert list(itertools.chain(*stages)) == list(range(layers))
    assert [len(stage) for stage in stages] == [*partition[:-1], partition[-1] + surplus]


def test_a_partition_of_too_many_layers() -> None:
    with pytest.raises(SpecError, match=r"^pp_partition: found 8 layers in all, needs at most the model's 5$"):
        pipeline_stages(5, 2, (4, 4))


# Heads.


@given(heads=st.integers(1, 300), ranks=st.integers(1, 80))
def test_ranks_hold_all_heads_and_have_room_for_theirs(heads: int, ranks: int) -> None:
    each = rank_heads(heads, ranks)
    held = [rank_head_range(heads, ranks, rank) for rank in range(ranks)]
    assert each == -(-heads // ranks)
    assert each * ranks >= heads
    assert set(itertools.chain(*held)) == set(range(heads))
    assert all(len(part) <= each for part in held)
    assert [part.start for part in held] == sorted(part.start for part in held)


@given(heads=st.integers(1, 64), copies=st.integers(2, 8))
def test_replicas_stand_side_by_side(heads: int, copies: int) -> None:
    held = [rank_head_range(heads, heads * copies, rank) for rank in range(heads * copies)]
    assert held == [range(head, head + 1) for head in range(heads) for _ in range(copies)]


def test_padding_heads_are_the_last() -> None:
    """5 heads over 4 ranks: 2 each, the third rank keeps one spare and the last nothing but padding."""
    assert [rank_head_range(5, 4, rank) for rank in range(4)] == [range(2), range(2, 4), range(4, 5), range(5, 5)]
