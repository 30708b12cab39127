"""Replays on the host through the interpreter: the verdict, words and digest of the arena, and planted faults."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsan.ci.faults import FAULTS, Fault
from kvsan.kernels import batch as batch_module
from kvsan.kernels import plan as plan_module
from kvsan.kernels.device import Device, open_device
from kvsan.kernels.fitting import fitted, layout_bytes
from kvsan.kernels.plan import GUARD_BYTES, plan_replay
from kvsan.kernels.pools import allocate_pool, strided
from kvsan.kernels.probe import launch
from kvsan.kernels.replay import Replayed, Replayer
from kvsan.kernels.round_work import RoundWork
from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, RecurrentLayer
from kvsan.model.spec import CacheSpec, Consumer
from kvsan.sim.arena import Arena
from kvsan.sim.arena.findings import MEMORY_RULES
from kvsan.sim.checking import check
from kvsan.sim.layout import Access, Buffer, Layout, LifeCycle, Pool
from kvsan.sim.page import dense_page, strided_page
from kvsan.sim.registry import allocate
from kvsan.sim.rejection import Rejected
from kvsan.strategies import cache_specs, raw_layouts

replace = msgspec.structs.replace
MEMORY_FAULTS = [fault for fault in FAULTS if fault.kind == "layout" and fault.name != "fault:bare-assert"]
SMALL = 1 << 20


@pytest.fixture(scope="module")
def replayer(host: Device) -> Replayer:
    return Replayer(host)


def same_as_arena(replayed: Replayed) -> None:
    """Rules, order and words are the arena's, with what memory held behind; a replay never says less."""
    arena = Arena.build(replayed.layout)
    assert replayed.refusal is None
    assert replayed.digest == arena.digest()
    expected = arena.findings()
    assert [finding.rule for finding in replayed.findings] == [finding.rule for finding in expected]
    for seen, predicted in zip(replayed.findings, expected, strict=True):
        assert seen.message.startswith(predicted.message)
        assert (seen.remedy, seen.where) == (predicted.remedy, predicted.where)


@pytest.mark.parametrize("fault", MEMORY_FAULTS, ids=lambda fault: fault.name)
def test_faults_look_on_memory_as_in_the_arena(replayer: Replayer, fault: Fault) -> None:
    """With three slots, so that faults of strides show as well as those of offsets."""
    spec = replace(fault.minimum, slots=3)
    try:
        layout = allocate(spec, fault.name)
    except Rejected:
        layout = allocate(fault.minimum, fault.name)
    (replayed,) = replayer.replay([layout])
    same_as_arena(replayed)
    static = {finding.rule for finding in check(layout)} & set(MEMORY_RULES)
    assert {finding.rule for finding in replayed.findings} == static


CAUGHT_ON_MEMORY = {
    "fault:canary": "alias",
    "fault:coalesce-by-size": "op-address",
    "fault:dense-plane-pitch": "op-address",
    "fault:v-is-k-plus-one": "sentinel",
    "fault:drop-role-from-plane": "bounds",
    "fault:layer-ordinal-off-by-one": "op-address",
    "fault:swap-kv-lanes": "op-address",
    "fault:scale-is-pairs": "op-address",
    "fault:ledger-tokens": "op-address",
    "fault:scale-pool-uses-data-scale": "op-address",
    "fault:v-offset-from-k-only": "op-address",
    "fault:global-id-for-extras": "op-address",
}
"""Faults in addresses or bytes, and the rule that memory shows. The others leave every address right:
``block-size-from-dim1`` misreads a shape, ``heads-floor`` stores too few heads, ``bare-assert`` stores nothing."""


def test_every_fault_of_addresses_or_bytes_is_caught_by_memory_alone(replayer: Replayer) -> None:
    layouts = {}
    for fault in MEMORY_FAULTS:
        try:
            layouts[fault.name] = allocate(replace(fault.minimum, slots=3), fault.name)
        except Rejected:
            layouts[fault.name] = allocate(fault.minimum, fault.name)
    results = zip(layouts, replayer.replay(layouts.values()), strict=True)
    caught = {name: {finding.rule for finding in replayed.findings} for name, replayed in results}
    assert {name for name, rules in caught.items() if rules} == set(CAUGHT_ON_MEMORY)
    for name, rule in CAUGHT_ON_MEMORY.items():
        assert rule in caught[name], name


STATES = (ElementFormat.FP32, ElementFormat.BF16, ElementFormat.FP16)
SOUND = [
    (kv_format, STATES[index % 3], kv_layout)
    for kv_layout in ("HND", "NHD")
    for index, kv_format in enumerate((ElementFormat.BF16, ElementFormat.FP16, ElementFormat.FP8, ElementFormat.NVFP4))
]


def sound_spec(kv_format: ElementFormat, state: ElementFormat, kv_layout: str) -> CacheSpec:
    attention = AttentionLayer(kv_heads=2, head_dim=64)
    recurrent = RecurrentLayer(algorithm="gdn", heads=2, head_dim=4, groups=2, state_dim=4)
    return CacheSpec(
        layers=(recurrent, attention, recurrent, attention),
        kv_format=kv_format,
        state_format=state,
        tokens_per_block=2,
        slots=3,
        consumer=Consumer(kv_layout=kv_layout),
    )


def test_sound_layouts_of_all_formats_replay_clean_in_one_batch(replayer: Replayer) -> None:
    layouts = [allocate(sound_spec(*case), "trtllm-v2") for case in SOUND]
    for layout, replayed in zip(layouts, replayer.replay(layouts), strict=True):
        assert replayed.layout is layout
        assert replayed.findings == ()
        assert replayed.compared_on_host
        assert replayed.digest == Arena.build(layout).digest()


RELAXED = settings(
    max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)


@given(layouts=st.lists(raw_layouts(), min_size=2, max_size=2))
@RELAXED
def test_raw_layouts_sound_and_unsound_look_on_memory_as_in_the_arena(
    replayer: Replayer, layouts: list[Layout]
) -> None:
    """A few, since the interpreter takes a second for each; the GPU tests draw thousands."""
    small = [layout for layout in layouts if layout_bytes(layout) < 4096 and len(layout.buffers) < 5]
    for replayed in replayer.replay(small):
        same_as_arena(replayed)


@given(specs=st.lists(cache_specs(), min_size=2, max_size=2))
@RELAXED
def test_drawn_layouts_look_on_memory_as_in_the_arena(replayer: Replayer, specs: list[CacheSpec]) -> None:
    layouts = []
    for spec in specs:
        try:
            layout = allocate(spec, "trtllm-v2-qsa-packed")
        except Rejected:
            continue
        if layout_bytes(layout) < SMALL and len(layout.buffers) < 40:
            layouts.append(layout)
    for replayed in replayer.replay(layouts):
        same_as_arena(replayed)


def dense_layout(**fields: object) -> Layout:
    """Return a layout of one pool: two buffers of 5 and 3 bytes in slots of 16, right accesses."""
    page, other = (dense_page(ElementFormat.UINT8, ("byte",), (size,)) for size in (5, 3))
    buffers = (
        Buffer("target", 0, "key", 0, 0, 1, 16, 4, 5, page),
        Buffer("target", 0, "value", 0, 0, 8, 16, 4, 3, other),
    )
    accesses = (Access("op", 0, 0, 1, 16, 4, page), Access("op", 1, 0, 8, 16, 4, other))
    made = Layout(
        allocator="raw",
        pools=(Pool("target", 0, 0, 4, 16, 64),),
        life_cycles=(LifeCycle("target", 0),),
        buffers=buffers,
        accesses=accesses,
    )
    return replace(made, **fields)


def planting(monkeypatch: pytest.MonkeyPatch, offset: int, value: int) -> None:
    """Let a byte at ``offset`` from the first pool's base change after each stamp of a round."""
    read = RoundWork.read

    def planted(self: RoundWork, digit: int) -> None:
        self.device.write(self.members[0].pools[0].base + offset, np.array([value], dtype=np.uint8))
        read(self, digit)

    monkeypatch.setattr(RoundWork, "read", planted)


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (0, "byte 0 of pool 0 of group 0 holds"),
        (63, "byte 63 of pool 0 of group 0 holds"),
        (-1, "byte -1 of pool 0 of group 0 (before its 64 B, in the guard zone) holds something else"),
        (64, "byte 64 of pool 0 of group 0 (after its 64 B, in the guard zone) holds something else"),
        (-GUARD_BYTES, f"byte -{GUARD_BYTES} of pool 0"),
    ],
)
def test_bytes_that_nobody_owns_are_watched(
    replayer: Replayer, monkeypatch: pytest.MonkeyPatch, offset: int, words: str
) -> None:
    """Padding and guard zones: what no view reaches is compared all the same."""
    planting(monkeypatch, offset, 0x77)
    (replayed,) = replayer.replay([dense_layout()])
    assert {finding.rule for finding in replayed.findings} == {"replay-mismatch"}
    assert any(words in finding.message for finding in replayed.findings)


def test_padding_of_large_pools_is_watched_without_the_host(
    replayer: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = dense_page(ElementFormat.UINT8, ("byte",), (4096,))
    buffer = Buffer("target", 0, "key", 0, 0, 0, 8192, 16, 4096, page)
    layout = dense_layout(pools=(Pool("target", 0, 0, 16, 8192, 16 * 8192),), buffers=(buffer,), accesses=())
    planting(monkeypatch, 5 * 8192 + 5000, 1)
    (replayed,) = replayer.replay([layout])
    assert not replayed.compared_on_host
    (finding,) = replayed.findings
    assert finding.rule == "replay-mismatch"
    assert finding.message.startswith(f"byte {5 * 8192 + 5000} of pool 0")


def test_an_owned_byte_that_changes_is_no_alias_but_a_mismatch(
    replayer: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    planting(monkeypatch, 2, 0x77)
    (replayed,) = replayer.replay([dense_layout()])
    assert {finding.rule for finding in replayed.findings} <= {"replay-mismatch", "alias"}
    assert any(finding.rule == "replay-mismatch" for finding in replayed.findings)


def test_a_mistake_common_to_stamp_and_verify_does_not_cancel_out(
    replayer: Replayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both use the same rows; the second pair of eyes and the whole-pool comparison do not."""
    rows = batch_module.target_rows

    def shifted(first_pool: int, target: plan_module.Target) -> list[tuple[int, ...]]:
        return [(row[0] + 1, *row[1:]) for row in rows(first_pool, target)]

    monkeypatch.setattr(batch_module, "target_rows", shifted)
    (replayed,) = replayer.replay([dense_layout()])
    messages = [finding.message for finding in replayed.findings if finding.rule == "replay-mismatch"]
    assert any(message.startswith("two ways of reading layer 0's key") for message in messages)
    assert any(message.startswith("byte 1 of pool 0") for message in messages)


def test_later_owners_win_where_bytes_are_shared_so_that_reports_agree(replayer: Replayer) -> None:
    """Cells that overlap their own neighbours too, both ways round."""
    page = dense_page(ElementFormat.UINT8, ("byte",), (6,))
    for pitch, offset in ((4, 0), (-4, 12), (0, 3)):
        buffer = Buffer("target", 0, "key", 0, 0, offset, pitch, 4, 6, page)
        layout = dense_layout(buffers=(buffer,), accesses=(Access("op", 0, 0, offset, pitch, 4, page),))
        (replayed,) = replayer.replay([layout])
        assert "alias" in {finding.rule for finding in replayed.findings}
        same_as_arena(replayed)


def test_a_stray_consumer_is_told_from_the_storage_it_hits(replayer: Replayer) -> None:
    layout = dense_layout()
    key, value = layout.accesses
    layout = replace(layout, accesses=(replace(key, offset_bytes=8, page=value.page), value))
    (replayed,) = replayer.replay([layout])
    same_as_arena(replayed)
    assert {(finding.rule, finding.where[0].role) for finding in replayed.findings} == {
        ("op-address", "key"),
        ("alias", "key"),
    }


def test_the_bytes_seen_are_told(replayer: Replayer) -> None:
    layout = allocate(FAULTS[0].minimum, "fault:canary")
    (replayed,) = replayer.replay([layout])
    alias = next(finding for finding in replayed.findings if finding.rule == "alias")
    assert alias.message.endswith("; memory held 2 there after layer 0's key wrote 1")


def test_layouts_that_do_not_fit_lose_slots_and_say_so(host: Device) -> None:
    layout = allocate(replace(sound_spec(*SOUND[0]), slots=600), "trtllm-v2")
    limit = layout_bytes(layout) // 3
    (replayed,) = Replayer(host, max_bytes=limit).replay([layout])
    assert replayed.findings == ()
    assert 0 < replayed.layout.pools[0].slot_count < 600
    assert layout_bytes(replayed.layout) <= limit
    assert f"a replay in {limit} B holds fewer slots than asked for" in replayed.layout.notes[-1]
    (refused,) = Replayer(host, max_bytes=700).replay([layout])
    assert refused.digest is None
    assert refused.refusal is not None
    assert "needs at most 700 B" in refused.refusal
    assert "\n" not in refused.refusal


def test_a_refused_layout_does_not_stop_the_others(host: Device) -> None:
    good, broken = dense_layout(), dense_layout(buffers=(replace(dense_layout().buffers[0], pool=7),))
    results = list(Replayer(host, max_bytes=4096).replay([good, broken, good]))
    assert [result.refusal is None for result in results] == [True, False, True]
    assert results[0].digest == results[2].digest


def test_batches_are_cut_and_keep_their_order(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsan.kernels.replay.BATCH_LAYOUTS", 2)
    layouts = [dense_layout(pools=(Pool("target", 0, 0, 4, 16, 64 + extra),)) for extra in range(5)]
    results = list(Replayer(host).replay(layouts))
    assert [result.layout for result in results] == layouts
    assert [result.digest for result in results] == [Arena.build(layout).digest() for layout in layouts]


def test_memory_that_runs_out_is_one_line(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(size_bytes: int) -> None:
        raise MemoryError(f"no {size_bytes} B left")

    replayer = Replayer(host)
    monkeypatch.setattr(host, "allocate", none_left)
    (refused,) = replayer.replay([dense_layout()])
    assert refused.refusal is not None
    assert refused.refusal.startswith("memory: no ")


def test_no_two_accesses_of_a_lane_stand_for_the_same_bytes() -> None:
    layout = allocate(sound_spec(*SOUND[0]), "trtllm-v2")
    covered = 0
    for lane in plan_replay(layout).lanes:
        keys = [(layout.accesses[index].buffer, layout.accesses[index].part) for index in lane.accesses]
        assert len(keys) == len(set(keys))
        for buffer, part in keys:
            assert part < 0 or (buffer, -1) not in keys
        covered += len(keys)
    formulas = {replace(access, consumer="") for access in layout.accesses}
    assert covered == len(formulas)


def test_consumers_with_offsets_of_32_bits_are_tried_only_where_they_reach_past_them() -> None:
    layout = allocate(replace(sound_spec(*SOUND[0]), consumer=Consumer(offset_bits=32)), "trtllm-v2")
    assert plan_replay(layout).narrow == ()
    far = replace(layout.accesses[0], offset_bytes=(1 << 31) - 8)
    assert plan_replay(replace(layout, accesses=(far,))).narrow == (0,)


def test_tensors_are_the_buffers_bytes_without_a_copy(host: Device) -> None:
    """What torch writes through the strided view of a buffer is where the layout says."""
    page = strided_page(ElementFormat.BF16, ("head", "token"), (2, 3), (12, 4))
    buffer = Buffer("target", 0, "key", 0, 0, 8, 64, 3, 24, page)
    pool = allocate_pool(host, Pool("target", 0, 0, 3, 64, 192))
    host.write(pool.base, np.zeros(192, dtype=np.uint8))
    tensor = strided(host, pool, buffer)
    assert (tuple(tensor.shape), tensor.stride()) == ((3, 2, 3), (32, 6, 2))
    tensor[:] = 0x0101
    held = host.download(pool.base, 192)
    expected = np.zeros(192, dtype=np.uint8)
    for slot in range(3):
        for head in range(2):
            for token in range(3):
                start = 8 + 64 * slot + 12 * head + 4 * token
                expected[start : start + 2] = 1
    assert (held == expected).all()


@pytest.mark.parametrize(("kind", "words"), [("tpu", "found 'tpu', needs cpu or cuda"), ("cuda", "")])
def test_devices_that_cannot_be_opened_are_one_line(host: Device, kind: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        open_device(kind)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_packages_are_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torch", "triton"):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, missing=package: None if name == missing else 1)
        with pytest.raises(SpecError, match=f"needs the package {package}, .*pip install 'kvsan"):
            open_device("cpu")


def test_fitting_cuts_until_it_fits() -> None:
    layout = allocate(replace(sound_spec(*SOUND[0]), slots=5000, state_slots=900), "trtllm-v2")
    for limit in (1 << 20, 1 << 18, 1 << 16):
        assert layout_bytes(fitted(layout, limit).layout) <= limit


def test_launches_do_not_grow_with_the_layouts_of_a_batch(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    stamp = launch.stamp

    def counted(anchor: launch.Anchor, rows: list[launch.Uploaded], digit: int) -> None:
        calls.append(len(rows))
        stamp(anchor, rows, digit)

    monkeypatch.setattr(launch, "stamp", counted)
    counts = []
    for number in (1, 6):
        calls.clear()
        list(Replayer(host).replay([dense_layout()] * number))
        counts.append(sum(calls))
    assert counts[0] == counts[1]
