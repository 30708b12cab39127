from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from kvsan.model.formats import ElementFormat
from kvsan.sim.finding import Finding
from kvsan.sim.layout import Layout
from kvsan.sim.page import kv_page

Change = Callable[..., Layout]
Found = Callable[[str, Layout], list[Finding]]
Place = Callable[..., int]


def test_sound_layouts_are_silent(sound_layout: Layout, found: Found) -> None:
    assert found("record-layout", sound_layout) == []


def test_head_major_read_as_token_major(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place
) -> None:
    layout = sound["v2-dense"]
    index = place(layout, 1, "key", "kv-view")
    findings = found(
        "record-layout", change(layout, "accesses", index, page=kv_page(ElementFormat.BF16, 2, 4, 32, "NHD"))
    )
    assert [finding.message for finding in findings] == [
        "the kv-view of layer 1's key takes the page for bf16 token 4 x head 2 x dim 32, and it was stored as "
        "bf16 head 2 x token 4 x dim 32"
    ]
    assert (findings[0].where[0].layer, findings[0].where[0].consumer) == (1, "kv-view")


def test_a_square_page_is_told_by_its_names(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    """As many heads as tokens: sizes and strides agree, and data is permuted all the same."""
    layout = sound["v1-windows"]
    index = next(at for at, access in enumerate(layout.accesses) if access.page.shape == (4, 4, 32))
    swapped = kv_page(ElementFormat.BF16, 4, 4, 32, "NHD")
    assert swapped.stride_bytes == layout.accesses[index].page.stride_bytes
    findings = found("record-layout", change(layout, "accesses", index, page=swapped))
    assert "for bf16 token 4 x head 4 x dim 32, and it was stored as bf16 head 4 x token 4 x dim 32" in (
        findings[0].message
    )


@pytest.mark.parametrize(
    ("name", "layer", "role", "consumer", "format"),
    [
        ("v2-dense", 0, "key", "attention-op", ElementFormat.FP16),
        ("packed-fp8", 1, "value", "attention-op", ElementFormat.FP8_E5M2),
        ("packed-fp8", 1, "value", "kv-view", ElementFormat.INT8),
        ("packed-nvfp4", 1, "key", "attention-op", ElementFormat.UINT8),
        ("packed-nvfp4", 3, "key_block_scale", "block-scale-view", ElementFormat.FP8_E5M2),
        ("v1-hybrid", 2, "ssm_state", "state-view", ElementFormat.FP16),
        ("v2-latent", 2, "index_key", "side-plane-view", ElementFormat.FP8),
    ],
)
def test_a_format_of_equal_width(
    sound: Mapping[str, Layout],
    change: Change,
    found: Found,
    place: Place,
    name: str,
    layer: int,
    role: str,
    consumer: str,
    format: ElementFormat,
) -> None:
    layout = sound[name]
    index = place(layout, layer, role, consumer)
    stored = layout.accesses[index].page
    read = msgspec.structs.replace(stored, format=format)
    findings = found("record-layout", change(layout, "accesses", index, page=read))
    assert len(findings) == 1
    assert f"takes the page for {format.value} " in findings[0].message
    assert f"stored as {stored.format.value} " in findings[0].message


def test_a_shape_of_equal_bytes(sound: Mapping[str, Layout], change: Change, found: Found, place: Place) -> None:
    layout = sound["v2-dense"]
    index = place(layout, 1, "value", "attention-op")
    findings = found(
        "record-layout", change(layout, "accesses", index, page=kv_page(ElementFormat.BF16, 4, 4, 16, "HND"))
    )
    assert "bf16 head 4 x token 4 x dim 16, and it was stored as bf16 head 2 x token 4 x dim 32" in findings[0].message


def test_a_plane_inside_a_packed_buffer(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    layout = sound["packed-fp8"]
    index = next(at for at, access in enumerate(layout.accesses) if access.part == 2)
    stored = layout.accesses[index].page
    swapped = msgspec.structs.replace(stored, axes=("head", "token", "dim"))
    findings = found("record-layout", change(layout, "accesses", index, page=swapped))
    assert "the side-plane-view of layer 1's qsa_index_position takes the page for int32 head 32" in findings[0].message
