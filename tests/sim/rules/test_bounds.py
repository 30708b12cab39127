from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from kvsan.sim.finding import Finding
from kvsan.sim.layout import Layout

Change = Callable[..., Layout]
Found = Callable[[str, Layout], list[Finding]]
Place = Callable[..., int]


def test_sound_layouts_are_silent(sound_layout: Layout, found: Found) -> None:
    assert found("bounds", sound_layout) == []


# A v2-dense slot holds 3 layers of K and V pages of 2 heads x 4 tokens x 32 bf16 = 512 B: 3072 B, 3 slots, 9216 B.


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"offset_bytes": 2562}, "layer 2's value takes bytes 2562 to 3074 of its first slot"),
        ({"offset_bytes": -1}, "layer 2's value takes bytes -1 to 511 of its first slot"),
        ({"offset_bytes": 3072}, "takes bytes 3072 to 3584 of its first slot"),
        ({"slot_count": 4}, "4 slots, bytes 2560 to 12288 in all"),
        ({"page_bytes": 511}, "511 B reserved"),
        ({"slot_stride_bytes": 3074}, "bytes 2560 to 9220 in all"),
        ({"slot_stride_bytes": -3072}, "layer 2's value"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_buffer_that_leaves_its_slot_or_pool(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place, values: dict[str, int], words: str
) -> None:
    layout = msgspec.structs.replace(sound["v2-dense"], accesses=())  # the storage alone, as a raw layout gives it
    findings = found("bounds", change(layout, "buffers", place(layout, 2, "value"), **values))
    assert len(findings) == 1
    assert words in findings[0].message
    assert "pool 0 of group 0 has 3 slots of 3072 B, 9216 B in all" in findings[0].message
    assert (findings[0].where[0].layer, findings[0].where[0].role) == (2, "value")


def test_a_pool_with_too_few_bytes_for_its_slots(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    layout = msgspec.structs.replace(sound["v2-dense"], accesses=())
    findings = found("bounds", change(layout, "pools", 0, size_bytes=9215))
    assert findings
    assert "9215 B" in findings[0].message


@pytest.mark.parametrize("name", ["v1-hybrid", "v2-dense", "packed-nvfp4", "v2-latent"])
def test_the_last_byte_of_a_buffer_is_its_limit(
    sound: Mapping[str, Layout], change: Change, found: Found, name: str
) -> None:
    layout = msgspec.structs.replace(sound[name], accesses=())
    for pool in range(len(layout.pools)):
        ends = [
            (held.offset_bytes + held.page.span_bytes, index)
            for index, held in enumerate(layout.buffers)
            if held.pool == pool
        ]
        last = max(ends)[1]
        assert found("bounds", change(layout, "buffers", last, offset_bytes=layout.buffers[last].offset_bytes + 1))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"offset_bytes": -2}, "reaches bytes -2 to 6654"),
        ({"offset_bytes": 2562}, "reaches bytes 2562 to 9218"),
        ({"cell_count": 4}, "reaches bytes 0 to 9728"),
        ({"pitch_bytes": 4353}, "reaches bytes 0 to 9218"),
        ({"offset_bytes": 8960, "pitch_bytes": -3072}, "reaches bytes 2816 to 9472"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_access_that_leaves_its_pool(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place, values: dict[str, Any], words: str
) -> None:
    layout = sound["v2-dense"]
    findings = found("bounds", change(layout, "accesses", place(layout, 0, "key", "attention-op"), **values))
    assert [finding.message for finding in findings] == [
        f"the attention-op of layer 0's key {words} of pool 0 of group 0, which has 9216 B"
    ]
    assert findings[0].where[0].consumer == "attention-op"


def test_an_access_may_end_at_the_last_byte(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place
) -> None:
    layout = sound["v2-dense"]
    assert found("bounds", change(layout, "accesses", place(layout, 0, "key", "attention-op"), offset_bytes=2560)) == []


def test_a_part_that_leaves_its_packed_page(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place
) -> None:
    layout = sound["packed-fp8"]
    index = place(layout, 1, "side_planes")
    parts = list(layout.buffers[index].parts)
    size = 2 * 8192 + 384  # two index planes and the position plane
    assert [part.offset_bytes for part in parts] == [0, 8192, 16384]
    assert layout.buffers[index].page_bytes == size
    for number, offset, end in ((2, 16385, 16769), (1, -1, 8191), (0, 8577, 16769)):
        moved = [*parts]
        moved[number] = msgspec.structs.replace(parts[number], offset_bytes=offset)
        findings = found("bounds", change(layout, "buffers", index, parts=tuple(moved)))
        assert len(findings) == 1
        assert f"takes bytes {offset} to {end} of a packed side_planes page of {size} B" in findings[0].message


def test_nothing_is_clamped(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    """A view one slot too long is a fault of its last slot alone, however small the slot."""
    layout = sound["packed-nvfp4"]
    index = place(layout, 1, "side_planes")
    findings = found("bounds", change(layout, "buffers", index, slot_count=4))
    assert len(findings) == 1
    assert "has 3 slots" in findings[0].message
