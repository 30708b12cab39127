"""Rule ``head-map``: the ranks' heads cover the model's, and pages have room for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...model.layers import AttentionLayer, paged_part
from ..finding import Finding
from ..layout import KEY, HeadMap, Layout
from .rule import Inspection, Rule, place_of


def check_head_map(inspection: Inspection) -> Iterator[Finding]:
    """Yield head maps that lose a head, hold more than a rank has room for, or disagree with the stored pages."""
    layout = inspection.layout
    if layout.head_maps:
        yield from _layers_in_one_map(inspection)
    for heads in layout.head_maps:
        covered = 0
        lost = None
        for first, end in sorted(heads.ranges):
            if first > covered:
                lost = covered
                break
            covered = max(covered, end)
        if lost is None and covered < heads.heads:
            lost = covered
        problem = None
        if lost is not None:
            problem = f"KV head {lost} of {heads.heads} is on no rank"
        elif covered > heads.heads:
            problem = f"a rank holds KV head {covered - 1}, and there are {heads.heads}"
        elif any(end - first > heads.rank_heads for first, end in heads.ranges):
            largest = max(end - first for first, end in heads.ranges)
            problem = f"a rank holds {largest} KV heads, and its pages have room for {heads.rank_heads}"
        problem = problem or _pages_problem(inspection, heads)
        first_key = inspection.by_role.get((heads.manager, heads.layers[0], KEY)) if heads.layers else None
        if problem is not None:
            yield Finding(
                rule="head-map",
                message=f"layers {_listed(heads.layers)}: {problem} ({len(heads.ranges)} ranks)",
                remedy="round heads per rank up, and replicate heads when there are fewer than ranks",
                where=() if first_key is None else (place_of(layout, first_key),),
            )


def _pages_problem(inspection: Inspection, heads: HeadMap) -> str | None:
    """Return how a map disagrees with the stored K pages or with the model's head counts, None when it does not."""
    layout = inspection.layout
    for layer in heads.layers:
        key = inspection.by_role.get((heads.manager, layer, KEY))
        if key is None:
            continue  # a layer without K that should have one is a matter of layer-map
        page = layout.buffers[key].page
        stored = page.shape[page.axes.index("head")] if "head" in page.axes else heads.rank_heads
        if stored != heads.rank_heads:
            return f"K pages of layer {layer} hold {stored} KV heads, and this rank keeps {heads.rank_heads}"
        model = _model_heads(layout, layer)
        if model is not None and model != heads.heads:
            return f"layer {layer} has {model} KV heads, and the map shares out {heads.heads}"
    return None


def _model_heads(layout: Layout, layer: int) -> int | None:
    """Return the KV heads of a layer in the model, None where the layout has no spec or the layer no heads."""
    if layout.spec is None:
        return None
    layers = layout.spec.layers + layout.spec.draft.layers
    paged = paged_part(layers[layer]) if 0 <= layer < len(layers) else None
    return paged.kv_heads if isinstance(paged, AttentionLayer) else None


def _layers_in_one_map(inspection: Inspection) -> Iterator[Finding]:
    """Yield K/V layers of the model that are in no head map, or in two."""
    layout = inspection.layout
    mapped = Counter((heads.manager, layer) for heads in layout.head_maps for layer in heads.layers)
    for (manager, layer, role), key in inspection.by_role.items():
        if role != KEY or _model_heads(layout, layer) is None or mapped[manager, layer] == 1:
            continue
        yield Finding(
            rule="head-map",
            message=f"layer {layer} is in {mapped[manager, layer]} head maps, and needs to be in one",
            remedy="say for every K/V layer which heads each rank stores",
            where=(place_of(layout, key),),
        )


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers[:6])) + (", ..." if len(layers) > 6 else "")


RULE = Rule(
    "head-map",
    "the ranks' KV heads cover the model's",
    "Heads per rank are rounded up: where tensor parallelism does not divide the KV heads the last ranks keep "
    "padding heads, and where there are fewer heads than ranks each rank keeps one and heads are replicated. "
    "Rounding down drops heads silently. Every head of the model must be on some rank, and a rank's pages must have "
    "room for its heads.",
    check_head_map,
)
