from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from kvsan.model.layers import AttentionLayer, UncachedLayer
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Draft
from kvsan.sim.finding import Finding
from kvsan.sim.layout import Layout
from kvsan.sim.registry import allocate

Change = Callable[..., Layout]
Found = Callable[[str, Layout], list[Finding]]
Place = Callable[..., int]

LAYER = AttentionLayer(kv_heads=1, head_dim=16)


def staged(stages: int, rank: int, *, layers: int = 7, draft: str = "none") -> Layout:
    parts = Draft(mode=draft, layers=(LAYER,)) if draft != "none" else Draft()  # type: ignore[arg-type]
    spec = CacheSpec(layers=(LAYER,) * layers, parallel=ParallelLayout(pp=stages), rank=rank, draft=parts, slots=2)
    return allocate(spec, "trtllm-v2")


def messages(findings: list[Finding]) -> list[str]:
    return [finding.message for finding in findings]


def test_sound_layouts_are_silent(sound_layout: Layout, found: Found) -> None:
    assert found("layer-map", sound_layout) == []


@pytest.mark.parametrize("draft", ["none", "folded", "separate"])
@pytest.mark.parametrize("stages", [1, 2, 3, 7])
def test_every_stage_is_silent(found: Found, stages: int, draft: str) -> None:
    assert all(found("layer-map", staged(stages, rank, draft=draft)) == [] for rank in range(stages))


def test_a_layer_without_a_cache_is_not_missed(found: Found) -> None:
    layers = (LAYER, UncachedLayer(), LAYER)
    assert found("layer-map", allocate(CacheSpec(layers=layers, slots=2), "trtllm-v1")) == []


def test_a_layer_on_no_stage(found: Found) -> None:
    layout = msgspec.structs.replace(staged(2, 0), stages=((0, 1, 2, 3), (4, 6)))
    assert messages(found("layer-map", layout)) == ["layer 5 is on no pipeline stage"]


def test_a_layer_on_two_stages(found: Found) -> None:
    layout = msgspec.structs.replace(staged(2, 0), stages=((0, 1, 2, 3), (3, 4, 5, 6)))
    assert messages(found("layer-map", layout)) == ["layer 3 is on pipeline stages 0 and 1"]


def test_a_layer_that_the_model_does_not_have(found: Found) -> None:
    layout = msgspec.structs.replace(staged(2, 0), stages=((0, 1, 2, 3), (4, 5, 6, 7)))
    assert messages(found("layer-map", layout)) == ["layer 7 is on pipeline stage 1, and the model has 7 layers"]


def test_a_layer_of_another_stage_is_stored(found: Found) -> None:
    """The second stage's layers under their local numbers."""
    layout = staged(2, 1)
    assert {buffer.layer for buffer in layout.buffers} == {4, 5, 6}
    local = tuple(msgspec.structs.replace(buffer, layer=buffer.layer - 4) for buffer in layout.buffers)
    found_messages = messages(found("layer-map", msgspec.structs.replace(layout, buffers=local, tables=())))
    assert found_messages == [
        *(f"layer {layer} is stored on pipeline stage 1, where it does not belong" for layer in (0, 1, 2)),
        *(f"layer {layer} belongs to pipeline stage 1, and nothing is stored for it" for layer in (4, 5, 6)),
    ]


def test_a_layer_that_is_not_stored(found: Found) -> None:
    layout = staged(2, 0)
    kept = tuple(buffer for buffer in layout.buffers if buffer.layer != 2)
    bare = msgspec.structs.replace(layout, buffers=kept, accesses=(), tables=())
    assert messages(found("layer-map", bare)) == ["layer 2 belongs to pipeline stage 0, and nothing is stored for it"]


def test_draft_layers_live_on_the_last_stage(found: Found) -> None:
    first, last = (staged(2, rank, draft="folded") for rank in (0, 1))
    assert {buffer.layer for buffer in last.buffers} == {4, 5, 6, 7}
    swapped = msgspec.structs.replace(first, buffers=last.buffers, accesses=(), tables=())
    assert "layer 7 is stored on pipeline stage 0, where it does not belong" in messages(found("layer-map", swapped))
    missing = tuple(buffer for buffer in last.buffers if buffer.layer != 7)
    bare = msgspec.structs.replace(last, buffers=missing, accesses=(), tables=())
    assert messages(found("layer-map", bare)) == ["layer 7 belongs to pipeline stage 1, and nothing is stored for it"]


def test_a_packed_plane_of_another_layer(
    sound: Mapping[str, Layout], found: Found, change: Change, place: Place
) -> None:
    """The planes inside a packed page belong to layers of this stage as well."""
    layout = sound["packed-pipeline"]
    index = place(layout, 5, "side_planes")
    parts = layout.buffers[index].parts
    moved = (parts[0], msgspec.structs.replace(parts[1], layer=3), parts[2])
    findings = found("layer-map", change(layout, "buffers", index, parts=moved))
    assert findings
    assert "layer 3" in findings[0].message


def test_a_layout_without_a_spec_is_not_judged_and_one_without_stages_is(found: Found) -> None:
    layout = msgspec.structs.replace(staged(2, 0), buffers=(), accesses=(), tables=())
    assert found("layer-map", layout)
    assert found("layer-map", msgspec.structs.replace(layout, spec=None)) == []
    assert found("layer-map", msgspec.structs.replace(layout, stages=())) == found("layer-map", layout)
