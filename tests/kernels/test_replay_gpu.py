"""Replays on a CUDA GPU: thousands of drawn layouts, every fault, and pools beyond 32-bit offsets."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from kvsan.ci.faults import FAULTS
from kvsan.kernels.device import Device
from kvsan.kernels.fitting import layout_bytes
from kvsan.kernels.replay import Replayed, Replayer
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, RecurrentLayer
from kvsan.model.spec import CacheSpec, Consumer
from kvsan.sim.arena import Arena
from kvsan.sim.arena.findings import MEMORY_RULES
from kvsan.sim.checking import check
from kvsan.sim.layout import Layout
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected
from kvsan.strategies import cache_specs, raw_layouts

pytestmark = pytest.mark.gpu
replace = msgspec.structs.replace
LAYOUTS = 10_000
SMALL = 1 << 20


def drawn(strategy: object, count: int) -> list:
    """Return ``count`` draws, the same ones every time."""
    values: list = []

    @seed(20904)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: object) -> None:
        values.append(value)

    collect()
    return values


def memory_rules(layout: Layout) -> set[str]:
    return {finding.rule for finding in check(layout)} & set(MEMORY_RULES)


def same_as_arena(replayed: Replayed) -> None:
    arena = Arena.build(replayed.layout)
    expected = arena.findings()
    assert replayed.digest == arena.digest()
    assert [finding.rule for finding in replayed.findings] == [finding.rule for finding in expected]
    for seen, predicted in zip(replayed.findings, expected, strict=True):
        assert seen.message.startswith(predicted.message)


def test_drawn_layouts_agree_with_the_simulator(gpu: Device) -> None:
    """At least 10,000 layouts of three allocators; the digest of every twentieth is compared with the host's."""
    specs = drawn(cache_specs(), LAYOUTS * 2)
    allocators = ("trtllm-v1", "trtllm-v2", "trtllm-v2-qsa-packed")
    layouts = []
    for spec in specs:
        for allocator in allocators:
            try:
                layout = allocate(spec, allocator)
            except Rejected:
                continue
            layouts.append(layout)
            break
        if len(layouts) > LAYOUTS * 1.1:
            break
        allocators = (*allocators[1:], allocators[0])
    counts: Counter[str] = Counter()
    formats: Counter[str] = Counter()
    for number, replayed in enumerate(Replayer(gpu, max_bytes=SMALL).replay(layouts)):
        if replayed.refusal is not None:
            assert "needs at most" in replayed.refusal
            counts["too large"] += 1
            continue
        static = memory_rules(replayed.layout) - {"int32"}
        assert {finding.rule for finding in replayed.findings} - {"int32"} == static, replayed.layout.spec
        counts["broken" if static else "clean"] += 1
        spec = replayed.layout.spec
        formats.update([f"kv {spec.kv_format.value}", f"state {spec.state_format.value}", spec.consumer.kv_layout])
        if number % 20 == 0:
            same_as_arena(replayed)
    print(dict(counts), dict(sorted(formats.items())))
    assert counts["clean"] >= LAYOUTS
    assert {"HND", "NHD"} <= set(formats)


def test_raw_layouts_sound_and_unsound_look_as_in_the_arena(gpu: Device) -> None:
    layouts = [layout for layout in drawn(raw_layouts(), 1000) if layout_bytes(layout) < SMALL]
    found: Counter[str] = Counter()
    for replayed in Replayer(gpu).replay(layouts):
        same_as_arena(replayed)
        found.update({finding.rule for finding in replayed.findings})
    assert set(found) >= {"alias", "bounds"}


def test_faults_are_caught_by_memory_alone(gpu: Device) -> None:
    layouts = []
    for fault in [fault for fault in FAULTS if fault.kind == "layout"]:
        for spec in (replace(fault.minimum, slots=3), fault.minimum):
            try:
                layouts.append(allocate(spec, fault.name))
            except (Rejected, AssertionError):
                continue
    caught = set()
    for layout, replayed in zip(layouts, Replayer(gpu).replay(layouts), strict=True):
        same_as_arena(replayed)
        if replayed.findings:
            caught.add(layout.allocator)
    assert len(caught) == 12


def large_spec(**fields: object) -> CacheSpec:
    """Return a spec whose pool has more than 2^31 elements of two bytes, and states beside it."""
    state = RecurrentLayer(algorithm="gdn", heads=2, head_dim=64, groups=2, state_dim=64)
    layers = (AttentionLayer(kv_heads=8, head_dim=128), state)
    spec = CacheSpec(layers=layers * 2, kv_format=ElementFormat.BF16, tokens_per_block=32, slots=1, state_slots=8)
    slot_bytes = max(pool.slot_bytes for pool in allocate(spec, "trtllm-v2").pools[:1])
    return replace(spec, slots=(5 << 30) // slot_bytes + 3, **fields)


def test_offsets_beyond_32_bits_are_replayed_for_real(gpu: Device) -> None:
    layout = allocate(large_spec(), "trtllm-v2")
    assert max(pool.size_bytes for pool in layout.pools) > 2 * (1 << 31)
    assert max(pool.size_bytes for pool in layout.pools) > 1 << 32
    (replayed,) = Replayer(gpu, max_bytes=1 << 40).replay([layout])
    assert replayed.layout is layout
    assert replayed.findings == ()


def test_a_consumer_with_32_bit_offsets_is_caught_reading_other_bytes(gpu: Device) -> None:
    layout = allocate(large_spec(consumer=Consumer(offset_bits=32)), "trtllm-v2")
    (replayed,) = Replayer(gpu, max_bytes=1 << 40).replay([layout])
    assert {finding.rule for finding in replayed.findings} == {"int32"}
    static = [finding for finding in check(layout) if finding.rule == "int32"]
    for seen, predicted in zip(replayed.findings, static, strict=True):
        assert seen.message.startswith(predicted.message)
        assert "memory gave" in seen.message


def test_a_wrong_pitch_beyond_32_bits_is_caught(gpu: Device) -> None:
    """The last slot of the consumer lands one page away, more than 4 GiB from the base."""
    layout = allocate(large_spec(), "trtllm-v2")
    access = next(each for each in layout.accesses if each.cell_count > 1 and each.pool == 0)
    index = layout.accesses.index(access)
    last = replace(
        access,
        offset_bytes=access.offset_bytes + (access.cell_count - 1) * access.pitch_bytes - access.page.span_bytes,
        first_slot=access.first_slot + (access.cell_count - 1) * access.slot_step,
        cell_count=1,
    )
    assert last.offset_bytes > 1 << 32
    accesses = (*layout.accesses[:index], last, *layout.accesses[index + 1 :])
    (replayed,) = Replayer(gpu, max_bytes=1 << 40).replay([replace(layout, accesses=accesses)])
    assert "op-address" in {finding.rule for finding in replayed.findings}
