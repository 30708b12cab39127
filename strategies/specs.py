"""``cache_specs``: everything an allocator is told, drawn so that it shrinks well and reaches the rare classes.

>>> from hypothesis import find
>>> from kvsan.strategies.rare import classes_of
>>> spec = find(cache_specs(), lambda spec: "heads replicated" in classes_of(spec))
>>> spec.layers[0].kv_heads, spec.layers[0].head_dim, spec.parallel.name, spec.kv_format.value, spec.tokens_per_block
(1, 128, 'tp2', 'bf16', 1)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import msgspec
from hypothesis import strategies as st

from ..model.arithmetic import round_up
from ..model.errors import SpecError, shown
from ..model.formats import ElementFormat
from ..model.layers import HybridLayer, Layer, RecurrentLayer, paged_part
from ..model.parallel import ParallelLayout
from ..model.spec import CacheSpec, Consumer
from .classes import ClassSource, draw_layer_count, draw_layers, draw_pattern
from .deployment import draw_draft
from .families import LAYER_KIND_NAMES, LayerKind, family_named, family_of
from .fitted import ABILITIES, fitted
from .formats import KV_ORDER, STATE_ORDER
from .geometry import cycle_pages
from .numbers import MAX_SLOTS, MAX_TOKENS_PER_BLOCK, SLOTS, TOKENS_PER_BLOCK, between, draw_number, draw_one
from .options import DRAFT_MODES, Options
from .parallel import draw_parallel, state_ranks_allowed
from .plan import Plan
from .recipes import FAMILY_RECIPES, RECIPES, RareRecipe

VARIANTS = 4
RARE_ODDS = 4
"""One in this many specs is made by a rare recipe."""

_EXTRAS = ("none",) * 12 + ("tokens", "quota", "tight quota", "longest")
_GRAIN_BYTES = 32 << 20


def cache_specs(
    *,
    family: str = "dense",
    kv_formats: st.SearchStrategy[ElementFormat] | None = None,
    state_formats: st.SearchStrategy[ElementFormat] | None = None,
    tokens_per_block: st.SearchStrategy[int] | None = None,
    heads: st.SearchStrategy[int] | None = None,
    head_dims: st.SearchStrategy[int] | None = None,
    layers: st.SearchStrategy[tuple[Layer, ...]] | None = None,
    layer_classes: st.SearchStrategy[tuple[Layer, ...]] | None = None,
    parallel: st.SearchStrategy[ParallelLayout] | None = None,
    consumers: st.SearchStrategy[Consumer] | None = None,
    slots: st.SearchStrategy[int] | None = None,
    kinds: Iterable[LayerKind] = LAYER_KIND_NAMES,
    draft_modes: Iterable[str] = DRAFT_MODES,
    min_layers: int = 1,
    max_layers: int = 12,
    max_classes: int = 3,
    windows: bool = True,
    sparse: bool | None = None,
    layer_formats: bool | None = None,
    quotas: bool = True,
    rare: Iterable[str] | str | None = None,
    plain: bool = False,
) -> st.SearchStrategy[CacheSpec]:
    """Return valid specs of a family: ``dense``, ``dense-v1``, ``qsa`` or ``any`` (see ``families``).

    Every axis can be pinned with a strategy: KV and state formats, tokens per block, KV heads, head dims, whole
    ``layers`` or the ``layer_classes`` that a pattern is drawn over, the parallel layout (one that fits the layers:
    pipeline stages at most their number, recurrent heads that divide), consumers, slots. ``kinds`` are the kinds of
    layers, ``draft_modes`` the draft modes to choose from. ``windows``, ``layer_formats`` (KV formats of a layer's own)
    and ``quotas`` (a byte quota in place of slots) switch an axis off; ``sparse`` demands or forbids side planes.

    ``rare`` names the recipes of rare classes (see ``rare``): by default those of the family make one spec in four, a
    single name makes every spec, and an empty tuple none. ``plain`` draws every layer independently and uses no recipe:
    the sampling to measure against.
    """
    chosen = (
        FAMILY_RECIPES[family_named(family).name] if rare is None else (rare,) if isinstance(rare, str) else tuple(rare)
    )
    unknown = [name for name in chosen if name not in RECIPES]
    if unknown:
        raise SpecError("rare", f"found {shown(unknown[0])}, needs some of {', '.join(RECIPES)}")
    options = Options(
        family=family_named(family),
        kv_formats=kv_formats,
        state_formats=state_formats,
        tokens_per_block=tokens_per_block,
        heads=heads,
        head_dims=head_dims,
        layers=layers,
        layer_classes=layer_classes,
        parallel=parallel,
        consumers=consumers,
        slots=slots,
        kinds=tuple(kinds),
        draft_modes=tuple(draft_modes),
        min_layers=min_layers,
        max_layers=max_layers,
        max_classes=max_classes,
        windows=windows,
        sparse=sparse,
        layer_formats=layer_formats,
        quotas=quotas,
        recipes=() if plain else chosen,
        always=isinstance(rare, str),
        plain=plain,
    )
    return _specs(options)


def specs_for(allocator: str, *, family: str | None = None, **options: Any) -> st.SearchStrategy[CacheSpec]:
    """Return specs of which the allocator called ``allocator`` supports at least four in five.

    The family follows from the name: ``dense-v1`` for V1, ``dense`` for plain V2, ``qsa`` for the QSA managers and for
    faulty allocators, ``dense`` made to fit (``fitted``) for vLLM and SGLang, ``any`` for others. ``options`` are
    those of ``cache_specs``.
    """
    drawn = cache_specs(family=family or family_of(allocator), **options)
    abilities = ABILITIES.get(allocator)
    return drawn if abilities is None else drawn.map(functools.partial(fitted, can=abilities))


@st.composite
def _specs(draw: st.DrawFn, options: Options) -> CacheSpec:
    recipe, variant = _draw_recipe(draw, options)
    plan = _draw_plan(draw, options, recipe)
    if recipe is not None:
        recipe.change(plan, variant)
    extra = draw_one(draw, _EXTRAS)
    if extra == "tokens":
        _own_tokens(plan)
    elif extra == "longest" and options.windows:
        plan.max_sequence_tokens = draw_one(draw, (128, 4096, 1))
    spec = plan.spec()
    if extra.endswith("quota") and options.quotas and options.slots is None:
        return _with_quota(spec, tight=extra == "tight quota")
    return spec


def _draw_recipe(draw: st.DrawFn, options: Options) -> tuple[RareRecipe | None, int]:
    """Draw a recipe and its variant by one choice; no recipe is the simplest, and the most frequent."""
    count = len(options.recipes) * VARIANTS
    if not count:
        return None, 0
    none = 0 if options.always else (RARE_ODDS - 1) * count
    place = draw(between(0, none + count - 1)) - none
    if place < 0:
        return None, 0
    index, variant = divmod(place, VARIANTS)
    return RECIPES[options.recipes[index]], variant


def _draw_plan(draw: st.DrawFn, options: Options, recipe: RareRecipe | None) -> Plan:
    """Draw the parts of a spec: lengths first, then what depends on them."""
    given = draw(options.layers) if options.layers is not None else None
    classes = draw(options.layer_classes) if options.layer_classes is not None and given is None else None
    count = len(given) if given is not None else _draw_count(draw, options, recipe)
    kv_format = draw_one(draw, KV_ORDER) if options.kv_formats is None else draw(options.kv_formats)
    if options.tokens_per_block is None:
        tokens = draw_number(draw, TOKENS_PER_BLOCK, MAX_TOKENS_PER_BLOCK)
    else:
        tokens = draw(options.tokens_per_block)
    known = given if given is not None else classes or ()
    if options.parallel is None:
        shared = recipe is not None and recipe.shared
        parallel = draw_parallel(draw, count, divides=state_ranks_allowed(known), shared=shared)
    else:
        parallel = draw(options.parallel)
    source = ClassSource(options, kv_format, parallel.state_tp, base=_base_for(options, recipe))
    if given is not None:
        layers = list(given)
        base = next((paged for layer in layers if (paged := paged_part(layer)) is not None), None)
    elif classes is not None:
        layers = [classes[index] for index in draw_pattern(draw, len(classes), count)]
        base = next((paged for layer in classes if (paged := paged_part(layer)) is not None), None)
    else:
        layers, base = draw_layers(draw, source, count)
    plan = Plan(options, kv_format, tokens, layers, base, parallel)
    plan.draft = draw_draft(draw, source, base, attention_dp=parallel.attention_dp)
    if parallel.world_size > 1:
        plan.rank = draw(between(0, parallel.world_size - 1))
    _draw_deployment(draw, plan, may_recur=recipe is not None and recipe.recurrent)
    return plan


def _draw_count(draw: st.DrawFn, options: Options, recipe: RareRecipe | None) -> int:
    """Draw the number of layers: where every spec is of one recipe, as many as it needs, if so many are allowed."""
    least = 1
    if recipe is not None and options.always:
        least = recipe.sparse_layers if options.family.sparse_attention else recipe.layers
    return draw_layer_count(draw, max(options.min_layers, min(least, options.max_layers)), options.max_layers)


def _base_for(options: Options, recipe: RareRecipe | None) -> LayerKind | None:
    """Return the kind of base that a recipe needs, None where it does not matter."""
    if recipe is None or recipe.base is None:
        return None
    if recipe.base == "sparse":
        return "attention" if options.family.sparse_attention else "latent"
    return "latent" if recipe.base == "latent" else "attention"


def _draw_deployment(draw: st.DrawFn, plan: Plan, *, may_recur: bool) -> None:
    """Draw slots, the formats of recurrent states where there are or may be some, and the consumer's axis order."""
    options = plan.options
    plan.slots = draw_number(draw, SLOTS, MAX_SLOTS) if options.slots is None else draw(options.slots)
    if may_recur or any(isinstance(layer, RecurrentLayer | HybridLayer) for layer in plan.layers):
        if options.state_formats is None:
            plan.state_format, plan.conv_format = draw_one(draw, STATE_ORDER), draw_one(draw, STATE_ORDER)
        else:
            plan.state_format = plan.conv_format = draw(options.state_formats)
        plan.state_slots = draw_one(draw, (None, None, 1, 3, 8))
    if options.consumers is None:
        plan.consumer = draw_one(draw, (Consumer(), Consumer(kv_layout="NHD")))
    else:
        plan.consumer = draw(options.consumers)


def _own_tokens(plan: Plan) -> None:
    """Give all layers of the model half the manager's tokens per block, where they divide."""
    if not plan.options.family.overrides or plan.tokens_per_block % 2 or not plan.may("layers"):
        return
    tokens = plan.tokens_per_block >> 1
    plan.replace_paged(lambda layer: msgspec.structs.replace(layer, tokens_per_block=tokens))


def _with_quota(spec: CacheSpec, *, tight: bool) -> CacheSpec:
    """Return ``spec`` with a byte quota: enough for one slot of everything and a chunk per pool, or 64 times as
    much."""
    slots = [slot for cycle in cycle_pages(spec) for slot, _ in cycle.pools]
    least = sum(round_up(slot, _GRAIN_BYTES) for slot in slots) or _GRAIN_BYTES
    quota = least if tight and spec.draft.mode != "separate" else 64 * least
    return msgspec.structs.replace(spec, slots=None, state_slots=None, quota_bytes=quota)
