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
    assert found("adjacency", sound_layout) == []


@pytest.mark.parametrize("offset", [0, 1, 3, -1])
def test_a_table_that_declares_another_distance(
    sound: Mapping[str, Layout], change: Change, found: Found, offset: int
) -> None:
    layout = sound["v2-dense"]
    messages = [finding.message for finding in found("adjacency", change(layout, "tables", 0, kv_offset=offset))]
    if offset == 1:
        assert messages == []
        return
    assert messages[0].startswith(f"a page table puts V {offset} pages after K, and a block of K has 1")
    assert messages[1] == (
        f"layer 0's value lies 512 B after it, and the page table says {offset * 512} B after layer 0's key"
    )


def test_a_block_of_several_kernel_pages(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    layout = sound["v2-expanded"]  # two kernel pages of 256 B in each block: V is two pages behind K
    assert (layout.tables[0].expansion, layout.tables[0].kv_offset) == (2, 2)
    messages = [finding.message for finding in found("adjacency", change(layout, "tables", 0, kv_offset=1))]
    assert "a page table puts V 1 pages after K, and a block of K has 2" in messages[0]


@pytest.mark.parametrize(("layer", "offset", "words"), [(0, 514, "514 B after it"), (2, 0, "-2048 B after it")])
def test_a_v_page_that_does_not_follow_its_k_page(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place, layer: int, offset: int, words: str
) -> None:
    layout = sound["v2-dense"]
    findings = found("adjacency", change(layout, "buffers", place(layout, layer, "value"), offset_bytes=offset))
    assert [finding.message for finding in findings] == [
        f"layer {layer}'s value lies {words}, and the page table says 512 B after layer {layer}'s key"
    ]
    assert [where.role for where in findings[0].where] == ["key", "value"]


def test_a_v_page_in_another_pool(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    layout = sound["packed-fp8"]
    other = layout.buffers[place(layout, 1, "side_planes")].pool
    findings = found("adjacency", change(layout, "buffers", place(layout, 3, "value"), pool=other))
    assert ["layer 3's value lies in another pool" in finding.message for finding in findings] == [True]


def test_a_k_page_without_its_v_page(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    layout = sound["v2-dense"]
    findings = found("adjacency", change(layout, "buffers", place(layout, 1, "value"), role="other"))
    assert [finding.message for finding in findings] == [
        "layer 1's key has no second page, and its page table serves K/V pairs"
    ]


def test_a_k_only_table_for_pairs(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    """The last layer hides it: with one layer the mapping offset is 0, whatever the pair."""
    layout = sound["v2-draft"]
    number = next(number for number, table in enumerate(layout.tables) if len(table.layers) == 1)
    findings = found("adjacency", change(layout, "tables", number, kv_factor=1))
    assert findings
    assert "draft layer 2" in findings[0].message


@pytest.mark.parametrize(("layer", "wrong"), [(1, 1), (3, -128)])
def test_scales_follow_each_other_too(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place, layer: int, wrong: int
) -> None:
    layout = sound["packed-nvfp4"]
    index = place(layout, layer, "value_block_scale")
    offset = layout.buffers[index].offset_bytes
    findings = found("adjacency", change(layout, "buffers", index, offset_bytes=offset + wrong))
    assert [finding.message for finding in findings] == [
        f"layer {layer}'s value_block_scale lies {1024 + wrong} B after it, and the page table says 1024 B after "
        f"layer {layer}'s key_block_scale"
    ]


def test_v1_scales_are_watched_too(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    layout = msgspec.structs.replace(sound["v1-nvfp4"], accesses=())
    index = place(layout, 0, "value_block_scale")
    offset = layout.buffers[index].offset_bytes
    assert found("adjacency", change(layout, "buffers", index, offset_bytes=offset + 1))
