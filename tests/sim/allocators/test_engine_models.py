"""All engine models outside TensorRT-LLM: the byte arena agrees with the rules, and faults of their kind are caught."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import msgspec
import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, LatentLayer, RecurrentLayer
from kvsan.model.spec import CacheSpec, Consumer
from kvsan.sim.allocators.vllm.allocators import allocate_e3
from kvsan.sim.allocators.vllm.overlay import ORDERS
from kvsan.sim.arena import arena_findings
from kvsan.sim.checking import check
from kvsan.sim.layout import Access, Buffer, Layout
from kvsan.sim.registry import ALLOCATORS, allocate
from kvsan.sim.rejection import Rejected
from kvsan.strategies.fitted import ABILITIES, fitted

MODELS = [entry.name for entry in ALLOCATORS if entry.kind == "engine" and entry.name in ABILITIES]


@functools.cache
def random_spec(seed: int) -> CacheSpec:
    """Return the spec that ``tests/sim/random_specs.py`` draws from a seed; tests are no package."""
    module = importlib.util.spec_from_file_location(
        "kvsan_tests_random_specs", Path(__file__).parents[1] / "random_specs.py"
    )
    assert module is not None
    assert module.loader is not None
    loaded = importlib.util.module_from_spec(module)
    module.loader.exec_module(loaded)
    drawn: CacheSpec = loaded.random_spec(seed, mixed=False)
    return drawn


replace = msgspec.structs.replace
MEMORY_RULES = {"alias", "bounds", "op-address"}
HYBRID = CacheSpec(
    layers=(
        RecurrentLayer(algorithm="gdn", heads=2, head_dim=4, groups=1, state_dim=4, ssm_format=ElementFormat.FP32),
        AttentionLayer(kv_heads=2, head_dim=8),
        RecurrentLayer(algorithm="gdn", heads=2, head_dim=4, groups=1, state_dim=4, ssm_format=ElementFormat.FP32),
        AttentionLayer(kv_heads=2, head_dim=8),
    ),
    tokens_per_block=4,
    slots=4,
)


@pytest.mark.parametrize("allocator", MODELS)
def test_the_arena_finds_nothing_on_what_the_rules_call_clean(allocator: str) -> None:
    """Random specs, laid out on real bytes: every byte has the owners that the rules allow, overlaid groups too."""
    laid_out = 0
    for seed in range(60):
        spec = fitted(random_spec(seed), ABILITIES[allocator])
        try:
            layout = allocate(spec, allocator)
        except Rejected as refusal:
            assert not refusal.supported, refusal.message
            continue
        if sum(pool.size_bytes for pool in layout.pools) > 1 << 20:
            continue
        laid_out += 1
        assert check(layout) == []
        assert arena_findings(layout) == []
    assert laid_out >= 15


def move(layout: Layout, change: dict[str, int], *, layer: int | None = None, role: str | None = None) -> Layout:
    """Return a layout whose buffers (of one layer or role) have other fields, and views that follow them."""
    buffers: list[Buffer] = []
    accesses: list[Access] = []
    for buffer, access in zip(layout.buffers, layout.accesses, strict=True):
        if layer in (None, buffer.layer) and role in (None, buffer.role):
            buffer = replace(buffer, **change)
            access = replace(access, offset_bytes=buffer.offset_bytes, pitch_bytes=buffer.slot_stride_bytes)
        buffers.append(buffer)
        accesses.append(access)
    return replace(layout, buffers=tuple(buffers), accesses=tuple(accesses))


def rules_of(layout: Layout) -> set[str]:
    found = {finding.rule for finding in check(layout)}
    assert bool(found & MEMORY_RULES) == bool({finding.rule for finding in arena_findings(layout)} & MEMORY_RULES)
    return found


def test_key_planes_of_a_hybrid_that_were_not_restrided_meet_the_states_of_other_blocks() -> None:
    """All K before all V, beside states block by block: the fault that restriding avoids."""
    layout = allocate(HYBRID, "vllm-e1")
    key = next(buffer for buffer in layout.buffers if buffer.role == "key")
    half = key.page_bytes
    planes = move(layout, {"slot_stride_bytes": half}, role="key")
    planes = move(planes, {"slot_stride_bytes": half, "offset_bytes": 4 * half}, role="value")
    assert "alias" in rules_of(planes)


@pytest.mark.parametrize("order", [order for order in ORDERS if "H" not in order[:2]])
def test_a_group_that_is_off_by_a_page_meets_other_blocks(order: str) -> None:
    layout = allocate_e3(HYBRID, order=order)
    page = layout.pools[0].slot_bytes // 2
    key = next(buffer for buffer in layout.buffers if (buffer.layer, buffer.role) == (1, "key"))
    step = page if order[0] == "L" else key.slot_stride_bytes
    broken = move(layout, {"offset_bytes": key.offset_bytes + step}, layer=1, role="key")
    assert rules_of(broken) & {"alias", "bounds"}


def test_packed_blocks_stepped_by_the_page_are_caught() -> None:
    layout = allocate(HYBRID, "vllm-e2-packed")
    page = layout.pools[0].slot_bytes // 2
    assert rules_of(move(layout, {"slot_stride_bytes": page}, layer=3)) & {"alias", "stride"}


def test_v_of_token_pools_that_forgets_the_sink_page_meets_k() -> None:
    layout = allocate(replace(HYBRID, layers=HYBRID.layers[1:2], consumer=Consumer(kv_layout="NHD")), "sglang")
    value = next(buffer for buffer in layout.buffers if buffer.role == "value")
    short = value.offset_bytes - value.slot_stride_bytes
    assert rules_of(move(layout, {"offset_bytes": short}, role="value")) == {"alias"}


@pytest.mark.parametrize(("slots", "broken"), [(2142, False), (2144, True)])
def test_packed_strides_reach_31_bits_after_two_thousand_blocks(slots: int, broken: bool) -> None:
    """Blocks of 1,002,240 B: with 32-bit byte offsets block 2143 is out of reach, and the planner gives more."""
    layers = (LatentLayer(latent_dim=576),) * 27 + (LatentLayer(latent_dim=108),)
    spec = CacheSpec(
        layers=layers, tokens_per_block=64, kv_format="fp8", slots=slots, consumer=Consumer(offset_bits=32)
    )
    layout = allocate(spec, "vllm-e3-block-outermost")
    assert layout.pools[0].slot_bytes == 1_002_240
    assert ("int32" in {finding.rule for finding in check(layout)}) == broken
