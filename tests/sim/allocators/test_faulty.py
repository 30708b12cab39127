"""Every faulty allocator is wrong where it says, by the stated arithmetic, and its sound base everywhere else."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, HybridLayer, LatentLayer, Layer, RecurrentLayer, SidePlane, UncachedLayer
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Consumer, Draft
from kvsan.sim.allocators.faulty import FAULTY, base_of
from kvsan.sim.checking import check
from kvsan.sim.layout import Access, Layout
from kvsan.sim.registry import ALLOCATORS, allocate, resolve
from kvsan.sim.rejection import Rejected
from kvsan.sim.verdict import judge

INDEX = SidePlane(role="index_key", dim=128, format=ElementFormat.BF16)
POSITION = SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank")
PLAIN = AttentionLayer(kv_heads=2, head_dim=256)
SPARSE = msgspec.structs.replace(PLAIN, side_planes=(INDEX, POSITION))
RECURRENT = RecurrentLayer(algorithm="gdn", heads=4, head_dim=16, groups=2, state_dim=16)


def spec_of(*layers: Layer, **fields: object) -> CacheSpec:
    return CacheSpec(layers=layers, **fields)  # type: ignore[arg-type]


def reference(kv_format: str, **fields: object) -> CacheSpec:
    """The reference case: 48 layers, every fourth sparse, 2 KV heads of 256, 32 tokens per block."""
    return spec_of(*(RECURRENT, RECURRENT, RECURRENT, SPARSE) * 12, kv_format=kv_format, **fields)


def reached(layout: Layout, consumer: str, layer: int, role: str) -> Access:
    """Return what a consumer reaches for one role of one layer."""
    found = []
    for access in layout.accesses:
        buffer = layout.buffers[access.buffer]
        parts = buffer.parts[access.part : access.part + 1] if access.part >= 0 else (buffer,)
        if access.consumer == consumer and (parts[0].layer, parts[0].role) == (layer, role):
            found.append(access)
    assert len(found) == 1
    return found[0]


def rules_of(spec: CacheSpec, allocator: str) -> set[str]:
    return {finding.rule for finding in judge(spec, allocator).faults}


@pytest.mark.parametrize("fault", FAULTY, ids=lambda fault: fault.name)
def test_a_fault_is_in_the_registry_and_varies_a_sound_allocator(fault) -> None:  # type: ignore[no-untyped-def]
    entry = next(entry for entry in ALLOCATORS if entry.name == fault.name)
    assert (entry.kind, entry.summary) == ("fault", fault.summary)
    assert callable(resolve(fault.name))
    assert next(entry for entry in ALLOCATORS if entry.name == base_of(fault.name)).kind == "engine"


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"'fault:nothing', needs one of fault:canary, .*fault:global-id-for-extras"):
        resolve("fault:nothing")
    assert base_of("my.module:allocate") == "my.module:allocate"


def test_resolving_and_running_a_fault_imports_no_heavy_module() -> None:
    code = (
        "import sys; from kvsan.model.spec import *\n"
        "from kvsan.sim.registry import ALLOCATORS; from kvsan.sim.verdict import judge\n"
        "spec = CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=64),))\n"
        "[judge(spec, entry.name) for entry in ALLOCATORS if entry.kind == 'fault']\n"
        "heavy = {'hypothesis', 'numpy', 'islpy', 'torch', 'triton', 'cupy', 'kvsan.ci', 'kvsan.strategies'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SILENT = {
    "fault:canary": [spec_of(LatentLayer(latent_dim=512, rope_dim=64)), spec_of(RECURRENT)],
    "fault:coalesce-by-size": [reference("bf16"), reference("fp8"), spec_of(PLAIN, PLAIN, kv_format="nvfp4")],
    "fault:bare-assert": [reference("bf16"), reference("fp8"), spec_of(PLAIN, RECURRENT)],
    "fault:dense-plane-pitch": [spec_of(PLAIN, slots=1), spec_of(LatentLayer(latent_dim=512), slots=8)],
    "fault:v-is-k-plus-one": [spec_of(LatentLayer(latent_dim=512)), spec_of(RECURRENT)],
    "fault:block-size-from-dim1": [
        spec_of(AttentionLayer(kv_heads=8, head_dim=128), kv_format="fp8"),
        spec_of(AttentionLayer(kv_heads=6, head_dim=128), kv_format="nvfp4"),
        spec_of(AttentionLayer(kv_heads=32, head_dim=128), kv_format="nvfp4"),
        spec_of(AttentionLayer(kv_heads=8, head_dim=128), kv_format="nvfp4", consumer=Consumer(kv_layout="NHD")),
        spec_of(AttentionLayer(kv_heads=8, head_dim=128), kv_format="nvfp4", parallel=ParallelLayout(tp=4)),
    ],
    "fault:drop-role-from-plane": [
        reference("bf16"),
        spec_of(*[msgspec.structs.replace(PLAIN, side_planes=(INDEX,))] * 3, kv_format="fp8"),
    ],
    "fault:layer-ordinal-off-by-one": [spec_of(RECURRENT), spec_of(RECURRENT, UncachedLayer())],
    "fault:swap-kv-lanes": [spec_of(LatentLayer(latent_dim=512)), spec_of(RECURRENT)],
    "fault:scale-is-pairs": [spec_of(LatentLayer(latent_dim=512)), spec_of(RECURRENT)],
    "fault:ledger-tokens": [spec_of(PLAIN), spec_of(RECURRENT, parallel=ParallelLayout(cp=2))],
    "fault:heads-floor": [
        spec_of(PLAIN, parallel=ParallelLayout(tp=2)),
        spec_of(PLAIN, parallel=ParallelLayout(tp=4)),
        spec_of(AttentionLayer(kv_heads=3, head_dim=64), parallel=ParallelLayout(tp=2, attention_dp=True)),
    ],
    "fault:scale-pool-uses-data-scale": [spec_of(PLAIN, kv_format="fp8"), spec_of(RECURRENT, kv_format="nvfp4")],
    "fault:v-offset-from-k-only": [spec_of(LatentLayer(latent_dim=512)), spec_of(RECURRENT)],
    "fault:global-id-for-extras": [
        reference("fp8"),
        reference("fp8", parallel=ParallelLayout(pp=3), rank=0),
        spec_of(PLAIN, PLAIN, parallel=ParallelLayout(pp=2), rank=1),
    ],
}


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, specs in SILENT.items() for spec in specs])
def test_a_fault_is_its_base_where_nothing_triggers_it(name: str, spec: CacheSpec) -> None:
    sound = allocate(spec, base_of(name))
    layout = allocate(spec, name)
    assert layout.allocator == name
    assert check(layout) == check(sound) == []
    if not name.endswith(("plane-pitch", "plus-one")):  # these change numbers that nobody uses here
        assert msgspec.structs.replace(layout, allocator=sound.allocator) == sound


def test_every_fault_has_silent_neighbours() -> None:
    assert set(SILENT) == {fault.name for fault in FAULTY}


def test_rounded_offsets_of_the_reference_case() -> None:
    """fp8 over two ranks: K, V and index pages of 8,192 B; offsets 3i/2 rounded down, every odd layer off by a page."""
    layout = allocate(reference("fp8", parallel=ParallelLayout(tp=2)), "fault:coalesce-by-size")
    assert layout.tables[0].mapping_offsets == (0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16)
    assert layout.tables[0].index_scale == 36
    for ordinal in range(12):
        for role, lane in (("key", 0), ("value", 8192)):
            place = reached(layout, "attention-op", 4 * ordinal + 3, role).offset_bytes
            assert place == 24576 * ordinal - 8192 * (ordinal % 2) + lane


def test_rounded_offsets_reach_beyond_the_scale_slot() -> None:
    """nvfp4, two heads: the op uses the data pool's offsets on scale slots of 24,576 B."""
    layout = allocate(reference("nvfp4"), "fault:coalesce-by-size")
    places = [reached(layout, "attention-op", 4 * index + 3, "key_block_scale").offset_bytes for index in range(12)]
    assert places == [0, 2048, 6144, 8192, 12288, 14336, 18432, 20480, 24576, 26624, 30720, 32768]


def test_what_the_legacy_policy_breaks_itself_is_no_fault_of_rounding() -> None:
    spec = spec_of(msgspec.structs.replace(PLAIN, side_planes=(INDEX,)), kv_format="nvfp4")
    assert rules_of(spec, "trtllm-v2-qsa-legacy") >= {"index-scale"}
    with pytest.raises(Rejected, match="the scale pool has 2 pages per slot where the data pool has 3") as caught:
        allocate(spec, "fault:coalesce-by-size")
    assert not caught.value.supported


@pytest.mark.parametrize("flags", [[], ["-O"]])
def test_the_bare_assertion_is_raised_with_and_without_assertions(flags: list[str]) -> None:
    code = (
        "from kvsan.model.formats import ElementFormat; from kvsan.model.layers import SidePlane\n"
        "from kvsan.model.spec import *; from kvsan.sim.verdict import judge\n"
        "plane = SidePlane(role='index_key', dim=128, format=ElementFormat.BF16)\n"
        "layer = AttentionLayer(kv_heads=1, head_dim=128, side_planes=(plane,))\n"
        "verdict = judge(CacheSpec(layers=(layer, layer)), 'fault:bare-assert')\n"
        "print(verdict.rejection.rule, '|', verdict.rejection.message)"
    )
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("unexplained-rejection | ")
    assert "AssertionError and no message" in done.stdout


def test_an_unsupported_spec_is_refused_with_words_by_the_bare_assertion_too() -> None:
    with pytest.raises(Rejected, match="QSA needs V pages"):
        allocate(spec_of(LatentLayer(latent_dim=512)), "fault:bare-assert")


def test_the_dense_plane_steps_by_one_page() -> None:
    layout = allocate(spec_of(PLAIN, PLAIN, slots=3), "fault:dense-plane-pitch")
    page = 2 * 256 * 2 * 32
    assert reached(layout, "kv-view", 1, "key").pitch_bytes == page
    assert reached(layout, "attention-op", 1, "key").pitch_bytes == 4 * page
    assert rules_of(layout.spec or spec_of(PLAIN), layout.allocator) >= {"stride", "op-address", "alias"}


def test_a_missing_page_gets_page_zero_for_v() -> None:
    table = allocate(spec_of(PLAIN), "fault:v-is-k-plus-one").tables[0]
    assert (table.missing_lanes, table.missing_guard) == ((-1, 0), "negative")


@pytest.mark.parametrize(("heads", "tokens", "caught"), [(4, 8, True), (8, 16, True), (8, 8, False), (6, 16, False)])
def test_a_block_size_read_from_the_head_axis(heads: int, tokens: int, caught: bool) -> None:
    spec = spec_of(AttentionLayer(kv_heads=heads, head_dim=128), kv_format="nvfp4", tokens_per_block=tokens)
    assert ("record-layout" in rules_of(spec, "fault:block-size-from-dim1")) == caught
    layout = allocate(spec, "fault:block-size-from-dim1")
    for role in ("key", "value", "key_block_scale", "value_block_scale"):
        page = reached(layout, "attention-op", 0, role).page
        assert page.shape[page.axes.index("token")] == (heads if caught else tokens)


def test_a_plane_without_room_for_its_position() -> None:
    """12 index pages of 8,192 B and a position page of 384 B: 98,304 B are kept, 98,688 B are read."""
    layout = allocate(reference("fp8"), "fault:drop-role-from-plane")
    plane = next(buffer for buffer in layout.buffers if buffer.role == "side_planes")
    assert (plane.page_bytes, plane.slot_stride_bytes) == (98304, 98304)
    assert reached(layout, "side-plane-view", 3, "qsa_index_position").offset_bytes == 98304
    assert rules_of(reference("fp8"), "fault:drop-role-from-plane") == {"bounds", "budget", "alias"}


@pytest.mark.parametrize("name", ["fault:drop-role-from-plane", "fault:global-id-for-extras"])
def test_what_the_packed_policy_breaks_itself_is_no_fault(name: str) -> None:
    layer = AttentionLayer(kv_heads=1, head_dim=128, side_planes=(INDEX,))
    dense = AttentionLayer(kv_heads=1, head_dim=128)
    with pytest.raises(Rejected, match="known limit of trtllm-v2-qsa-packed") as caught:
        allocate(spec_of(layer, dense), name)
    assert not caught.value.supported


def test_what_plain_v2_breaks_itself_is_no_fault() -> None:
    """A scale page of 8 heads is as large as a K page of 1: 8 * 128 / 16 B and 128 / 2 B per token."""
    one, eight = (AttentionLayer(kv_heads=heads, head_dim=128) for heads in (1, 8))
    for fault in FAULTY:
        if fault.base == "trtllm-v2":
            with pytest.raises(Rejected, match="known limit of trtllm-v2 ") as caught:
                allocate(spec_of(one, eight, kv_format="nvfp4"), fault.name)
            assert not caught.value.supported


def test_layers_counted_from_one() -> None:
    layout = allocate(spec_of(PLAIN, PLAIN, slots=1), "fault:layer-ordinal-off-by-one")
    pair = 2 * 2 * 256 * 2 * 32
    assert layout.tables[0].mapping_offsets == (1, 2)
    assert reached(layout, "attention-op", 0, "key").offset_bytes == pair
    assert reached(layout, "attention-op", 1, "key").offset_bytes == 2 * pair


def test_lanes_are_swapped_in_data_and_scales() -> None:
    spec = spec_of(PLAIN, PLAIN, kv_format="nvfp4")
    sound, layout = allocate(spec, "trtllm-v2"), allocate(spec, "fault:swap-kv-lanes")
    for one, other in (("key", "value"), ("key_block_scale", "value_block_scale")):
        assert reached(layout, "attention-op", 1, one).offset_bytes == (
            reached(sound, "attention-op", 1, other).offset_bytes
        )
        assert reached(layout, "attention-op", 1, other).offset_bytes == (
            reached(sound, "attention-op", 1, one).offset_bytes
        )


def test_an_index_scale_in_pairs() -> None:
    layout = allocate(spec_of(PLAIN, PLAIN, PLAIN), "fault:scale-is-pairs")
    assert layout.tables[0].index_scale == 3
    assert reached(layout, "attention-op", 2, "value").pitch_bytes == 3 * 2 * 256 * 2 * 32


def test_ledger_tokens_under_context_parallelism() -> None:
    layout = allocate(spec_of(PLAIN, PLAIN, parallel=ParallelLayout(cp=2)), "fault:ledger-tokens")
    page = 2 * 256 * 2 * 32
    access = reached(layout, "attention-op", 1, "value")
    assert layout.tables[0].page_bytes == 2 * page
    assert access.page.shape == (2, 64, 256)
    assert access.offset_bytes == 3 * 2 * page


@pytest.mark.parametrize(("heads", "tp", "each"), [(3, 2, 1), (7, 4, 1), (10, 4, 2), (4, 8, 1)])
def test_heads_rounded_down(heads: int, tp: int, each: int) -> None:
    layer = AttentionLayer(kv_heads=heads, head_dim=64)
    hybrid = HybridLayer(attention=layer, recurrent=RecurrentLayer(algorithm="short_conv", heads=8))
    draft = Draft(mode="folded", layers=(layer,))
    spec = spec_of(layer, hybrid, parallel=ParallelLayout(tp=tp), draft=draft)
    layout = allocate(spec, "fault:heads-floor")
    assert layout.spec == spec
    assert [entry.rank_heads for entry in layout.head_maps] == [each]
    assert {buffer.page.shape[0] for buffer in layout.buffers if buffer.role in ("key", "value")} == {each}
    assert rules_of(spec, "fault:heads-floor") == ({"head-map"} if heads > tp else set())


def test_scales_walked_in_data_pages() -> None:
    """K pages are heads * tokens * dim / 2 bytes, scale pages an eighth of that."""
    layout = allocate(spec_of(PLAIN, kv_format="nvfp4"), "fault:scale-pool-uses-data-scale")
    page = 2 * 256 // 2 * 32
    access = reached(layout, "attention-op", 0, "value_block_scale")
    assert (access.offset_bytes, access.pitch_bytes) == (page, 2 * page)
    assert reached(
        allocate(spec_of(PLAIN, kv_format="nvfp4"), "trtllm-v2"), *("attention-op", 0, "value_block_scale")
    ) == (msgspec.structs.replace(access, offset_bytes=page // 8, pitch_bytes=2 * page // 8))


def test_v_is_read_where_k_is() -> None:
    layout = allocate(spec_of(PLAIN, PLAIN), "fault:v-offset-from-k-only")
    assert reached(layout, "attention-op", 1, "value").offset_bytes == (
        reached(layout, "attention-op", 1, "key").offset_bytes
    )


def test_side_planes_looked_up_by_the_model_s_numbers() -> None:
    """Stage 1 of 3 starts at layer 16: every view is 16 planes off, whether they are packed or not."""
    for kv_format, page in (("fp8", 8192), ("bf16", 8192)):
        spec = reference(kv_format, parallel=ParallelLayout(pp=3), rank=1)
        sound, layout = allocate(spec, "trtllm-v2-qsa-packed"), allocate(spec, "fault:global-id-for-extras")
        wrong, right = (reached(each, "side-plane-view", 19, "index_key") for each in (layout, sound))
        assert wrong.offset_bytes - right.offset_bytes == 16 * page
        assert rules_of(spec, "fault:global-id-for-extras") >= {"op-address", "bounds"}


def test_the_canary_lays_v_on_k() -> None:
    layout = allocate(spec_of(PLAIN, HybridLayer(attention=PLAIN, recurrent=RECURRENT)), "fault:canary")
    offsets = {(buffer.layer, buffer.role): buffer.offset_bytes for buffer in layout.buffers}
    assert all(offsets[layer, "key"] == offsets[layer, "value"] for layer in (0, 1))
    assert rules_of(layout.spec or spec_of(PLAIN), "fault:canary") == {"alias", "adjacency", "op-address"}
