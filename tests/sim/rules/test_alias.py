from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from kvsan.model.formats import ElementFormat
from kvsan.sim.finding import Finding
from kvsan.sim.layout import Access, Buffer, Layout, LifeCycle, Pool
from kvsan.sim.page import dense_page, strided_page

Change = Callable[..., Layout]
Found = Callable[[str, Layout], list[Finding]]
Place = Callable[..., int]

UINT8 = ElementFormat.UINT8


def raw(*members: tuple[str, int, int, int, int], groups: Mapping[int, int] | None = None, size: int = 1024) -> Layout:
    """Return one pool with buffers of (role, life cycle, offset, pitch, page bytes), 4 slots each."""
    groups = groups or {}
    cycles = 1 + max(cycle for _, cycle, *_ in members)
    return Layout(
        allocator="raw",
        pools=(Pool("target", 0, 0, 4, size >> 2, size),),
        life_cycles=tuple(LifeCycle("target", groups.get(cycle, 0)) for cycle in range(cycles)),
        buffers=tuple(
            Buffer("target", 0, role, cycle, 0, offset, pitch, 4, page, dense_page(UINT8, ("byte",), (page,)))
            for role, cycle, offset, pitch, page in members
        ),
    )


def test_sound_layouts_are_silent(sound_layout: Layout, found: Found) -> None:
    assert found("alias", sound_layout) == []


def test_two_roles_in_one_slot_name_the_smallest_shared_byte(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place
) -> None:
    layout = msgspec.structs.replace(sound["v2-dense"], accesses=())
    findings = found("alias", change(layout, "buffers", place(layout, 1, "key"), offset_bytes=1023))
    assert [finding.message for finding in findings] == [
        "layer 0's value (slot 0) and layer 1's key (slot 0) share byte 1023 of pool 0 of group 0, and both may be live"
    ]
    assert [(where.layer, where.role, where.slot, where.first_byte) for where in findings[0].where] == [
        (0, "value", 0, 1023),
        (1, "key", 0, 1023),
    ]


@pytest.mark.parametrize(
    "name", ["v1-windows", "v2-dense", "v2-per-layer", "v2-latent", "packed-bf16", "packed-fp8", "packed-nvfp4"]
)
def test_every_page_moved_by_one_element_meets_a_neighbour(
    sound: Mapping[str, Layout], change: Change, found: Found, name: str
) -> None:
    layout = msgspec.structs.replace(sound[name], accesses=())
    for index, buffer in enumerate(layout.buffers):
        if buffer.page_bytes == layout.pools[buffer.pool].slot_bytes:
            continue  # alone in its slot: moving it leaves the pool, which is no alias
        step = buffer.page.format.container_bytes
        moved = [change(layout, "buffers", index, offset_bytes=buffer.offset_bytes + sign * step) for sign in (-1, 1)]
        assert any(found("alias", each) for each in moved), (name, index)


def test_a_page_that_reaches_into_the_next_slot(found: Found) -> None:
    assert found("alias", raw(("key", 0, 0, 100, 50), ("value", 0, 50, 100, 50))) == []
    findings = found("alias", raw(("key", 0, 0, 100, 50), ("value", 0, 51, 100, 50)))
    assert [finding.message for finding in findings] == [
        "layer 0's key (slot 1) and layer 0's value (slot 0) share byte 100 of pool 0 of group 0, and both may be live"
    ]


def test_different_pitches_meet_slots_later(found: Found) -> None:
    """Disjoint in slot 0 and 1; 4 slots of 90 B against 4 slots of 60 B meet in slots 2 and 3."""
    findings = found("alias", raw(("key", 0, 0, 90, 20), ("value", 0, 20, 60, 20)))
    expected = [
        byte
        for byte in range(400)
        if any(0 <= byte - 90 * s < 20 for s in range(4)) and any(0 <= byte - 20 - 60 * s < 20 for s in range(4))
    ]
    assert expected
    assert f"share byte {expected[0]} of" in findings[0].message


def test_a_state_and_a_page_of_other_groups_may_meet_at_any_slots(found: Found) -> None:
    """A recurrent state beside K pages in one pool: slot counts and slot ids are independent."""
    apart = (("key", 0, 0, 64, 32), ("ssm_state", 1, 32, 64, 32))
    assert found("alias", raw(*apart, groups={1: 1})) == []
    meet = (("key", 0, 0, 64, 32), ("ssm_state", 1, 31, 64, 32))
    findings = found("alias", raw(*meet, groups={1: 1}))
    assert "layer 0's key (slot 0) and layer 0's ssm_state (slot 0) share byte 31" in findings[0].message


def test_life_cycles_of_one_group_may_overlay_equal_slots_only(found: Found) -> None:
    same = (("key", 0, 0, 64, 64), ("value", 1, 0, 64, 64))
    assert found("alias", raw(*same)) == []  # one slot id, one owner at a time
    assert found("alias", raw(*same, groups={1: 1}))  # two allocators may hand out the same id
    shifted = (("key", 0, 0, 64, 64), ("value", 1, 1, 64, 64))
    findings = found("alias", raw(*shifted))
    assert "(slot 1) and layer 0's value (slot 0) share byte 64" in findings[0].message


def test_merged_life_cycles_are_told_from_separate_ones(
    sound: Mapping[str, Layout], change: Change, found: Found
) -> None:
    layout = sound["v2-windows"]
    assert {cycle.group for cycle in layout.life_cycles} == {0}  # merged: same memory, one slot allocator
    findings = found("alias", change(layout, "life_cycles", 1, group=1))
    assert findings
    assert "both may be live" in findings[0].message


def test_layer_major_states_never_meet(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    layout = msgspec.structs.replace(sound["v1-hybrid"], accesses=())
    index = place(layout, 2, "ssm_state")
    start = layout.buffers[index].offset_bytes
    findings = found("alias", change(layout, "buffers", index, offset_bytes=start - 4))
    assert f"share byte {start - 4} of" in findings[0].message
    assert [(where.layer, where.role) for where in findings[0].where] == [(0, "conv_state"), (2, "ssm_state")]
    assert [where.slot for where in findings[0].where] == [1, 0]  # the last block of one layer, the first of the next


def test_a_buffer_that_overlaps_itself(found: Found) -> None:
    findings = found("alias", raw(("key", 0, 0, 31, 32)))
    assert [finding.message for finding in findings] == [
        "layer 0's key overlaps itself: slot 0 and slot 1 share byte 31 of pool 0 of group 0"
    ]
    assert found("alias", raw(("key", 0, 0, 0, 32)))  # a pitch of 0 gives every slot the same page
    layout = raw(("key", 0, 0, 64, 32))
    crossed = strided_page(UINT8, ("token", "dim"), (4, 4), (3, 1))
    buffer = layout.buffers[0]
    findings = found("alias", msgspec.structs.replace(layout, buffers=(msgspec.structs.replace(buffer, page=crossed),)))
    assert "slot 0 element (0, 3) and slot 0 element (1, 0) share byte 3" in findings[0].message
    meant = msgspec.structs.replace(crossed, self_overlap=True)
    assert found("alias", msgspec.structs.replace(layout, buffers=(msgspec.structs.replace(buffer, page=meant),))) == []


def test_pages_scattered_over_a_slot_may_interleave(found: Found) -> None:
    """Rows of K and V that alternate: byte ranges meet, bytes do not."""
    layout = raw(("key", 0, 0, 64, 32), ("value", 0, 4, 64, 32))
    rows = strided_page(UINT8, ("token", "dim"), (4, 4), (8, 1))
    buffers = tuple(msgspec.structs.replace(buffer, page=rows) for buffer in layout.buffers)
    assert found("alias", msgspec.structs.replace(layout, buffers=buffers)) == []
    buffers = (buffers[0], msgspec.structs.replace(buffers[1], offset_bytes=3))
    findings = found("alias", msgspec.structs.replace(layout, buffers=buffers))
    assert "share byte 3 of" in findings[0].message


def test_planes_of_a_packed_page(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    layout = sound["packed-nvfp4"]
    index = place(layout, 1, "side_planes")
    parts = layout.buffers[index].parts
    moved = (parts[0], msgspec.structs.replace(parts[1], offset_bytes=8190), parts[2])
    findings = found("alias", change(layout, "buffers", index, parts=moved))
    messages = [finding.message for finding in findings if "packed" in finding.message]
    assert len(messages) == 1
    assert "layer 1's index_key" in messages[0]
    assert "layer 3's index_key" in messages[0]
    assert "share byte 8190 of" in messages[0]


def test_a_stray_access_names_its_victim(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place
) -> None:
    """The attention op finds layer 1's K where layer 0's V lies."""
    layout = sound["v2-dense"]
    findings = found("alias", change(layout, "accesses", place(layout, 1, "key", "attention-op"), offset_bytes=512))
    assert [finding.message for finding in findings] == [
        "the attention-op of layer 1's key in slot 0 reaches byte 512 of pool 0 of group 0, which belongs to "
        "layer 0's value in slot 0"
    ]


def test_a_stray_pitch_meets_the_own_buffer_in_other_slots(found: Found) -> None:
    layout = raw(("key", 0, 0, 64, 32))
    page = layout.buffers[0].page
    assert found("alias", msgspec.structs.replace(layout, accesses=(Access("op", 0, 0, 0, 64, 4, page),))) == []
    findings = found("alias", msgspec.structs.replace(layout, accesses=(Access("op", 0, 0, 0, 32, 4, page),)))
    assert [finding.message for finding in findings] == [
        "the op of layer 0's key in slot 2 reaches byte 64 of pool 0 of group 0, which belongs to "
        "layer 0's key in slot 1"
    ]
