from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from kvsan.sim.finding import Finding
from kvsan.sim.layout import Layout
from kvsan.sim.page import strided_page

Change = Callable[..., Layout]
Found = Callable[[str, Layout], list[Finding]]
Place = Callable[..., int]


def test_sound_layouts_are_silent(sound_layout: Layout, found: Found) -> None:
    assert found("stride", sound_layout) == []


@pytest.mark.parametrize(
    ("name", "layer", "role", "consumer"),
    [
        ("v1-windows", 0, "key", "attention-op"),
        ("v1-hybrid", 0, "conv_state", "state-view"),
        ("v2-dense", 2, "value", "kv-view"),
        ("v2-halves", 1, "ssm_state", "state-view"),
        ("v2-latent", 1, "index_key", "side-plane-view"),
        ("packed-nvfp4", 3, "value_block_scale", "block-scale-view"),
    ],
)
def test_a_view_that_steps_by_its_own_page(
    sound: Mapping[str, Layout],
    change: Change,
    found: Found,
    place: Place,
    name: str,
    layer: int,
    role: str,
    consumer: str,
) -> None:
    """The distance between slots taken from the consumer's own shape: right in slot 0 alone."""
    layout = sound[name]
    index = place(layout, layer, role, consumer)
    access = layout.accesses[index]
    wrong = access.page.span_bytes
    assert wrong != access.pitch_bytes
    findings = found("stride", change(layout, "accesses", index, pitch_bytes=wrong))
    assert [finding.message for finding in findings] == [
        f"the {consumer} of layer {layer}'s {role} steps {wrong} B from one slot to the next, where the storage steps "
        f"{access.pitch_bytes} B"
    ]
    assert findings[0].where[0].consumer == consumer


def test_k_as_one_dense_plane(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    """Blocks hold K and V; a gather kernel that steps by K alone is off by a factor of two from block 1 on."""
    layout = sound["v1-nvfp4"]
    index = place(layout, 0, "key", "kv-view")
    pitch = layout.accesses[index].pitch_bytes
    findings = found("stride", change(layout, "accesses", index, pitch_bytes=pitch >> 1))
    assert f"steps {pitch >> 1} B from one slot to the next, where the storage steps {pitch} B" in findings[0].message


def test_a_single_cell_has_no_pitch(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    layout = sound["v2-dense"]
    index = place(layout, 0, "key", "attention-op")
    assert found("stride", change(layout, "accesses", index, pitch_bytes=1, cell_count=1)) == []


@pytest.mark.parametrize(("axis", "wrong"), [(0, 258), (1, 66), (2, 4)])
def test_strides_inside_the_page(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place, axis: int, wrong: int
) -> None:
    layout = sound["v2-dense"]  # 2 heads x 4 tokens x 32 bf16: strides 256, 64 and 2 B
    index = place(layout, 1, "value", "kv-view")
    page = layout.accesses[index].page
    strides = tuple(wrong if at == axis else stride for at, stride in enumerate(page.stride_bytes))
    moved = strided_page(page.format, page.axes, page.shape, strides)
    findings = found("stride", change(layout, "accesses", index, page=moved))
    assert [finding.message for finding in findings] == [
        f"the kv-view of layer 1's value has strides {strides} B on axes head, token, dim, where the storage has "
        "(256, 64, 2) B on head, token, dim"
    ]


def test_axes_of_size_one_count(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    """A latent page has one head: its stride moves no byte, until somebody reshapes the view."""
    layout = sound["v2-latent"]
    index = place(layout, 0, "key", "kv-view")
    page = layout.accesses[index].page
    assert page.shape[0] == 1
    moved = msgspec.structs.replace(page, stride_bytes=(96, *page.stride_bytes[1:]))
    findings = found("stride", change(layout, "accesses", index, page=moved))
    assert len(findings) == 1
    assert "(96, 96, 2)" in findings[0].message


def test_one_life_cycle_has_one_pitch_in_a_pool(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place
) -> None:
    layout = msgspec.structs.replace(sound["v2-dense"], accesses=())
    findings = found("stride", change(layout, "buffers", place(layout, 1, "key"), slot_stride_bytes=512))
    assert [finding.message for finding in findings] == [
        "layer 1's key steps 512 B per slot and layer 0's key steps 3072 B, in one life cycle of pool 0 of group 0"
    ]
