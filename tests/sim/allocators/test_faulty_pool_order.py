"""A mutated order of pools is no fault: the layout stays consistent, and only the published numbers tell it apart."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, SidePlane
from kvsan.model.spec import CacheSpec
from kvsan.sim.allocators.trtllm import manager_v2
from kvsan.sim.allocators.trtllm.storage import Storage, StorageLayer, coalesce
from kvsan.sim.checking import check
from kvsan.sim.layout import Layout
from kvsan.sim.registry import allocate

Pools = tuple[tuple[int, int], ...]
Order = Callable[[Pools], Pools]

INDEX = SidePlane(role="index_key", dim=128, format=ElementFormat.BF16)
POSITION = SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank")


def sparse_spec(kv_format: str, heads: int) -> CacheSpec:
    """The reference case's twelve sparse layers with ``heads`` KV heads of dim 256 on the rank."""
    layer = AttentionLayer(kv_heads=heads, head_dim=256, side_planes=(INDEX, POSITION))
    return CacheSpec(layers=(layer,) * 12, kv_format=ElementFormat(kv_format))


GOLDEN = {
    ("bf16", 2): ((32768, 24), (8192, 12), (384, 1)),
    ("bf16", 1): ((16384, 24), (8192, 12), (384, 1)),
    ("fp8", 2): ((16384, 24), (8192, 12), (384, 1)),
    ("nvfp4", 1): ((4096, 24), (8192, 12), (512, 24), (384, 1)),
}
"""The published pools of the reference case: (page bytes, pages per slot), largest slot first, ties as registered."""
TIE = ("nvfp4", 1)
"""24 K/V pages of 4,096 B and 12 index pages of 8,192 B: 98,304 B each."""


def pools_of(layout: Layout) -> Pools:
    """Return (page bytes, pages per slot) of each pool."""
    found: list[tuple[int, int]] = []
    for index, pool in enumerate(layout.pools):
        page = next(buffer.page_bytes for buffer in layout.buffers if buffer.pool == index)
        found.append((page, pool.slot_bytes // page))
    return tuple(found)


def reordered(order: Order) -> Callable[[list[StorageLayer]], Storage]:
    """Return ``coalesce`` with the pools of every life cycle in another order."""

    def mutated(layers: list[StorageLayer]) -> Storage:
        storage = coalesce(layers)
        cycles = tuple([msgspec.structs.replace(cycle, pools=order(cycle.pools)) for cycle in storage.life_cycles])
        placements = []
        for place in storage.placements:
            size = place.registration.size_bytes
            sizes = [page for page, _ in cycles[place.life_cycle].pools]
            placements.append(msgspec.structs.replace(place, pool=sizes.index(size)))
        groups = tuple(dict.fromkeys(cycle.slot_sizes for cycle in cycles))
        return msgspec.structs.replace(storage, life_cycles=cycles, groups=groups, placements=tuple(placements))

    return mutated


def ascending(pools: Pools) -> Pools:
    return tuple(sorted(pools, key=lambda pool: pool[0] * pool[1]))


def ties_reversed(pools: Pools) -> Pools:
    backwards = pools[::-1]
    return tuple(sorted(backwards, key=lambda pool: pool[0] * pool[1], reverse=True))


def as_it_is(pools: Pools) -> Pools:
    return pools


MUTANTS: dict[str, tuple[Order, set[tuple[str, int]]]] = {
    "as it is": (as_it_is, set()),
    "ascending": (ascending, set(GOLDEN)),
    "unstable": (ties_reversed, {TIE}),
}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_pools_are_in_the_published_order(case: tuple[str, int]) -> None:
    assert pools_of(allocate(sparse_spec(*case), "trtllm-v2-qsa-legacy")) == GOLDEN[case]


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_a_mutated_order_is_caught_by_the_published_one_alone(
    mutant: str, case: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    order, caught = MUTANTS[mutant]
    sound = allocate(sparse_spec(*case), "trtllm-v2-qsa-legacy")
    monkeypatch.setattr(manager_v2, "coalesce", reordered(order))
    layout = allocate(sparse_spec(*case), "trtllm-v2-qsa-legacy")
    assert check(layout) == []
    assert (pools_of(layout) != GOLDEN[case]) == (case in caught)
    assert (layout != sound) == (case in caught)
