from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from kvsan.model.formats import ElementFormat
from kvsan.model.layers import AttentionLayer, SidePlane
from kvsan.model.spec import CacheSpec, Consumer
from kvsan.sim.finding import Finding
from kvsan.sim.layout import Layout
from kvsan.sim.registry import allocate

Change = Callable[..., Layout]
Found = Callable[[str, Layout], list[Finding]]
Place = Callable[..., int]


def declared(layout: Layout, alignment_bytes: int) -> Layout:
    """Return ``layout`` for a consumer that needs ``alignment_bytes``."""
    assert layout.spec is not None
    consumer = Consumer(alignment_bytes=alignment_bytes)
    return msgspec.structs.replace(layout, spec=msgspec.structs.replace(layout.spec, consumer=consumer))


def test_sound_layouts_are_silent(sound_layout: Layout, found: Found) -> None:
    assert found("alignment", sound_layout) == []


@pytest.mark.parametrize(
    ("name", "layer", "role", "element"),
    [("v2-dense", 1, "key", 2), ("v1-hybrid", 0, "conv_state", 2), ("legacy-bf16", 1, "qsa_index_position", 4)],
)
def test_a_page_starts_at_a_whole_element(
    sound: Mapping[str, Layout],
    change: Change,
    found: Found,
    place: Place,
    name: str,
    layer: int,
    role: str,
    element: int,
) -> None:
    layout = sound[name]
    index = place(layout, layer, role)
    wrong = layout.buffers[index].offset_bytes + 1
    findings = found("alignment", change(layout, "buffers", index, offset_bytes=wrong))
    assert [finding.message for finding in findings] == [
        f"layer {layer}'s {role}: its first byte ({wrong} B) is not a multiple of {element} B, one element"
    ]


def test_a_slot_pitch_is_a_whole_number_of_elements(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place
) -> None:
    layout = sound["legacy-bf16"]
    index = place(layout, 1, "qsa_index_position")
    findings = found("alignment", change(layout, "buffers", index, slot_stride_bytes=386))
    assert [finding.message for finding in findings] == [
        "layer 1's qsa_index_position: its slot pitch (386 B) is not a multiple of 4 B, one element"
    ]


def test_planes_of_a_packed_page_are_aligned_each(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place
) -> None:
    layout = sound["packed-fp8"]
    index = place(layout, 1, "side_planes")
    parts = layout.buffers[index].parts
    moved = (*parts[:2], msgspec.structs.replace(parts[2], offset_bytes=parts[2].offset_bytes + 2))
    findings = found("alignment", change(layout, "buffers", index, parts=moved))
    assert [finding.message for finding in findings] == [
        "layer 1's qsa_index_position: its first byte (16386 B) is not a multiple of 4 B, one element"
    ]
    byte_page = change(layout, "buffers", index, offset_bytes=1)  # the packed bytes may lie anywhere, its planes not
    assert [finding.message.split(":")[0] for finding in found("alignment", byte_page)] == [
        "layer 1's index_key",
        "layer 3's index_key",
        "layer 1's qsa_index_position",
    ]


@pytest.mark.parametrize(("alignment", "silent"), [(1, True), (16, True), (128, True), (256, False)])
def test_a_packed_slot_of_98688_bytes(found: Found, alignment: int, silent: bool) -> None:
    """12 index planes of 8192 B and a position plane of 384 B: 98688 = 2^7 * 771, so 128-B aligned and not 256-B."""
    assert 12 * 8192 + 384 == 98688 == 2**7 * 771
    index = SidePlane(role="index_key", dim=128, format=ElementFormat.BF16)
    position = SidePlane(role="qsa_index_position", dim=3, format=ElementFormat.INT32, scope="rank")
    layer = AttentionLayer(kv_heads=1, head_dim=256, side_planes=(index, position))
    spec = CacheSpec(
        layers=(layer,) * 12, kv_format=ElementFormat.FP8, consumer=Consumer(alignment_bytes=alignment), slots=2
    )
    layout = allocate(spec, "trtllm-v2-qsa-packed")
    assert layout.side_planes_bytes == 98688
    findings = found("alignment", layout)
    assert (findings == []) == silent
    assert all("its slot pitch (98688 B) is not a multiple of 256 B, what the consumer declares" in finding.message
               for finding in findings)  # fmt: skip
    assert len(findings) in (0, 13)  # each of the planes steps by the slot


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"offset_bytes": 1024 + 64}, "its first byte (1088 B)"),
        ({"slot_stride_bytes": 3072 + 64}, "its slot pitch (3136 B)"),
        ({"page_bytes": 512 + 64}, "its page (576 B)"),
    ],
    ids=["offset", "pitch", "page"],
)
def test_what_the_consumer_declares(
    sound: Mapping[str, Layout], change: Change, found: Found, place: Place, values: dict[str, int], words: str
) -> None:
    layout = declared(sound["v2-dense"], 128)
    assert found("alignment", layout) == []
    findings = found("alignment", change(layout, "buffers", place(layout, 1, "key"), **values))
    assert [finding.message for finding in findings] == [
        f"layer 1's key: {words} is not a multiple of 128 B, what the consumer declares"
    ]


def test_the_base_of_a_pool(sound: Mapping[str, Layout], change: Change, found: Found) -> None:
    layout = declared(sound["v2-dense"], 128)
    findings = found("alignment", change(layout, "pools", 0, alignment_bytes=64))
    assert findings[0].message == (
        "layer 0's key: the pool's base (64 B) is not a multiple of 128 B, what the consumer declares"
    )
    assert len(findings) == 6


def test_a_head_dim_that_vectors_cannot_load(found: Found) -> None:
    layer = AttentionLayer(kv_heads=1, head_dim=3)
    spec = CacheSpec(layers=(layer,), tokens_per_block=2, consumer=Consumer(alignment_bytes=16))
    findings = found("alignment", allocate(spec, "trtllm-v2"))
    assert [finding.message for finding in findings] == [
        "layer 0's key: its slot pitch (24 B) is not a multiple of 16 B, what the consumer declares",
        "layer 0's value: its first byte (12 B) is not a multiple of 16 B, what the consumer declares",
    ]
