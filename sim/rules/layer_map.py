"""Rule ``layer-map``: pipeline stages partition the layers, and this rank stores exactly its own."""

from __future__ import annotations

from collections.abc import Iterator

from ...model.layers import Layer, paged_part, recurrent_part
from ...model.rank import stage_layers
from ..finding import Finding, Where
from .rule import Inspection, Rule


def check_layer_map(inspection: Inspection) -> Iterator[Finding]:
    """Yield layers on no stage or on two, stored layers of another stage, and layers of this stage that are not
    stored."""
    layout = inspection.layout
    spec = layout.spec
    if spec is None:
        return
    owners: dict[int, int] = {}
    stages = layout.stages or stage_layers(spec)  # an allocator that does not say is held to the even split
    for stage, layers in enumerate(stages):
        for layer in layers:
            if owners.setdefault(layer, stage) != stage:
                yield _finding(layer, f"is on pipeline stages {owners[layer]} and {stage}")
            elif not 0 <= layer < len(spec.layers):
                yield _finding(layer, f"is on pipeline stage {stage}, and the model has {len(spec.layers)} layers")
    mine = spec.parallel.coordinates(spec.rank).pp_rank
    expected: tuple[set[int], set[int]] = (set(), set())
    for layer, kind in enumerate(spec.layers):
        stage_of = owners.get(layer)
        if stage_of is None:
            yield _finding(layer, "is on no pipeline stage")
        elif stage_of == mine:
            _expect(expected, layer, kind)
    if mine == spec.parallel.pp - 1:
        for layer, kind in enumerate(spec.draft.layers, start=len(spec.layers)):
            _expect(expected, layer, kind)
    stored: tuple[set[int], set[int]] = (set(), set())
    for buffer in layout.buffers:
        recurrent = layout.life_cycles[buffer.life_cycle].recurrent
        stored[recurrent].add(buffer.layer)
        if buffer.parts:
            stored[recurrent].update([part.layer for part in buffer.parts])
    for what, held, wanted in zip(("pages", "states"), stored, expected, strict=True):
        for layer in sorted(held - wanted):
            if layer in expected[0] | expected[1]:
                yield _finding(layer, f"has {what} stored on pipeline stage {mine}, and its kind keeps none")
            else:
                yield _finding(layer, f"is stored on pipeline stage {mine}, where it does not belong")
        for layer in sorted(wanted - held):
            nothing = "nothing is" if layer not in stored[0] | stored[1] else f"no {what} are"
            yield _finding(layer, f"belongs to pipeline stage {mine}, and {nothing} stored for it")


def _expect(expected: tuple[set[int], set[int]], layer: int, kind: Layer) -> None:
    """Add a layer to those with pages, those with states, or both."""
    if paged_part(kind) is not None:
        expected[0].add(layer)
    if recurrent_part(kind) is not None:
        expected[1].add(layer)


def _finding(layer: int, problem: str) -> Finding:
    return Finding(
        rule="layer-map",
        message=f"layer {layer} {problem}",
        remedy="give every layer to exactly one pipeline stage, and draft layers to the last",
        where=(Where(layer=layer),),
    )


RULE = Rule(
    "layer-map",
    "pipeline stages partition the layers, and a rank stores exactly its own",
    "Every layer of the model is on exactly one pipeline stage; draft layers are on the last. A rank stores the "
    "layers of its stage, all of them and no others, under their global numbers: mixing global and local numbers "
    "gives one layer's pages to another.",
    check_layer_map,
)
