"""Layer classes and patterns: a model is a few kinds of layers and a pattern that repeats over its depth.

The first class is the model's attention (or latent) layer; the others are variations of it: the same with a window,
with other heads, with another format, or a recurrent, hybrid or uncached layer. Twins are what makes life cycles of
equal slots.

    >>> from hypothesis import find
    >>> find(layer_patterns(2), lambda pattern: len(set(pattern)) > 1)
    (0, 1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from hypothesis import strategies as st

from ..model.arithmetic import round_up
from ..model.formats import ElementFormat
from ..model.layers import AttentionLayer, HybridLayer, LatentLayer, Layer, RecurrentLayer, UncachedLayer, paged_part
from .families import Family, LayerKind, family_named
from .formats import KV_ORDER, dim_multiple
from .geometry import Paged
from .layers import draw_attention, draw_head_dim, draw_heads, draw_latent, draw_recurrent
from .numbers import LAYER_COUNTS, WINDOWS, between, draw_number, draw_one
from .options import Options
from .planes import draw_planes

MAX_PERIOD: Final = 8
_PagedT = TypeVar("_PagedT", AttentionLayer, LatentLayer, Paged)


class ClassSource(msgspec.Struct):
    """What layer classes of one model are drawn from.

    ``base`` is the kind that the first class should have, if the family and the options allow it; ``state`` is the
    model's recurrent shape once it is known.
    """

    options: Options
    kv_format: ElementFormat
    ranks: int
    base: LayerKind | None = None
    state: RecurrentLayer | None = None

    @property
    def family(self) -> Family:
        """The family of the model."""
        return self.options.family


@st.composite
def layer_classes(
    draw: st.DrawFn,
    *,
    family: str = "dense",
    kv_format: ElementFormat = ElementFormat.BF16,
    ranks: int = 1,
    max_classes: int = 3,
    windows: bool = True,
    sparse: bool | None = None,
) -> tuple[Layer, ...]:
    """Return the different layers of one model: 1 to ``max_classes``, an attention or latent layer first.

    ``ranks`` share recurrent states; ``sparse`` demands (True) or forbids (False) side planes.
    """
    options = Options(family=family_named(family), max_classes=max_classes, windows=windows, sparse=sparse)
    return tuple(draw_classes(draw, ClassSource(options, kv_format, ranks), draw(between(1, max_classes))))


@st.composite
def layer_patterns(draw: st.DrawFn, class_count: int, *, min_layers: int = 1, max_layers: int = 12) -> tuple[int, ...]:
    """Return the class of each layer: the number of layers first, then a period, then the classes of one period."""
    count = draw_layer_count(draw, min_layers, max_layers)
    return draw_pattern(draw, class_count, count)


def draw_layer_count(draw: st.DrawFn, low: int, high: int) -> int:
    """Draw a number of layers; the smallest and the largest allowed are always among the choices."""
    if low == high:
        return low
    between_them = [count for count in LAYER_COUNTS if low < count < high]
    return draw_one(draw, (low, *between_them, high))


def draw_pattern(draw: st.DrawFn, class_count: int, count: int) -> tuple[int, ...]:
    """Draw the class of each of ``count`` layers as a pattern that repeats every 1 to 8 layers."""
    if class_count == 1:
        return (0,) * count
    period = draw(between(1, min(count, MAX_PERIOD))) if count > 1 else 1
    unit = [draw(between(0, class_count - 1)) for _ in range(period)]
    return tuple([unit[index % period] for index in range(count)])


def draw_classes(draw: st.DrawFn, source: ClassSource, count: int) -> list[Layer]:
    """Draw ``count`` layer classes, the first of which gives the others their geometry."""
    base, first = _draw_base(draw, source)
    classes = [first]
    menu = _menu(source, base) if base is not None else _menu_without_pages(source)
    for _ in range(count - 1):
        classes.append(vary(draw, source, base, draw_one(draw, menu)))
    return classes


def _draw_base(draw: st.DrawFn, source: ClassSource) -> tuple[Paged | None, Layer]:
    """Draw the first class, and its half with pages."""
    options, family = source.options, source.family
    bases = tuple(kind for kind in family.bases if kind in options.kinds)
    if options.sparse and not family.sparse_attention:
        bases = tuple(kind for kind in bases if kind == "latent") or bases
    if not bases and "hybrid" not in options.kinds:
        return None, vary(draw, source, None, draw_one(draw, _menu_without_pages(source)))
    kind = draw_one(draw, bases) if bases else "hybrid"
    if source.base in bases:
        kind = source.base  # drawn all the same, so that a recipe takes no more choices than none
    if kind == "latent":
        latent = draw_latent(draw, source.kv_format, windows=options.windows)
        wanted = bool(draw(between(0, 1))) if options.sparse is None else options.sparse
        base: Paged = _with_planes(draw, source, latent, position=False) if wanted else latent
        return base, base
    attention = _fresh_attention(draw, source)
    wanted = family.sparse_attention if options.sparse is None else options.sparse
    if wanted and options.sparse is None and family.name == "any":
        wanted = bool(draw(between(0, 1)))
    if wanted and family.sparse_attention:
        attention = _with_planes(draw, source, attention, position=True)
    if kind == "hybrid":
        return attention, vary(draw, source, attention, "hybrid")
    return attention, attention


def _with_planes(draw: st.DrawFn, source: ClassSource, layer: _PagedT, *, position: bool) -> _PagedT:
    dim = layer.head_dim if isinstance(layer, AttentionLayer) else layer.row_dim
    planes = draw_planes(draw, (dim, layer.kv_format or source.kv_format), position=position)
    return msgspec.structs.replace(layer, side_planes=planes)


def _fresh_attention(draw: st.DrawFn, source: ClassSource) -> AttentionLayer:
    options = source.options
    return draw_attention(
        draw, source.kv_format, heads=options.heads, head_dims=options.head_dims, windows=options.windows
    )


def _menu(source: ClassSource, base: Paged) -> tuple[str, ...]:
    """Return what a further class may be beside ``base``, as far as the options allow it."""
    options = source.options
    latent = isinstance(base, LatentLayer)
    refused = {kind for kind in ("attention", "recurrent", "hybrid", "uncached") if kind not in options.kinds}
    if not options.windows:
        refused.add("window")
    if not options.layer_formats_allowed:
        refused.add("format")
    if options.sparse is False:
        refused |= {"planes", "loose"}
    if not base.side_planes and not (latent and options.sparse is not False):
        refused |= {"planes", "plain"}
    if ("latent" if latent else "attention") not in options.kinds:
        refused |= {"window", "planes", "plain", "heads", "format", "geometry", "loose"}
    menu = source.family.latent if latent else source.family.attention
    if options.plain and source.family.layer_formats:
        refused |= {"window", "heads"}  # a layer of its own has a window and heads of its own: "geometry"
    return tuple(entry for entry in menu if entry not in refused) or (_same(source),)


def _same(source: ClassSource) -> str:
    """Return the variation that is no variation."""
    return "twin" if {"attention", "latent"} & set(source.options.kinds) else "hybrid"


def _menu_without_pages(source: ClassSource) -> tuple[str, ...]:
    return tuple(kind for kind in ("recurrent", "uncached") if kind in source.options.kinds)


def vary(draw: st.DrawFn, source: ClassSource, base: Paged | None, kind: str) -> Layer:
    """Draw the variation ``kind`` of ``base``."""
    if kind == "uncached":
        return UncachedLayer()
    if kind == "recurrent" or base is None:
        return draw_state(draw, source)
    if kind == "hybrid" and isinstance(base, AttentionLayer):
        return HybridLayer(attention=base, recurrent=draw_state(draw, source))
    return vary_pages(draw, source, base, kind)


def vary_pages(draw: st.DrawFn, source: ClassSource, base: Paged, kind: str) -> Paged:
    """Draw the variation ``kind`` of the pages of ``base``: a layer with pages again."""
    make: dict[str, Callable[[], Paged]] = {
        "window": lambda: _other_window(draw, base),
        "plain": lambda: msgspec.structs.replace(base, side_planes=()),
        "planes": lambda: _with_planes(draw, source, base, position=isinstance(base, AttentionLayer)),
        "heads": lambda: _other_heads(draw, source, base),
        "format": lambda: _other_format(draw, source, base),
        "geometry": lambda: _other_geometry(draw, source, base),
        "attention": lambda: _fresh_attention(draw, source),
        "loose": lambda: _loose(draw, source, base),
        "twin": lambda: base,
    }
    return make[kind]()


def draw_state(draw: st.DrawFn, source: ClassSource) -> RecurrentLayer:
    """Draw a recurrent layer: one shape per model where the family has one state."""
    if source.state is not None and (source.family.one_state or not draw(between(0, 1))):
        return source.state
    source.state = draw_recurrent(
        draw,
        source.ranks,
        auxiliary=source.family.auxiliary,
        state_formats=not source.family.one_state and source.options.state_formats is None,
    )
    return source.state


def _other_window(draw: st.DrawFn, base: Paged) -> Paged:
    if base.window is not None:
        return msgspec.structs.replace(base, window=None, sink_tokens=0)
    return msgspec.structs.replace(base, window=draw_one(draw, WINDOWS))


def _other_heads(draw: st.DrawFn, source: ClassSource, base: Paged) -> Paged:
    heads = draw_heads(draw, source.options.heads)
    return msgspec.structs.replace(base, kv_heads=heads) if isinstance(base, AttentionLayer) else base


def _other_format(draw: st.DrawFn, source: ClassSource, base: Paged) -> Paged:
    return with_format(base, draw_one(draw, tuple(own for own in KV_ORDER if own is not source.kv_format)))


def with_format(layer: Paged, own: ElementFormat) -> Paged:
    """Return ``layer`` with a KV format of its own, its dims rounded up where the format needs whole scale blocks."""
    multiple = dim_multiple(own)
    if isinstance(layer, AttentionLayer):
        dim = round_up(layer.head_dim, multiple)
        return msgspec.structs.replace(layer, kv_format=own, head_dim=dim, value_dim=dim)
    dims = {"latent_dim": round_up(layer.latent_dim, multiple), "rope_dim": round_up(layer.rope_dim, multiple)}
    return msgspec.structs.replace(layer, kv_format=own, **dims)


def _other_geometry(draw: st.DrawFn, source: ClassSource, base: Paged) -> Paged:
    if isinstance(base, AttentionLayer):
        return _fresh_attention(draw, source)
    return draw_latent(draw, source.kv_format, windows=source.options.windows)


def _loose(draw: st.DrawFn, source: ClassSource, base: Paged) -> Paged:
    """Draw what few support: another value dim, a block size of the layer's own, planes on one geometry of many."""
    if isinstance(base, LatentLayer):
        layer: Paged = draw_latent(draw, source.kv_format, windows=source.options.windows)
        return _with_planes(draw, source, layer, position=True)
    attention = _fresh_attention(draw, source)
    oddity = draw_one(draw, ("value_dim", "planes", "tokens"))
    if oddity == "value_dim":
        value_dim = draw_head_dim(draw, source.kv_format, None)
        return msgspec.structs.replace(attention, value_dim=value_dim)
    if oddity == "planes":
        return _with_planes(draw, source, attention, position=True)
    return msgspec.structs.replace(attention, tokens_per_block=draw_number(draw, (1, 2, 4), 64))


def draw_layers(draw: st.DrawFn, source: ClassSource, count: int) -> tuple[list[Layer], Paged | None]:
    """Draw ``count`` layers as classes and a pattern, and the half with pages of the first class."""
    options = source.options
    if options.plain:
        return _draw_independent(draw, source, count)
    class_count = draw(between(1, options.max_classes)) if options.max_classes > 1 else 1
    classes = draw_classes(draw, source, class_count)
    pattern = draw_pattern(draw, len(classes), count)
    return [classes[index] for index in pattern], paged_part(classes[0])


def _draw_independent(draw: st.DrawFn, source: ClassSource, count: int) -> tuple[list[Layer], Paged | None]:
    """Draw every layer by itself, as the sampling that patterns and recipes are measured against."""
    base, first = _draw_base(draw, source)
    menu = _menu(source, base) if base is not None else _menu_without_pages(source)
    layers = [first]
    for _ in range(count - 1):
        if not source.family.one_state:
            source.state = None
        layers.append(vary(draw, source, base, draw_one(draw, menu)))
    return layers, base
