from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvsan.model.layers import AttentionLayer, Layer, RecurrentLayer, UncachedLayer
from kvsan.model.parallel import ParallelLayout
from kvsan.model.rank import manager_layers, model_layers, stage_layers
from kvsan.model.spec import CacheSpec, Draft

DENSE = AttentionLayer(kv_heads=2, head_dim=64)
DRAFT = AttentionLayer(kv_heads=1, head_dim=64)
GDN = RecurrentLayer(algorithm="gdn", heads=8, groups=4, state_dim=16)
KINDS: list[Layer] = [DENSE, GDN, UncachedLayer()]


def spec(layers: tuple[Layer, ...], pp: int, rank: int, mode: str = "none") -> CacheSpec:
    draft = Draft(mode=mode, layers=(DRAFT, DRAFT)) if mode != "none" else Draft()  # type: ignore[arg-type]
    return CacheSpec(layers=layers, parallel=ParallelLayout(pp=pp), rank=rank, draft=draft)


@given(
    layers=st.integers(1, 20).flatmap(lambda count: st.tuples(*[st.sampled_from(KINDS)] * count)),
    pp=st.integers(1, 5),
    mode=st.sampled_from(["none", "folded", "separate"]),
)
def test_ranks_partition_the_cached_layers(layers: tuple[Layer, ...], pp: int, mode: str) -> None:
    """Local numbers are dense from 0 on each rank and in each manager; draft layers are on the last stage alone."""
    pp = min(pp, len(layers))
    seen: dict[str, list[int]] = {"target": [], "draft": []}
    for rank in range(pp):
        managers = manager_layers(spec(layers, pp, rank, mode))
        assert [manager.name for manager in managers] == ["target", "draft"][
            : 1 + (mode == "separate" and rank == pp - 1)
        ]
        for manager in managers:
            assert [layer.local_index for layer in manager.layers] == list(range(len(manager.layers)))
            seen[manager.name] += [layer.index for layer in manager.layers]
            everything = (*layers, DRAFT, DRAFT)
            assert all(layer.layer is everything[layer.index] for layer in manager.layers)
    cached = [index for index, layer in enumerate(layers) if not isinstance(layer, UncachedLayer)]
    drafts = [len(layers), len(layers) + 1]
    assert seen == {
        "target": cached + (drafts if mode == "folded" else []),
        "draft": drafts if mode == "separate" else [],
    }


def test_uncached_layers_count_in_the_partition() -> None:
    layers = (UncachedLayer(), UncachedLayer(), DENSE, DENSE)
    assert [len(manager_layers(spec(layers, 2, rank))[0].layers) for rank in (0, 1)] == [0, 2]
    assert stage_layers(spec(layers, 2, 0)) == (range(2), range(2, 4))


def test_tensor_parallel_ranks_of_a_stage_hold_the_same_layers() -> None:
    parallel = ParallelLayout(tp=2, cp=2, pp=2)
    held = [
        [
            layer.index
            for layer in manager_layers(CacheSpec(layers=(DENSE,) * 5, parallel=parallel, rank=rank))[0].layers
        ]
        for rank in range(8)
    ]
    assert list(itertools.chain(*held[:4])) == [0, 1, 2] * 4
    assert list(itertools.chain(*held[4:])) == [3, 4] * 4


def test_layers_of_a_manager_over_all_ranks() -> None:
    for mode, target, draft in (("none", (DENSE,), ()), ("folded", (DENSE, DRAFT, DRAFT), (DRAFT, DRAFT)),
                                ("separate", (DENSE,), (DRAFT, DRAFT))):  # fmt: skip
        made = spec((DENSE,), 1, 0, mode)
        assert model_layers(made, "target") == target
        assert model_layers(made, "draft") == draft
