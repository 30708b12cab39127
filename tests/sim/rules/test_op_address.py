from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from kvsan.sim.finding import Finding
from kvsan.sim.layout import Layout

Change = Callable[..., Layout]
Found = Callable[[str, Layout], list[Finding]]
Place = Callable[..., int]


def test_sound_layouts_are_silent(sound_layout: Layout, found: Found) -> None:
    assert found("op-address", sound_layout) == []


def test_every_access_counts(sound_layout: Layout, change: Change, found: Found) -> None:
    """One byte off, another pitch, another pool: found wherever it is, once, with both values."""
    for index, access in enumerate(sound_layout.accesses):
        start, pitch, count = access.offset_bytes, access.pitch_bytes, access.cell_count
        for wrong in (start - 1, start + 1):
            findings = found("op-address", change(sound_layout, "accesses", index, offset_bytes=wrong))
            assert len(findings) == 1
            assert f"reaches byte {wrong} of" in findings[0].message
            assert f"in slot 0, where the storage has it at byte {start}" in findings[0].message
        if count == 1:
            continue
        findings = found("op-address", change(sound_layout, "accesses", index, pitch_bytes=pitch + 2))
        assert len(findings) == 1
        assert f"reaches byte {start + pitch + 2} of" in findings[0].message
        assert f"in slot 1, where the storage has it at byte {start + pitch}" in findings[0].message
        pool = (access.pool + 1) % len(sound_layout.pools)
        if pool != access.pool:
            assert len(found("op-address", change(sound_layout, "accesses", index, pool=pool))) == 1


def test_the_page_that_is_read_instead(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    """A floored mapping offset: the attention op takes the page before for the layer's K."""
    layout = sound["v2-dense"]
    index = place(layout, 1, "key", "attention-op")
    findings = found("op-address", change(layout, "accesses", index, offset_bytes=512))
    assert [finding.message for finding in findings] == [
        "the attention-op of layer 1's key reaches byte 512 of pool 0 of group 0 in slot 0, where the storage has it "
        "at byte 1024, and reads byte 0 of layer 0's value of slot 0"
    ]
    where = findings[0].where[0]
    assert (where.layer, where.role, where.consumer, where.first_byte) == (1, "key", "attention-op", 1024)


def test_nobodys_page(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    layout = sound["v2-dense"]
    index = place(layout, 1, "key", "attention-op")
    findings = found("op-address", change(layout, "accesses", index, offset_bytes=9216))
    assert findings[0].message.endswith("byte 1024, and reads nobody's page")


def test_a_page_of_another_size(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    """The op computes its page from its own geometry: one head more, and the page is longer."""
    layout = sound["v2-dense"]
    index = place(layout, 1, "key", "attention-op")
    page = layout.accesses[index].page
    longer = msgspec.structs.replace(page, shape=(3, *page.shape[1:]), span_bytes=768)
    findings = found("op-address", change(layout, "accesses", index, page=longer))
    assert findings[0].message == (
        "the attention-op of layer 1's key reaches a page of 768 B, where the storage has one of 512 B"
    )


def test_the_name_of_an_axis_is_no_address(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place
) -> None:
    layout = sound["v2-dense"]
    index = place(layout, 1, "key", "attention-op")
    page = layout.accesses[index].page
    renamed = msgspec.structs.replace(page, axes=("token", "head", "dim"))
    assert found("op-address", change(layout, "accesses", index, page=renamed)) == []


def test_a_plane_inside_a_packed_buffer(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place
) -> None:
    layout = sound["packed-nvfp4"]
    index = next(at for at, access in enumerate(layout.accesses) if access.part == 1)
    findings = found("op-address", change(layout, "accesses", index, part=0))
    assert len(findings) == 1
    assert "the side-plane-view of layer 1's index_key reaches byte 8192" in findings[0].message
    assert "where the storage has it at byte 0" in findings[0].message
    buffer = place(layout, 1, "side_planes")
    parts = layout.buffers[buffer].parts
    swapped = (
        msgspec.structs.replace(parts[0], offset_bytes=8192),
        msgspec.structs.replace(parts[1], offset_bytes=0),
        parts[2],
    )
    assert len(found("op-address", change(layout, "buffers", buffer, parts=swapped))) == 2


def test_every_other_slot(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    """A dense view of K/V pairs over an odd number of pages per slot: only even slots are whole rows."""
    layout = sound["v2-dense"]
    index = place(layout, 0, "key", "kv-view")
    even = change(layout, "accesses", index, first_slot=0, slot_step=2, cell_count=2, pitch_bytes=6144)
    assert found("op-address", even) == []
    assert [finding.message for finding in found("record-layout", even)] == [
        "the kv-view of layer 0's key has cells for 2 slots, and the buffer has 3"
    ]
    rest = msgspec.structs.replace(even.accesses[index], first_slot=1, cell_count=1, offset_bytes=3072)
    both = msgspec.structs.replace(even, accesses=(*even.accesses, rest))
    assert found("op-address", both) + found("record-layout", both) == []
    odd = change(both, "accesses", len(even.accesses), offset_bytes=2560)
    findings = found("op-address", odd)
    assert "in slot 1, where the storage has it at byte 3072, and reads byte 0 of layer 2's value of slot 0" in (
        findings[0].message
    )


@pytest.mark.parametrize("consumer", ["state-view"])
@pytest.mark.parametrize("name", ["v1-hybrid", "v2-halves", "packed-fp8"])
def test_states_are_reached_too(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place, name: str, consumer: str
) -> None:
    layout = sound[name]
    for role in ("ssm_state", "conv_state"):
        index = place(layout, 0, role, consumer)
        findings = found(
            "op-address", change(layout, "accesses", index, pitch_bytes=layout.accesses[index].page.span_bytes - 2)
        )
        assert f"the state-view of layer 0's {role}" in findings[0].message
