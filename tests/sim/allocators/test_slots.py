"""Slots from a byte quota, against an independent computation in whole numbers and fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, Layer, RecurrentLayer
from kvsan.model.spec import CacheSpec, Draft
from kvsan.sim.allocators.trtllm.slots import grain_bytes, grains_to_slots, slots_to_grains
from kvsan.sim.checking import check
from kvsan.sim.layout import Layout
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected

MIB, GIB = 1 << 20, 1 << 30


class Overcommitted(Exception):
    """The proportional split hands out more chunks than there are."""


def chunks(slots: int, sizes: tuple[int, ...], grain: int) -> int:
    return sum(-(-slots * size // grain) for size in sizes)


def fill(budget: int, sizes: tuple[int, ...], grain: int) -> int:
    """Return the slots of one group in ``budget`` chunks, found by counting up."""
    if budget < chunks(1, sizes, grain):
        return 0
    left, total = budget, Fraction(sum(sizes))
    slots = None
    for size in sorted(sizes):
        share = max(-(-size // grain), round(left * size / total))
        slots = share * grain // size if slots is None else min(slots, share * grain // size)
        left, total = left - share, total - size
    if left:
        raise Overcommitted
    assert slots is not None
    while chunks(slots + 1, sizes, grain) <= budget:
        slots += 1
    return slots


def split(groups: list[tuple[int, ...]], weights: list[int], least: list[int], quota: int, grain: int) -> list[int]:
    """Return the slots of each group, as the engine's text describes the split; groups at their least come first."""
    budget = quota // grain
    fixed: dict[int, int] = {}
    while True:
        open_groups = sorted((at for at in range(len(groups)) if at not in fixed), key=lambda at: weights[at])
        left, weight, slots = budget, sum(weights[at] for at in open_groups), dict(fixed)
        for at in open_groups:
            slots[at] = fill(round(Fraction(left * weights[at], weight)), groups[at], grain)
            left -= chunks(slots[at], groups[at], grain)
            weight -= weights[at]
        poor = [at for at in open_groups if slots[at] <= least[at]]
        for at in poor:
            fixed[at] = fill(chunks(least[at], groups[at], grain), groups[at], grain)
            budget -= chunks(fixed[at], groups[at], grain)
        if not poor or len(fixed) == len(groups):
            slots |= fixed
            break
        assert budget > 0
    for at, sizes in enumerate(groups):
        while chunks(slots[at] + 1, sizes, grain) <= chunks(slots[at], sizes, grain):
            slots[at] += 1
    return [slots[at] for at in range(len(groups))]


def groups_of(layout: Layout) -> list[tuple[int, ...]]:
    count = 1 + max(pool.group for pool in layout.pools)
    return [tuple(pool.slot_bytes for pool in layout.pools if pool.group == group) for group in range(count)]


def weights_of(layout: Layout, tokens: int) -> list[int]:
    """Return the bytes of the default batch in each group: one request of 2049 tokens with 2048 of them in the past."""
    groups = groups_of(layout)
    weights = [0] * len(groups)
    for cycle in layout.life_cycles:
        blocks = 1
        if not cycle.recurrent:
            blocks = -(-2049 // tokens)
            if cycle.window is not None:
                start = min(-(-2048 // tokens), cycle.sink_blocks)
                blocks -= max(start, (2049 - cycle.window) // tokens) - start
        weights[cycle.group] += max(1, blocks) * sum(groups[cycle.group])
    return weights


@pytest.mark.parametrize(
    ("quota", "grain"),
    [
        (1, 2),
        (2 * GIB - 1, 2),
        (2 * GIB, 4),
        (4 * GIB - 1, 4),
        (4 * GIB, 8),
        (8 * GIB - 1, 8),
        (8 * GIB, 16),
        (16 * GIB - 1, 16),
        (16 * GIB, 32),
        (1024 * GIB, 32),
    ],
)
def test_chunks_grow_with_the_quota(quota: int, grain: int) -> None:
    assert grain_bytes(quota) == grain * MIB


def test_one_pool_takes_the_whole_quota() -> None:
    """Slots of 131072 B: 16 fit a chunk of 2 MiB; a part of a chunk is not mapped."""
    layer = AttentionLayer(kv_heads=8, head_dim=128)
    for quota, slots in ((2 * MIB, 16), (4 * MIB - 1, 16), (4 * MIB, 32), (GIB, 8192), (2 * GIB, 16384)):
        layout = allocate(CacheSpec(layers=(layer,), slots=None, quota_bytes=quota), "trtllm-v2")
        assert layout.pools[0].slot_count == slots


def test_pools_of_a_group_have_equally_many_slots() -> None:
    """The scale pool takes an eighth of the data pool's bytes, in chunks of its own."""
    layer = AttentionLayer(kv_heads=8, head_dim=128)
    spec = CacheSpec(layers=(layer,), kv_format=ElementFormat.NVFP4, slots=None, quota_bytes=18 * MIB)
    layout = allocate(spec, "trtllm-v2")
    assert [pool.slot_bytes for pool in layout.pools] == [32768, 4096]
    assert [pool.slot_count for pool in layout.pools] == [512, 512]  # 8 chunks and 1: all of the quota


LAYERS: list[Layer] = [
    AttentionLayer(kv_heads=8, head_dim=128),
    AttentionLayer(kv_heads=2, head_dim=256),
    AttentionLayer(kv_heads=8, head_dim=128, window=512),
    AttentionLayer(kv_heads=3, head_dim=80, window=1024, sink_tokens=64),
    AttentionLayer(kv_heads=1, head_dim=64, window=4096),
    RecurrentLayer(algorithm="gdn", heads=32, head_dim=128, groups=16, state_dim=128),
    RecurrentLayer(algorithm="short_conv", heads=2048),
]


@settings(max_examples=60)
@given(
    layers=st.integers(1, 12).flatmap(lambda count: st.tuples(*[st.sampled_from(LAYERS)] * count)),
    quota=st.integers(1, 3 << 12).map(lambda count: count * MIB // 2 + 1),
    tokens=st.sampled_from([8, 32, 128]),
)
def test_the_split_of_a_quota(layers: tuple[Layer, ...], quota: int, tokens: int) -> None:
    spec = CacheSpec(layers=layers, tokens_per_block=tokens, slots=None, quota_bytes=quota)
    grain = grain_bytes(quota)
    given = allocate(CacheSpec(layers=layers, tokens_per_block=tokens), "trtllm-v2")
    groups = groups_of(given)
    least = [sum(cycle.group == at for cycle in given.life_cycles) for at in range(len(groups))]
    needed = sum(chunks(count, sizes, grain) for count, sizes in zip(least, groups, strict=True))
    if quota // grain < needed:
        with pytest.raises(Rejected) as caught:
            allocate(spec, "trtllm-v2")
        assert not caught.value.supported
        assert caught.value.remedy == f"give a quota of at least {needed * grain} B"
        return
    try:
        expected = split(groups, weights_of(given, tokens), least, quota, grain)
    except Overcommitted:
        with pytest.raises(Rejected, match="hands out"):
            allocate(spec, "trtllm-v2")
        return
    layout = allocate(spec, "trtllm-v2")
    slots = [next(pool.slot_count for pool in layout.pools if pool.group == at) for at in range(len(groups))]
    assert slots == expected
    mapped = [chunks(count, sizes, grain) for count, sizes in zip(slots, groups, strict=True)]
    assert sum(mapped) * grain <= quota
    assert all(count >= minimum for count, minimum in zip(slots, least, strict=True))
    assert all(chunks(n + 1, sizes, grain) > used for n, sizes, used in zip(slots, groups, mapped, strict=True))
    assert all(pool.size_bytes == pool.slot_count * pool.slot_bytes for pool in layout.pools)
    assert not any(finding.rule == "budget" for finding in check(layout))


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=4).map(tuple),
    budget=st.integers(0, 300),
)
def test_the_most_slots_in_a_number_of_chunks(sizes: tuple[int, ...], budget: int) -> None:
    grain = 2 * MIB
    try:
        slots, used = grains_to_slots(budget, sizes, grain)
    except Rejected as error:
        with pytest.raises(Overcommitted):
            fill(budget, sizes, grain)
        assert str(budget) in error.message
        return
    assert used == chunks(slots, sizes, grain) == slots_to_grains(slots, sizes, grain)
    assert used <= budget
    assert chunks(slots + 1, sizes, grain) > budget


def test_no_hazard_while_slots_are_smaller_than_a_chunk() -> None:
    for budget in range(3, 60):
        for sizes in ((MIB, MIB, MIB), (7, MIB, 2 * MIB), (3, 5, 2 * MIB)):
            assert grains_to_slots(budget, sizes, 2 * MIB)[0] >= 1


def test_a_tight_quota_may_overcommit_and_says_so() -> None:
    """Slots of 1, 1.01 and 1.01 chunks need 1 + 2 + 2 chunks, and rounding the shares of 5 hands out 2 + 2 + 2.

    Pages of 64 tokens x 8192, 8274 and twice 4137 bf16: the last two pools have equal slots of different pages.
    """
    layers = tuple(AttentionLayer(kv_heads=1, head_dim=dim) for dim in (8192, 8274, 4137, 4137))
    sizes = (2 * MIB, 2118144, 2118144)
    with pytest.raises(Overcommitted):
        fill(5, sizes, 2 * MIB)
    with pytest.raises(Rejected) as caught:
        allocate(CacheSpec(layers=layers, tokens_per_block=64, slots=None, quota_bytes=10 * MIB), "trtllm-v2")
    assert caught.value.rule == "rejected"
    assert caught.value.message == (
        "splitting 5 chunks of 2097152 B over pools with slots of 2118144, 2118144, 2097152 B hands out 6 chunks"
    )
    assert caught.value.remedy == "give a quota that leaves every pool more than one chunk per slot"
    layout = allocate(CacheSpec(layers=layers, tokens_per_block=64, slots=None, quota_bytes=64 * MIB), "trtllm-v2")
    assert {pool.slot_count for pool in layout.pools} == {fill(32, sizes, 2 * MIB)}


def test_life_cycles_of_one_group_have_a_slot_each() -> None:
    """Two windows of one geometry share slots: at least two, so the least quota is that of two."""
    layers = tuple(AttentionLayer(kv_heads=32, head_dim=256, window=window) for window in (None, 128))
    spec = CacheSpec(layers=layers, slots=None, quota_bytes=4 * MIB)  # slots of 1 MiB
    layout = allocate(spec, "trtllm-v2")
    assert [(pool.group, pool.slot_bytes, pool.slot_count) for pool in layout.pools] == [(0, MIB, 4)]
    big = CacheSpec(layers=layers, tokens_per_block=64, slots=None, quota_bytes=4 * MIB)  # slots of 2 MiB
    assert allocate(big, "trtllm-v2").pools[0].slot_count == 2
    with pytest.raises(Rejected, match="holds 1 chunks of 2097152 B, but one slot per life cycle needs 2"):
        allocate(CacheSpec(layers=layers, tokens_per_block=64, slots=None, quota_bytes=4 * MIB - 1), "trtllm-v2")


def test_managers_share_the_quota_by_their_bytes_per_block() -> None:
    layer = AttentionLayer(kv_heads=8, head_dim=128)
    spec = CacheSpec(
        layers=(layer,) * 3, draft=Draft(mode="separate", layers=(layer,)), slots=None, quota_bytes=64 * MIB
    )
    layout = allocate(spec, "trtllm-v2")
    assert [(pool.manager, pool.size_bytes) for pool in layout.pools] == [("target", 48 * MIB), ("draft", 16 * MIB)]


@settings(max_examples=40)
@given(
    layers=st.integers(1, 8).flatmap(lambda count: st.tuples(*[st.sampled_from(LAYERS[2:3] + LAYERS[4:5])] * count)),
    quota=st.integers(1, 1 << 32),
)
def test_v1_shares_the_quota_over_windows(layers: tuple[Layer, ...], quota: int) -> None:
    """Every window gets its part, and all of them together stay inside the quota."""
    spec = CacheSpec(layers=layers, slots=None, quota_bytes=quota)
    try:
        layout = allocate(spec, "trtllm-v1")
    except Rejected as error:
        assert not error.supported
        assert quota < 1 << 26
        return
    assert sum(pool.size_bytes for pool in layout.pools) <= quota
    assert all(pool.slot_count >= 1 for pool in layout.pools)
    assert check(layout) == []


def test_slots_that_are_given_are_taken() -> None:
    layers = (LAYERS[0], LAYERS[2], LAYERS[5])
    for allocator in ("trtllm-v1", "trtllm-v2"):
        layout = allocate(CacheSpec(layers=layers, slots=7, state_slots=3), allocator)
        recurrent = {cycle.group for cycle in layout.life_cycles if cycle.recurrent}
        assert {(pool.group in recurrent, pool.slot_count) for pool in layout.pools} == {(True, 3), (False, 7)}
        layout = allocate(CacheSpec(layers=layers, slots=7), allocator)
        assert {pool.slot_count for pool in layout.pools} == {7}
