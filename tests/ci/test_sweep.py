"""Sweeps: what a class says of its members is what brute force says of every point, and grids stay within bounds."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import msgspec
import pytest

from kvsan.ci.sweep import BY_SIZE, GRIDS, MAX_GEOMETRIES, MAX_POINTS, Grid, Sweep, sweep
from kvsan.model.errors import SpecError
from kvsan.model.formats import KV_FORMATS, ElementFormat
from kvsan.model.layers import INDEX_KEY, INDEX_POSITION, AttentionLayer, SidePlane
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec
from kvsan.sim.limits import limits_of
from kvsan.sim.registry import resolve
from kvsan.sim.verdict import judge

BF16, FP8, NVFP4, FP32 = ElementFormat.BF16, ElementFormat.FP8, ElementFormat.NVFP4, ElementFormat.FP32

SMALL = Grid(
    kv_formats=(BF16, NVFP4),
    heads=8,
    head_dims=(16, 24, 64),
    tokens_per_block=(1, 16),
    tp=(1, 2, 3),
    sparse_layers=(1, 2, 3),
    index_dims=(0, 8, 32, 64),
)
ODD = Grid(
    kv_formats=(FP8, FP32),
    heads=6,
    head_dims=(3, 6, 48),
    tokens_per_block=(2,),
    tp=(1, 4, 16),
    sparse_layers=(1, 2),
    index_dims=(6, 24, 96),
)

OWN = '''
from kvsan.sim.allocators.faulty.storage import allocate_canary
from kvsan.sim.allocators.trtllm.allocators import allocate_qsa_packed

def superstitious(spec):
    """Wrong for 7 heads of 24, and nowhere else, whatever the sizes are."""
    layer = spec.layers[0]
    if (layer.kv_heads, layer.head_dim, spec.tokens_per_block, spec.parallel.tp) == (7, 24, 16, 2):
        raise AssertionError
    return allocate_qsa_packed(spec)

def even(spec):
    if spec.layers[0].kv_heads % 2 == 0:
        raise AssertionError("even")
    return allocate_qsa_packed(spec)

def garbage(spec):
    return None
'''

Key = tuple[str, str, int, int, int, bool]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "swept_allocators.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "swept_allocators"
    sys.modules.pop("swept_allocators", None)


def brute_force(allocator: str, grid: Grid) -> tuple[int, Counter[Key], dict[Key, set[str]]]:
    """Judge every point; return how many there are, and counts and messages by rule and geometry on the rank."""
    points, counts, messages = 0, Counter[Key](), dict[Key, set[str]]()
    function, limits = resolve(allocator), limits_of(allocator)
    position = SidePlane(role=INDEX_POSITION, dim=3, format=ElementFormat.INT32, scope="rank")
    axes = (grid.kv_formats, range(1, grid.heads + 1), grid.head_dims, grid.tokens_per_block, grid.tp)
    for kv_format, heads, dim, tokens, tp, layers, index in product(*axes, grid.sparse_layers, grid.index_dims):
        if kv_format is NVFP4 and dim % 16:
            continue
        points += 1
        planes = (SidePlane(role=INDEX_KEY, dim=index, format=BF16), position) if index else ()
        spec = CacheSpec(
            layers=(AttentionLayer(kv_heads=heads, head_dim=dim, side_planes=planes),) * layers,
            kv_format=kv_format,
            tokens_per_block=tokens,
            parallel=ParallelLayout(tp=tp),
            sparse_algorithm="qsa" if planes else None,
            slots=2,
        )
        excused = {rule for limit in limits if limit.matches(spec) for rule in limit.rules}
        for rule in {fault.rule for fault in judge(spec, function).faults} - excused:
            key = (rule, kv_format.value, dim, -(-heads // tp), index, layers > 1)
            counts[key] += 1
            messages.setdefault(key, set()).update(
                fault.message for fault in judge(spec, function).faults if fault.rule == rule
            )
    return points, counts, messages


def classes_of(result: Sweep) -> Counter[Key]:
    found = Counter[Key]()
    for row in result.classes:
        found[row.rule, row.kv_dtype, row.head_dim, row.heads, row.index_dim, row.several_layers] += row.count
    return found


@pytest.mark.parametrize(
    ("allocator", "grid", "broken"),
    [
        ("trtllm-v2-qsa-legacy", SMALL, True),
        ("trtllm-v2-qsa-legacy", ODD, True),
        ("fault:coalesce-by-size", ODD, True),
        ("trtllm-v2-qsa-packed", SMALL, False),
        ("trtllm-v2-qsa-packed-rank-local", ODD, False),
        ("fault:bare-assert", ODD, True),
    ],
)
def test_classes_are_those_of_brute_force(allocator: str, grid: Grid, broken: bool) -> None:
    result = sweep(allocator, grid)
    points, counts, messages = brute_force(allocator, grid)
    assert result.points == points
    assert classes_of(result) == counts
    assert bool(counts) == broken
    assert result.signatures < result.judged < points >> 1
    for row in result.classes:
        key = row.rule, row.kv_dtype, row.head_dim, row.heads, row.index_dim, row.several_layers
        assert row.message in messages[key], "the message is one of this very class"


@pytest.mark.parametrize("name", ["superstitious", "even"])
def test_an_allocator_that_looks_at_more_than_sizes_is_run_on_every_point(own: str, name: str) -> None:
    result = sweep(f"{own}:{name}", SMALL)
    points, counts, _ = brute_force(f"{own}:{name}", SMALL)
    assert result.judged == result.points == points
    assert classes_of(result) == counts
    assert counts
    assert "unexplained-rejection" in {row.rule for row in result.classes}


def test_members_that_disagree_split_their_class(own: str) -> None:
    """Taken for one that looks at sizes alone, the allocator shows by its samples that it does not."""
    grid = msgspec.structs.replace(SMALL, kv_formats=(BF16,), index_dims=(0, 64), tokens_per_block=(1,))
    result = sweep(f"{own}:even", grid, by_size=True)
    _, counts, _ = brute_force(f"{own}:even", grid)
    assert classes_of(result) == counts
    assert result.judged > result.signatures * 4, "classes were split"


def test_faults_that_look_at_more_than_sizes_are_run_on_every_point() -> None:
    grid = Grid(
        kv_formats=(NVFP4,), heads=5, head_dims=(16,), tokens_per_block=(1, 4), tp=(1, 2), sparse_layers=(1,),
        index_dims=(0,),
    )  # fmt: skip
    for allocator in ("fault:block-size-from-dim1", "fault:heads-floor"):
        result = sweep(allocator, grid)
        assert result.judged == result.points == 20
        assert classes_of(result) == brute_force(allocator, grid)[1]
        assert 0 < sum(row.count for row in result.classes) < 20


def test_the_allocators_of_sizes_are_there() -> None:
    assert [resolve(name) for name in BY_SIZE]


# The published grid.


def test_the_ci_grid_has_a_million_points_and_takes_no_time() -> None:
    started = time.process_time()
    result = sweep("trtllm-v2-qsa-legacy", GRIDS["ci"])
    assert time.process_time() - started < 20
    assert result.points >= 1_000_000
    assert result.points == GRIDS["ci"].points
    assert {row.rule for row in result.classes} >= {"rejected"}
    assert sweep("trtllm-v2-qsa-packed", GRIDS["ci"]).classes == []


def test_legacy_collides_where_an_index_plane_is_as_large_as_a_k_page() -> None:
    """The published classes by their arithmetic: index dim x 16 bits = heads x dim x bits, several layers."""
    result = sweep("trtllm-v2-qsa-legacy", GRIDS["dev"])
    found = {
        (row.kv_dtype, row.heads, row.head_dim, row.index_dim)
        for row in result.classes
        if row.rule == "rejected" and row.kv_dtype != "nvfp4"
    }
    grid = GRIDS["dev"]
    heads = {-(-count // tp) for count in range(1, grid.heads + 1) for tp in grid.tp}
    wanted = {
        (kv_format.value, count, dim, index)
        for kv_format in grid.kv_formats
        for count, dim, index in product(heads, grid.head_dims, grid.index_dims)
        if kv_format is not NVFP4 and index * 16 == count * dim * kv_format.bits
    }
    assert found == wanted
    assert all(row.several_layers for row in result.classes if row.rule == "rejected" and row.kv_dtype != "nvfp4")


def test_every_named_grid_is_within_its_bounds() -> None:
    for grid in GRIDS.values():
        assert grid.points <= MAX_POINTS
        assert grid.geometries <= MAX_GEOMETRIES
        assert Grid(**{field: getattr(grid, field) for field in Grid.__struct_fields__}) == grid


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    sweep("trtllm-v2-qsa-packed", SMALL, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(1, seen[-1][1] + 1))


# Bad grids.

BAD = [
    ({"heads": 0}, "heads: found 0, needs a whole number from 1"),
    ({"heads": -1}, "heads: found -1"),
    ({"heads": 10**30}, "heads"),
    ({"heads": 1.5}, "heads"),
    ({"heads": "8"}, "heads"),
    ({"head_dims": []}, "head_dims: found no value, needs at least one"),
    ({"kv_formats": []}, "kv_formats: found no value"),
    ({"index_dims": []}, "index_dims: found no value"),
    ({"head_dims": [0]}, "head_dims: found 0"),
    ({"head_dims": [-64]}, "head_dims: found -64"),
    ({"index_dims": [-1]}, "index_dims: found -1"),
    ({"tp": [0]}, "tp: found 0"),
    ({"tokens_per_block": [1 << 17]}, "tokens_per_block: found 131072"),
    ({"sparse_layers": [10_001]}, "sparse_layers: found 10001"),
    ({"tp": [1, 2, 1]}, "tp: found a value twice"),
    ({"kv_formats": ["int32"]}, "kv_formats: found 'int32', needs one of fp32, fp16, bf16"),
    ({"kv_formats": ["fp9"]}, "fp9"),
    ({"head_dim": [64]}, "head_dim"),
    ({"heads": 1_000_000}, "sweep it in parts"),
    ({"tokens_per_block": list(range(1, 1000))}, "sweep it in parts"),
    ({"heads": 10**6, "tp": list(range(1, 1001)), "sparse_layers": list(range(1, 1001))}, "sweep it in parts"),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=[str(fields)[:40] for fields, _ in BAD])
def test_a_bad_grid_is_refused_without_building_it(fields, words) -> None:
    started = time.process_time()
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(json.dumps(fields).encode(), type=Grid)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.process_time() - started < 1


def test_all_formats_for_keys_and_values_can_be_swept() -> None:
    assert Grid(kv_formats=KV_FORMATS, heads=1).kv_formats == KV_FORMATS


def test_a_grid_without_a_point_is_refused() -> None:
    with pytest.raises(SpecError, match="no point that an element format allows"):
        sweep("trtllm-v2", Grid(kv_formats=(NVFP4,), head_dims=(24,)))


def test_an_answer_that_is_no_layout_names_the_point(own: str) -> None:
    with pytest.raises(SpecError, match=r"returned None.*1 layers of 1 x 16 bf16, 1 tokens per block, tp1"):
        sweep(f"{own}:garbage", SMALL)
