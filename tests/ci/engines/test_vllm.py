"""The installed vLLM through the adapter: its printed numbers, its model byte for byte, and the ledger of findings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvsan.ci.bench.engines import measure
from kvsan.ci.cases import encode_case, load_case
from kvsan.ci.engines.differential import run_differential
from kvsan.ci.engines.supervisor import EngineProcess
from kvsan.ci.engines.vllm import EARLY, ORDERS, VllmAllocator
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, LatentLayer, Layer, RecurrentLayer, SidePlane
from kvsan.model.spec import CacheSpec, Consumer, decode_spec
from kvsan.sim.checking import check
from kvsan.sim.engines.limits import LIMITS, Entry
from kvsan.sim.layout import Layout
from kvsan.sim.limits import faults_outside_limits, limits_of
from kvsan.sim.rejection import Rejected
from kvsan.sim.verdict import judge

CASES = Path(__file__).parents[3] / "examples" / "cases" / "engines"
LATE = tuple(ORDERS)
AGREEING = 60
"""Specs that engine and model are compared on here; ``kvsan.ci.engines.differential`` takes any number."""

Engine = Callable[[str], VllmAllocator]


@pytest.fixture
def vllm(vllm_process: EngineProcess) -> Engine:
    """Return a maker of allocators of the installed engine."""
    return lambda name: VllmAllocator(name, vllm_process)


def late(vllm: Engine, name: str) -> VllmAllocator:
    """Return an allocator of era 3, or skip."""
    allocator = vllm(name)
    if allocator.era != 3:
        pytest.skip(f"needs vLLM 0.30 or newer, found {allocator.engine()}")
    return allocator


def every_sixth(full: Layer, other: Layer, count: int) -> tuple[Layer, ...]:
    return tuple(full if index % 6 == 5 else other for index in range(count))


NHD = Consumer(kv_layout="NHD")
FULL = AttentionLayer(kv_heads=8, head_dim=128)
MAMBA = RecurrentLayer(
    algorithm="mamba2", heads=128, head_dim=64, state_dim=128, groups=1, conv_kernel=4, ssm_format=ElementFormat.FP32
)
DENSE = CacheSpec(layers=(FULL,) * 32, tokens_per_block=16, slots=None, quota_bytes=(1 << 30) + 12345, consumer=NHD)
HYBRID = msgspec.structs.replace(DENSE, layers=every_sixth(FULL, MAMBA, 48), quota_bytes=3203399680 + 34078719)
WINDOWS = msgspec.structs.replace(
    DENSE,
    layers=every_sixth(FULL, AttentionLayer(kv_heads=8, head_dim=128, window=1024), 48),
    quota_bytes=None,
    slots=4096,
)
UNEQUAL = msgspec.structs.replace(
    WINDOWS,
    slots=8192,
    layers=every_sixth(
        AttentionLayer(kv_heads=4, head_dim=256), AttentionLayer(kv_heads=8, head_dim=96, window=1024), 25
    ),
)
LATENT = msgspec.structs.replace(
    DENSE, layers=(LatentLayer(latent_dim=512, rope_dim=64),) * 27, tokens_per_block=64, quota_bytes=2 << 30
)
SPARSE = msgspec.structs.replace(
    WINDOWS,
    tokens_per_block=64,
    kv_format=ElementFormat.FP8,
    slots=1330,
    layers=(
        LatentLayer(latent_dim=656, side_planes=(SidePlane(role="index_key", dim=132, format=ElementFormat.UINT8),)),
    )
    * 8,
)


def place(layout: Layout, layer: int, role: str) -> tuple[int, int, dict[str, int]]:
    """Return the first byte (over all pools), the block stride and the strides by axis, in bytes."""
    [held] = [buffer for buffer in layout.buffers if (buffer.layer, buffer.role) == (layer, role)]
    base = sum(pool.size_bytes for pool in layout.pools[: held.pool])
    steps = dict(zip(held.page.axes, held.page.stride_bytes, strict=True))
    return base + held.offset_bytes, held.slot_stride_bytes, steps


def groups_of(layout: Layout) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in layout.life_cycles]
    for held in layout.buffers:
        if held.layer not in members[held.life_cycle]:
            members[held.life_cycle].append(held.layer)
    return members


@pytest.mark.engine
def test_a_dense_model_has_512_blocks_and_the_printed_strides(vllm: Engine) -> None:
    layout = late(vllm, "vllm")(DENSE)
    assert [(pool.slot_count, pool.size_bytes) for pool in layout.pools] == [(512, 1073741824)]
    assert place(layout, 0, "key") == (0, 65536, {"token": 2 * 2048, "head": 2 * 256, "dim": 2})
    assert place(layout, 1, "value")[:2] == (33554432 + 256, 65536)
    assert check(layout) == []


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "block", "layer"), [("vllm", 4259840, 400424960), ("vllm-block-outermost", 34078720, 4259840)]
)
def test_a_hybrid_has_94_blocks_in_six_overlaid_groups(vllm: Engine, name: str, block: int, layer: int) -> None:
    layout = late(vllm, name)(HYBRID)
    assert [(pool.slot_count, pool.size_bytes) for pool in layout.pools] == [(94, 3203399680)]
    assert groups_of(layout)[0] == [0, 6, 12, 18, 24, 30, 36, 42]
    assert groups_of(layout)[5] == [5, 11, 17, 23, 29, 35, 41, 47]
    assert place(layout, 0, "conv_state")[:2] == (0, block)
    assert place(layout, 6, "conv_state")[:2] == (layer, block)
    assert place(layout, 0, "ssm_state")[0] == 50688
    assert place(layout, 5, "key") == (0, block, {"token": 2 * 2048, "head": 2 * 256, "dim": 2})
    assert check(layout) == []


@pytest.mark.engine
def test_windows_overlay_full_attention(vllm: Engine) -> None:
    layout = late(vllm, "vllm")(WINDOWS)
    assert [len(group) for group in groups_of(layout)] == [8] * 6
    assert {pool.slot_count for pool in layout.pools} == {4096}
    assert place(layout, 6, "key")[:2] == (268435456, 65536)


@pytest.mark.engine
def test_unequal_pages_are_padded_with_a_hole_in_each_block(vllm: Engine) -> None:
    layout = late(vllm, "vllm")(UNEQUAL)
    assert [len(group) for group in groups_of(layout)] == [4, 4, 4, 3, 3, 3, 4]
    assert place(layout, 0, "key") == (0, 2 * 32768, {"token": 2 * 1536, "head": 2 * 192, "dim": 2})


@pytest.mark.engine
def test_latent_rows_have_1078_blocks(vllm: Engine) -> None:
    layout = late(vllm, "vllm")(LATENT)
    assert {pool.slot_count for pool in layout.pools} == {1078}
    first, block, steps = place(layout, 0, "key")
    assert (first, block, steps["token"], steps["dim"]) == (0, 2 * 36864, 2 * 576, 2)


@pytest.mark.engine
def test_sparse_latent_rows_and_index_keys_share_one_group(vllm: Engine) -> None:
    apart = late(vllm, "vllm")(SPARSE)
    assert len(groups_of(apart)) == 1
    assert place(apart, 1, "key")[:2] == (55838720, 41984)
    assert place(apart, 0, "index_key")[:2] == (446709760, 8448)
    assert place(apart, 1, "index_key")[0] == 446709760 + 11235840
    packed = late(vllm, "vllm-block-outermost")(SPARSE)
    assert place(packed, 1, "key")[:2] == (41984, 403456)
    assert place(packed, 0, "index_key")[:2] == (335872, 403456)
    assert place(packed, 1, "index_key")[0] == 335872 + 8448


@pytest.mark.engine
def test_kernel_blocks_of_16_tokens_split_the_hybrids_pages(vllm: Engine) -> None:
    allocator = vllm("vllm-kernel-blocks")
    layout = allocator(HYBRID)
    [key] = [held for held in layout.buffers if (held.layer, held.role) == (5, "key")]
    assert (key.slot_count, key.slot_stride_bytes) == (94, 4259840)
    shape = dict(zip(key.page.axes, key.page.shape, strict=True))
    assert (shape["page"], shape["token"], shape["head"]) == (65, 16, 8)
    steps = place(layout, 5, "key")[2]
    # era 3 has K beside V in each token; before it, a kernel block is 16 tokens of K and then of V
    token = 2 * 2048 if allocator.era == 3 else 2 * 1024
    assert (steps["page"], steps["token"]) == (2 * 32768, token)
    assert check(layout) == []


@pytest.mark.engine
@pytest.mark.parametrize("name", LATE)
def test_the_engine_and_its_model_agree_byte_for_byte(vllm: Engine, name: str) -> None:
    allocator = vllm(name)
    if allocator.era < 3 and (name, allocator.era) not in EARLY:
        pytest.skip(f"{allocator.engine()} has no such layout")
    found = run_differential(allocator, AGREEING)
    assert found.differences == []
    assert found.kinds["agree"] >= AGREEING // 2
    assert sum(found.kinds.values()) + sum(found.known.values()) == AGREEING


def asks(allocator: VllmAllocator, spec: CacheSpec) -> bool:
    """Say whether the engine is asked for ``spec`` at all."""
    try:
        allocator.model(spec)
    except Rejected:
        return False
    return True


PAIRS = [(limit, name) for limit in LIMITS for name in limit.allocators if name.startswith("vllm")]


@pytest.mark.engine
@pytest.mark.parametrize(("limit", "name"), PAIRS, ids=[f"{name}: {limit.name}" for limit, name in PAIRS])
def test_what_the_engine_gets_wrong_it_still_gets_wrong(vllm: Engine, limit: Entry, name: str) -> None:
    """An entry of the ledger that passes is out of date: take it out of the ledger and of docs/findings.md."""
    allocator = vllm(name)
    if allocator.release not in limit.releases:
        pytest.skip(f"was found in {', '.join(limit.releases)}, here is {allocator.engine()}")
    if allocator.era < 3 and (name, allocator.era) not in EARLY:
        pytest.skip(f"{allocator.engine()} has no such layout")
    spec = decode_spec(limit.example)
    if not asks(allocator, spec):
        pytest.skip(f"{name} does not ask for such a spec")
    outside, known, _ = faults_outside_limits(spec, allocator, limits_of(name, allocator.release))
    assert known, f"{allocator.engine()} handles {limit.name!r}: delete the entry and its text"
    assert outside == []
    assert any(limit.excuses(fault) for fault in judge(spec, allocator).faults)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.name)
def test_every_entry_of_the_ledger_has_its_case_and_its_text(limit: Entry) -> None:
    file, _, anchor = limit.anchor.partition("#")
    text = (CASES.parents[2] / file).read_text(encoding="utf-8")
    headings = {line.lstrip("# ").lower().replace(" ", "-") for line in text.splitlines() if line.startswith("#")}
    assert anchor in headings
    path = CASES / f"{anchor}.json"
    case = load_case(path)
    assert (case.input, encode_case(case)) == (decode_spec(limit.example), path.read_bytes())
    assert case.allocator in limit.allocators
    assert path.name in text
    assert limit.matches(decode_spec(limit.example))


def test_every_engine_case_is_in_the_ledger() -> None:
    assert sorted(os.listdir(CASES)) == sorted(NAMES)
    assert {limit.anchor.partition("#")[2] + ".json" for limit in LIMITS} == set(NAMES)


NAMES = (
    "nvfp4-values-as-wide-as-keys.json",
    "a-kda-state-without-its-key-dim.json",
    "v-of-another-dim-in-a-hybrid-model.json",
    "an-empty-state-off-its-element.json",
    "a-pipeline-stage-without-a-cached-layer.json",
    "parts-of-a-block-off-their-element.json",
    "a-group-without-a-layer-on-a-pipeline-stage.json",
    "layers-of-one-window-with-pages-of-several-sizes.json",
    "windowed-latent-rows-of-several-sizes-in-one-group.json",
    "latent-rows-of-several-sizes-taken-for-equal.json",
    "states-smaller-than-the-largest-page.json",
    "k-planes-beside-blocks-of-rows.json",
    "a-hybrid-model-with-two-kernel-blocks.json",
    "a-stage-without-a-cached-layer.json",
    "states-off-their-element.json",
    "states-in-packed-blocks.json",
    "hnd-pages-in-packed-blocks.json",
    "a-hybrid-model-with-two-blocks.json",
)


@pytest.mark.engine
def test_the_bench_measures_what_the_engine_is_asked(vllm: Engine) -> None:
    allocator = vllm("vllm")
    found = measure(allocator, rounds=2)
    assert found.engine == allocator.engine()
    assert 400 <= found.specs <= 500
    assert found.bare_per_second > found.checked_per_second > 0
    assert 0 < found.ratio < 1
