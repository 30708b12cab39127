"""The byte arena: owner numbers, passes, predicted bytes, and memory bounded before it is taken."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsan.model.errors import SpecError
from kvsan.model.formats import ElementFormat
from kvsan.model.layers import INDEX_KEY, INDEX_POSITION, AttentionLayer, RecurrentLayer, SidePlane
from kvsan.model.spec import CacheSpec
from kvsan.sim.arena import Arena, arena_bytes, arena_findings, owner_table, with_fewer_slots
from kvsan.sim.arena import memory as arena_memory
from kvsan.sim.arena.fold import fold
from kvsan.sim.checking import check
from kvsan.sim.layout import Access, Buffer, Layout, LifeCycle, Part, Pool
from kvsan.sim.page import Page, dense_page, strided_page
from kvsan.sim.registry import allocate

replace = msgspec.structs.replace
UINT8 = ElementFormat.UINT8
STATE = RecurrentLayer(algorithm="gdn", heads=2, head_dim=4, groups=2, state_dim=4)


def page(size: int) -> Page:
    return dense_page(UINT8, ("byte",), (size,))


def layout_of(*buffers: Buffer, slots: int = 4, slot_bytes: int = 16, cycles: int = 1) -> Layout:
    """Return a layout of one pool; its life cycles are of one group."""
    return Layout(
        allocator="raw",
        pools=(Pool("target", 0, 0, slots, slot_bytes, slots * slot_bytes),),
        life_cycles=(LifeCycle("target", 0),) * cycles,
        buffers=buffers,
        accesses=tuple(right_access(index, buffer) for index, buffer in enumerate(buffers)),
    )


def buffer_of(layer: int, offset: int, size: int, *, slots: int = 4, stride: int = 16, cycle: int = 0) -> Buffer:
    return Buffer("target", layer, "key", cycle, 0, offset, stride, slots, size, page(size))


def right_access(index: int, buffer: Buffer) -> Access:
    return Access("view", index, 0, buffer.offset_bytes, buffer.slot_stride_bytes, buffer.slot_count, buffer.page)


def hybrid_spec(**fields: object) -> CacheSpec:
    planes = (
        SidePlane(role=INDEX_KEY, dim=128, format=ElementFormat.BF16),
        SidePlane(role=INDEX_POSITION, dim=3, format=ElementFormat.INT32, scope="rank"),
    )
    attention = AttentionLayer(kv_heads=2, head_dim=128, side_planes=planes)
    defaults = {"layers": (STATE, attention) * 3, "kv_format": ElementFormat.FP8, "tokens_per_block": 2, "slots": 3}
    return CacheSpec(**{**defaults, **fields})


def brute_numbers(layout: Layout, *, cycles: set[int]) -> list[list[int]]:
    """Return the owner number of every byte of every pool, by plain enumeration in the order of the buffers."""
    numbers = [[0] * pool.size_bytes for pool in layout.pools]
    number = 0
    for buffer in layout.buffers:
        planes = [(part.offset_bytes, part.page) for part in buffer.parts] or [(0, buffer.page)]
        for offset, held in planes:
            for slot in range(buffer.slot_count):
                number += 1
                start = buffer.offset_bytes + offset + slot * buffer.slot_stride_bytes
                for index in itertools.product(*map(range, held.shape)) if buffer.life_cycle in cycles else ():
                    first = start + sum(x * stride for x, stride in zip(index, held.stride_bytes, strict=True))
                    for byte in range(held.format.container_bytes):
                        numbers[buffer.pool][first + byte] = number
    return numbers


# What the memory holds


@pytest.mark.parametrize("kv_format", [ElementFormat.FP8, ElementFormat.BF16])
def test_every_byte_holds_the_digits_of_its_owner(kv_format: ElementFormat) -> None:
    layout = allocate(hybrid_spec(slots=25, kv_format=kv_format), "trtllm-v2-qsa-packed")
    arena = Arena.build(layout)
    numbers = brute_numbers(layout, cycles=set(range(len(layout.life_cycles))))
    assert max(map(max, numbers)) > 255, "two digits are needed"
    assert arena.passes == ((0, 0), (0, 1))
    for (number, (_, digit)), pool in itertools.product(enumerate(arena.passes), range(len(layout.pools))):
        expected = [owner >> 8 * digit & 255 for owner in numbers[pool]]
        assert arena.predicted_bytes(number, pool).tolist() == expected
    assert arena.findings() == []


def test_padding_keeps_zero_in_every_pass() -> None:
    arena = Arena.build(layout_of(buffer_of(0, 2, 4), buffer_of(1, 8, 3)))
    held = arena.predicted_bytes(0, 0).reshape(4, 16)
    assert (held[:, [0, 1, 6, 7, 11, 12, 13, 14, 15]] == 0).all()
    assert (held[:, 2:6] == np.array([[1], [2], [3], [4]])).all()
    assert (held[:, 8:11] == np.array([[5], [6], [7], [8]])).all()


def test_scattered_pages_own_every_second_byte() -> None:
    even = strided_page(UINT8, ("byte",), (4,), (2,))
    buffers = (
        Buffer("target", 0, "key", 0, 0, 0, 8, 2, 4, even),
        Buffer("target", 0, "value", 0, 0, 1, 8, 2, 4, even),
    )
    layout = layout_of(*buffers, slots=2, slot_bytes=8)
    assert Arena.build(layout).predicted_bytes(0, 0).tolist() == [1, 3] * 4 + [2, 4] * 4
    assert arena_findings(layout) == []


def test_parts_own_the_bytes_of_a_packed_buffer() -> None:
    packed = replace(buffer_of(0, 0, 8), parts=(Part(0, "p", 0, page(5)), Part(1, "q", 5, page(3))))
    arena = Arena.build(layout_of(packed))
    assert arena.predicted_bytes(0, 0)[:8].tolist() == [1] * 5 + [5] * 3
    assert [(owner.part, owner.first_number) for owner in arena.table.owners] == [(0, 1), (1, 5)]


def brute_fold(held: bytes) -> int:
    """The documented sum, in plain integers."""
    total = 0
    for index in range(0, len(held), 4):
        word = int.from_bytes(held[index : index + 4], "little")
        mixed = index // 4 + 1
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        total += (word + 1) * ((mixed ^ mixed >> 31) | 1)
    return total % 2**64


@given(held=st.binary(max_size=70))
def test_folds_are_the_documented_sum_and_add_up(held: bytes) -> None:
    memory = np.frombuffer(held, dtype=np.uint8)
    assert fold(memory) == brute_fold(held)
    parts = [fold(memory[start : start + 8], start // 4) for start in range(0, len(held), 8)]
    assert sum(parts) % 2**64 == brute_fold(held)


def test_digest_is_that_of_the_documented_bytes() -> None:
    layout = allocate(hybrid_spec(slots=30, state_slots=2), "trtllm-v2-qsa-packed")
    arena = Arena.build(layout)
    state = hashlib.blake2b(digest_size=16)
    for pool, held in enumerate(brute_numbers(layout, cycles={0, 1})):
        for digit in (0, 1):
            value = brute_fold(bytes(owner >> 8 * digit & 255 for owner in held))
            state.update(f"pool {pool} {len(held)} 0 {digit} {value:016x}\n".encode())
    assert arena.digest() == state.hexdigest()
    moved = replace(layout, buffers=(replace(layout.buffers[0], offset_bytes=1), *layout.buffers[1:]))
    assert Arena.build(moved).digest() != arena.digest()


def test_consumers_write_what_the_storage_predicts() -> None:
    layout = allocate(hybrid_spec(), "trtllm-v2-qsa-packed")
    arena = Arena.build(layout)
    consumers = dict.fromkeys(access.consumer for access in layout.accesses)
    for number, pool in itertools.product(range(len(arena.passes)), range(len(layout.pools))):
        predicted = arena.predicted_bytes(number, pool)
        written = [arena.consumer_bytes(consumer, number, pool) for consumer in consumers]
        assert all((held[held != 0] == predicted[held != 0]).all() for held in written)
        assert (np.maximum.reduce(written) == predicted).all()


def test_a_stray_consumer_writes_other_bytes() -> None:
    layout = layout_of(buffer_of(0, 0, 4), buffer_of(1, 4, 4))
    layout = replace(layout, accesses=(replace(layout.accesses[0], offset_bytes=4),))
    arena = Arena.build(layout)
    assert arena.consumer_bytes("view", 0, 0)[:8].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert arena.predicted_bytes(0, 0)[:8].tolist() == [1, 1, 1, 1, 5, 5, 5, 5]


# Who may share bytes


def overlaid(*, second_stride: int = 16) -> Layout:
    """Two life cycles of one group over one pool; the second cuts its slots into two buffers, the first does not."""
    return layout_of(
        buffer_of(0, 0, 16),
        buffer_of(1, 0, 8, cycle=1, stride=second_stride),
        buffer_of(2, 8, 8, cycle=1, stride=second_stride),
        cycles=2,
    )


def test_life_cycles_of_a_group_overlay_each_other_at_equal_slots() -> None:
    arena = Arena.build(overlaid())
    assert arena.findings() == []
    assert not arena.contested(0).any()
    assert arena.passes == ((0, 0), (1, 0), (2, 0))
    per_slot = [arena.predicted_bytes(number, 0)[:32:8].tolist() for number in range(3)]
    assert per_slot == [[1, 1, 2, 2], [5, 9, 6, 10], [1, 1, 2, 2]]


def test_life_cycles_of_a_group_must_not_meet_at_different_slots() -> None:
    layout = overlaid(second_stride=8)  # slot 1 of the second lies in slot 0 of the first
    found = arena_findings(layout)
    assert {finding.rule for finding in found} == {"alias"} == {finding.rule for finding in check(layout)} - {"stride"}
    assert "layer 0's key (slot 0) and layer 1's key (slot 1) share byte 8" in found[-1].message + found[0].message
    assert Arena.build(layout).contested(0)[8:16].all()


def test_life_cycles_of_different_groups_must_not_meet_at_all() -> None:
    layout = overlaid()
    layout = replace(layout, life_cycles=(LifeCycle("target", 0), LifeCycle("target", 1)))
    assert {finding.rule for finding in arena_findings(layout)} == {"alias"}


def test_numbers_that_agree_in_their_low_digit_are_told_apart() -> None:
    first, second = buffer_of(0, 0, 4, slots=256), buffer_of(1, 4, 4, slots=256)
    layout = layout_of(first, replace(second, offset_bytes=3), slots=256)
    arena = Arena.build(layout)
    numbers = [owner.first_number for owner in arena.table.owners]
    assert numbers == [1, 257]
    assert numbers[0] % 256 == numbers[1] % 256
    (finding,) = arena.findings()[:1]
    assert finding.message == check(layout)[0].message
    assert "layer 0's key (slot 0) and layer 1's key (slot 0) share byte 3 of pool 0 of group 0" in finding.message


def test_contested_bytes_are_those_that_two_live_cells_own() -> None:
    layout = layout_of(buffer_of(0, 0, 6), buffer_of(1, 4, 6))
    assert np.flatnonzero(Arena.build(layout).contested(0)).tolist() == [
        16 * slot + x for slot in range(4) for x in (4, 5)
    ]


@pytest.mark.parametrize(
    ("changed", "rule", "words"),
    [
        (
            {"offset_bytes": 4},
            "op-address",
            "reaches byte 4 of pool 0 of group 0 in slot 0, where the storage has it at byte 0",
        ),
        (
            {"pitch_bytes": 8},
            "op-address",
            "reaches byte 8 of pool 0 of group 0 in slot 1, where the storage has it at byte 16",
        ),
        ({"page": page(3)}, "op-address", "reaches a page of 3 B, where the storage has one of 4 B"),
        ({"page": page(6)}, "alias", "reaches byte 4 of pool 0 of group 0, which belongs to layer 1's key in slot 0"),
        ({"cell_count": 5}, "bounds", "in slot 4 reaches bytes 64 to 68 of pool 0 of group 0, which has 64 B"),
        ({"offset_bytes": -1}, "bounds", "in slot 0 reaches bytes -1 to 3"),
    ],
)
def test_a_consumer_that_reaches_other_bytes_is_found(changed: dict[str, object], rule: str, words: str) -> None:
    layout = layout_of(buffer_of(0, 0, 4), buffer_of(1, 4, 4))
    access = replace(layout.accesses[0], **changed)
    found = arena_findings(replace(layout, accesses=(access, layout.accesses[1])))
    (finding,) = [finding for finding in found if finding.rule == rule]
    assert words in finding.message
    assert finding.where[0].consumer == "view"
    assert finding.remedy


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (buffer_of(0, 14, 4), "layer 0's key takes bytes 62 to 66 in slot 3"),
        (buffer_of(0, 0, 4, slots=5), "takes bytes 64 to 68 in slot 4 (4 B reserved, 5 slots)"),
        (replace(buffer_of(0, 0, 4), page_bytes=3), "(3 B reserved, 4 slots)"),
    ],
)
def test_a_buffer_that_leaves_its_pool_its_slots_or_its_page_is_found(buffer: Buffer, words: str) -> None:
    (finding,) = arena_findings(replace(layout_of(buffer), accesses=()))
    assert finding.rule == "bounds"
    assert words in finding.message


def test_memory_that_differs_from_the_table_of_owners_is_never_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    real = arena_memory.write

    def also_into_padding(memory, view, cells, values):  # type: ignore[no-untyped-def]
        real(memory, view, cells, values)
        memory[15] = 7

    monkeypatch.setattr(arena_memory, "write", also_into_padding)
    (finding,) = arena_findings(replace(layout_of(buffer_of(0, 0, 4)), accesses=()))
    assert finding.rule == "replay-mismatch"
    assert "byte 15 of pool 0 of group 0 holds 7" in finding.message


def test_findings_are_limited_by_rule() -> None:
    buffers = [buffer_of(layer, 0, 4) for layer in range(30)]
    assert len(Arena.build(layout_of(*buffers)).findings(limit=3)) == 3


# Memory


def test_a_layout_that_fits_is_left_alone() -> None:
    layout = layout_of(buffer_of(0, 0, 4))
    assert with_fewer_slots(layout, arena_bytes(layout)) is layout


def test_slot_major_pools_lose_slots_and_keep_their_strides() -> None:
    layout = layout_of(buffer_of(0, 0, 4, slots=1 << 30), buffer_of(1, 4, 4, slots=1 << 30), slots=1 << 30)
    cut = with_fewer_slots(layout, 1 << 16)
    assert 1 < cut.pools[0].slot_count < 4096
    assert arena_bytes(cut) <= 1 << 16
    assert cut.pools[0].size_bytes == cut.pools[0].slot_count * 16
    assert {buffer.slot_count for buffer in cut.buffers} == {cut.pools[0].slot_count}
    assert {access.cell_count for access in cut.accesses} == {cut.pools[0].slot_count}
    assert [buffer.offset_bytes for buffer in cut.buffers] == [0, 4]
    assert {buffer.slot_stride_bytes for buffer in cut.buffers} == {16}
    assert "instead of 1073741824" in cut.notes[-1]
    assert arena_findings(layout, max_bytes=1 << 16) == []


def test_layer_major_states_are_laid_out_again_for_fewer_slots() -> None:
    spec = CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=16), STATE, STATE), slots=4, state_slots=100_000)
    layout = allocate(spec, "trtllm-v1")
    cut = with_fewer_slots(layout, 1 << 20)
    states = cut.pools[1].slot_count
    assert 1 < states < 100_000
    assert replace(cut, notes=(), spec=None) == replace(
        allocate(replace(spec, state_slots=states), "trtllm-v1"), notes=(), spec=None
    )
    assert cut.buffers[-1].offset_bytes < layout.buffers[-1].offset_bytes
    assert cut.pools[0].slot_count == 4, "pools that fit keep their slots"
    assert arena_findings(layout, max_bytes=1 << 20) == []


def test_a_quota_is_cut_too() -> None:
    spec = hybrid_spec(slots=None, quota_bytes=1 << 30)
    layout = allocate(spec, "trtllm-v2-qsa-packed")
    arena = Arena.build(layout, max_bytes=1 << 20)
    assert max(pool.slot_count for pool in arena.layout.pools) < min(pool.slot_count for pool in layout.pools)
    assert arena.findings() == []


def test_a_planted_fault_survives_the_cut() -> None:
    layout = allocate(CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=16),) * 2, slots=10_000), "trtllm-v2")
    stray = replace(layout.accesses[0], offset_bytes=layout.accesses[0].offset_bytes + 2)
    planted = replace(layout, accesses=(stray, *layout.accesses[1:]))
    cut = with_fewer_slots(planted, 1 << 16)
    assert cut.pools[0].slot_count < 10_000
    assert {finding.rule for finding in arena_findings(planted, max_bytes=1 << 16)} >= {"op-address"}


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (layout_of(buffer_of(0, 0, 1 << 40, slots=1, stride=1 << 40), slots=1, slot_bytes=1 << 40), "not one fits"),
        (
            layout_of(buffer_of(0, 0, 4, slots=1 << 30, stride=4), slots=1 << 30, slot_bytes=8),
            "found pools whose bytes need",
        ),
    ],
)
def test_what_cannot_be_cut_down_is_refused_in_one_line(layout: Layout, words: str) -> None:
    with pytest.raises(SpecError) as refusal:
        Arena.build(layout)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("gaps", [False, True])
def test_memory_stays_below_the_bound(gaps: bool) -> None:
    held = strided_page(UINT8, ("row", "byte"), (64, 32), (64, 1)) if gaps else page(4096)
    size = held.span_bytes
    buffers = [Buffer("target", n, "key", 0, 0, n * size, size * 8, 200, size, held) for n in range(8)]
    layout = layout_of(*buffers, slots=200, slot_bytes=size * 8)
    bound = 2 << 20
    tracemalloc.start()
    try:
        arena = Arena.build(layout, max_bytes=bound)
        arena.findings()
        arena.digest()
        arena.predicted_bytes(0, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 1 < arena.layout.pools[0].slot_count < 200
    assert arena_bytes(arena.layout) <= bound
    assert peak < bound + (1 << 18), "the layout's own objects, and no more"


def test_owner_numbers_start_at_one_and_never_repeat() -> None:
    layout = allocate(hybrid_spec(), "trtllm-v2-qsa-packed")
    table = owner_table(layout)
    numbers = [owner.first_number + slot for owner in table.owners for slot in range(owner.view.count)]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


def test_a_layout_that_refers_to_nothing_is_refused() -> None:
    layout = layout_of(buffer_of(0, 0, 4))
    with pytest.raises(SpecError, match="pool"):
        Arena.build(replace(layout, pools=()))


def test_checking_does_not_import_numpy() -> None:
    program = (
        "import sys, kvsan.sim.checking, kvsan.sim.registry as registry\n"
        "from kvsan.model.layers import AttentionLayer\n"
        "from kvsan.model.spec import CacheSpec\n"
        "layout = registry.allocate(CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=16),)))\n"
        "kvsan.sim.checking.check(layout)\n"
        "print('numpy' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
