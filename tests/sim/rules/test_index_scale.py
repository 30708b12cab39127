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
    assert found("index-scale", sound_layout) == []


def test_a_foreign_page_in_the_pool(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    """Six pages in a slot counted as seven, or five."""
    layout = sound["v2-dense"]
    for wrong in (5, 7):
        findings = found("index-scale", change(layout, "tables", 0, index_scale=wrong))
        assert [finding.message for finding in findings] == [
            f"a page table counts {wrong} pages of 512 B per slot ({wrong * 512} B), and the slots of its pool are "
            "3072 B apart"
        ]


def test_pages_of_another_size(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    findings = found("index-scale", change(sound["v2-dense"], "tables", 0, page_bytes=256))
    assert "6 pages of 256 B per slot (1536 B)" in findings[0].message
    assert "layer 1's key starts 1024 B past the pool pointer, and its mapping offset 1 stands for 512 B" in (
        findings[1].message
    )


def test_floored_mapping_offsets(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    """What stripped assertions leave: 3/2 of a pair becomes 1."""
    layout = sound["v2-dense"]
    moved = change(layout, "buffers", layout.tables[0].key_buffers[1], offset_bytes=1536)
    findings = found("index-scale", moved)
    assert [finding.message for finding in findings] == [
        "layer 1's key starts 1536 B past the pool pointer, which is no whole number of pairs of 1024 B, and its "
        "mapping offset 1 stands for 1024 B"
    ]


@pytest.mark.parametrize("name", ["v1-windows", "v2-windows", "v2-latent", "v2-expanded", "packed-fp8", "legacy-bf16"])
def test_every_mapping_offset_counts(sound: Mapping[str, Layout], change: Change, found: Found, name: str) -> None:
    layout = sound[name]
    for number, table in enumerate(layout.tables):
        pair = table.kv_factor * table.page_bytes
        for at, offset in enumerate(table.mapping_offsets):
            for wrong in (offset - 1, offset + 1):
                offsets = (*table.mapping_offsets[:at], wrong, *table.mapping_offsets[at + 1 :])
                findings = found("index-scale", change(layout, "tables", number, mapping_offsets=offsets))
                right, stands = offset * pair, wrong * pair
                assert (
                    f"starts {right} B past the pool pointer, and its mapping offset {wrong} stands for {stands} B"
                    in (findings[0].message)
                )


def test_two_layers_with_one_offset(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    findings = found("index-scale", change(sound["v2-dense"], "tables", 0, mapping_offsets=(0, 1, 1)))
    assert findings[-1].message == "two layers of one page table have the same mapping offset: (0, 1, 1)"


@pytest.mark.parametrize(("field", "wrong"), [("pointer_bytes", 512), ("row_offset", 1)])
def test_a_pointer_that_is_not_the_representative(
    sound: Mapping[str, Layout], change: Change, found: Found, field: str, wrong: int
) -> None:
    findings = found("index-scale", change(sound["v2-dense"], "tables", 0, **{field: wrong}))
    assert findings[0].message == (
        "layer 0's key starts -512 B past the pool pointer, which is no whole number of pairs of 1024 B, and its "
        "mapping offset 0 stands for 0 B"
    )


def test_rows_that_carry_the_place_of_the_layer(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    """Two geometries in one life cycle: a table for each layer, based at its pool."""
    layout = sound["v2-per-layer"]
    assert [table.row_offset for table in layout.tables] == [0, 0, 2, 2]
    findings = found("index-scale", change(layout, "tables", 2, row_offset=1))
    assert "layer 2's key starts 512 B past the pool pointer" in findings[0].message
    assert "mapping offset 0 stands for 0 B" in findings[0].message


def test_a_table_on_another_pool(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    layout = sound["v2-per-layer"]
    assert {table.pool for table in layout.tables} == {0, 1}
    for number, table in enumerate(layout.tables):
        assert found("index-scale", change(layout, "tables", number, pool=1 - table.pool))


# NVFP4: one index and one mapping offset for the data pool and the scale pool. A scale page here has 1024 B.


def test_a_scale_pool_with_a_foreign_page(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place
) -> None:
    layout = sound["packed-nvfp4"]
    index = place(layout, 1, "key_block_scale")
    assert layout.buffers[index].slot_stride_bytes == 4096
    findings = found("index-scale", change(layout, "buffers", index, slot_stride_bytes=5120))
    assert [finding.message for finding in findings] == [
        "the block index of layer 1's key counts 4 pages per slot and offset 0; used on the scale pool it gives slots "
        "4096 B apart and 0 B to layer 1's key_block_scale, and the pool has 5120 B and 0 B (4 scale pages per slot)"
    ]


@pytest.mark.parametrize(("name", "layer"), [("packed-nvfp4", 3), ("v2-nvfp4", 2), ("v1-nvfp4", 1)])
def test_scales_in_another_order_than_their_data(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place, name: str, layer: int
) -> None:
    layout = msgspec.structs.replace(sound[name], accesses=())
    index = place(layout, layer, "key_block_scale")
    offset = layout.buffers[index].offset_bytes
    findings = found("index-scale", change(layout, "buffers", index, offset_bytes=0))
    assert findings
    assert f"{offset} B to layer {layer}'s key_block_scale, and the pool has" in findings[0].message


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("scale_pointer_bytes", 1024), ("scale_page_bytes", 512), ("scale_index_scale", 6), ("scale_pool", 0)],
)
def test_each_number_of_the_scale_pool(
    sound: Mapping[str, Layout], change: Change, found: Found, field: str, wrong: int
) -> None:
    layout = sound["packed-nvfp4"]
    assert getattr(layout.tables[0], field) != wrong
    assert found("index-scale", change(layout, "tables", 0, **{field: wrong}))


def test_scales_without_a_pointer(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    """Layers with block scales, and a table that has no pool to find them in."""
    assert found("index-scale", change(sound["packed-nvfp4"], "tables", 0, scale_pool=None))
