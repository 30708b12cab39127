"""Layers of every kind, one at a time, with geometry that is legal for the KV format and the ranks.

>>> from hypothesis import find
>>> from kvsan.model.formats import ElementFormat
>>> layer = find(attention_layers(kv_format=ElementFormat.NVFP4), lambda layer: layer.head_dim < 100)
>>> layer.kv_heads, layer.head_dim
(1, 64)
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from hypothesis import strategies as st

from ..model.arithmetic import round_up
from ..model.formats import ElementFormat
from ..model.layers import (
    AttentionLayer,
    AuxiliaryState,
    HybridLayer,
    LatentLayer,
    RecurrentLayer,
    SidePlane,
)
from .formats import KV_ORDER, STATE_ORDER, dim_multiple
from .numbers import (
    HEAD_DIMS,
    HEADS,
    LATENT_DIMS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_SINKS,
    MAX_WINDOW,
    ROPE_DIMS,
    SINKS,
    WINDOWS,
    between,
    draw_number,
    draw_one,
)

_ALGORITHMS: Final[tuple[Literal["gdn", "mamba2", "mamba1", "short_conv", "kda"], ...]] = (
    "gdn",
    "mamba2",
    "mamba1",
    "short_conv",
    "kda",
)
_REACH: Final = ("full", "full", "full", "window", "sinks")

_NGRAM: Final = AuxiliaryState(role="ple_context", shape=(3,), format=ElementFormat.INT64)
_PLE_CONV: Final = AuxiliaryState(role="ple_conv", shape=(256, 3), format=ElementFormat.BF16)

_RECURRENT: Final = (
    RecurrentLayer(algorithm="gdn", heads=1, head_dim=128, groups=1, state_dim=128),
    RecurrentLayer(algorithm="mamba1", heads=16, state_dim=16),
    RecurrentLayer(algorithm="short_conv", heads=128, conv_kernel=3),
    RecurrentLayer(algorithm="gdn", heads=32, head_dim=128, groups=16, state_dim=128),
    RecurrentLayer(algorithm="mamba2", heads=64, head_dim=64, groups=1, state_dim=128),
    RecurrentLayer(algorithm="kda", heads=32, head_dim=128, groups=32, state_dim=128),
    RecurrentLayer(algorithm="mamba1", heads=8192, state_dim=16),
)
"""Published shapes, two small ones first."""


@st.composite
def attention_layers(
    draw: st.DrawFn,
    *,
    kv_format: ElementFormat = ElementFormat.BF16,
    heads: st.SearchStrategy[int] | None = None,
    head_dims: st.SearchStrategy[int] | None = None,
    windows: bool = True,
    layer_formats: bool = False,
    side_planes: st.SearchStrategy[tuple[SidePlane, ...]] | None = None,
) -> AttentionLayer:
    """Return attention layers of a model whose KV format is ``kv_format``: 1 to 256 heads of 1 to 1024 elements.

    ``windows`` allows sliding windows, with sinks; ``layer_formats`` a KV format of the layer's own.
    """
    own = draw_layer_format(draw, kv_format) if layer_formats else None
    planes = () if side_planes is None else draw(side_planes)
    layer = draw_attention(draw, own or kv_format, heads=heads, head_dims=head_dims, windows=windows)
    return msgspec.structs.replace(layer, kv_format=own, side_planes=planes)


def draw_attention(
    draw: st.DrawFn,
    kv_format: ElementFormat,
    *,
    heads: st.SearchStrategy[int] | None = None,
    head_dims: st.SearchStrategy[int] | None = None,
    windows: bool = True,
) -> AttentionLayer:
    """Draw an attention layer without side planes whose pages are of ``kv_format``."""
    kv_heads, head_dim = draw_heads(draw, heads), draw_head_dim(draw, kv_format, head_dims)
    reach = draw_reach(draw, windows=windows)
    return AttentionLayer(
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=reach.window,
        sink_tokens=reach.sink_tokens,
    )


def draw_heads(draw: st.DrawFn, heads: st.SearchStrategy[int] | None) -> int:
    """Draw a number of KV heads."""
    return draw_number(draw, HEADS, MAX_HEADS) if heads is None else draw(heads)


def draw_head_dim(draw: st.DrawFn, kv_format: ElementFormat, head_dims: st.SearchStrategy[int] | None) -> int:
    """Draw a head dim; one given is rounded up where ``kv_format`` needs whole scale blocks."""
    multiple = dim_multiple(kv_format)
    if head_dims is not None:
        return round_up(draw(head_dims), multiple)
    return draw_number(draw, HEAD_DIMS, MAX_HEAD_DIM, multiple=multiple)


class Reach(msgspec.Struct, frozen=True):
    """How far back a layer attends: all the way without a window, and to ``sink_tokens`` before it."""

    window: int | None = None
    sink_tokens: int = 0


def draw_reach(draw: st.DrawFn, *, windows: bool) -> Reach:
    """Draw full attention, a window, or a window with sinks."""
    reach = draw_one(draw, _REACH) if windows else "full"
    if reach == "full":
        return Reach()
    window = draw_number(draw, WINDOWS, MAX_WINDOW)
    return Reach(window, draw_number(draw, SINKS, MAX_SINKS) if reach == "sinks" else 0)


def draw_layer_format(draw: st.DrawFn, kv_format: ElementFormat) -> ElementFormat | None:
    """Draw a KV format of a layer's own, None for the model's."""
    own = draw_one(draw, (None, *KV_ORDER))
    return None if own is kv_format else own


@st.composite
def latent_layers(
    draw: st.DrawFn,
    *,
    kv_format: ElementFormat = ElementFormat.BF16,
    windows: bool = True,
    layer_formats: bool = False,
    side_planes: st.SearchStrategy[tuple[SidePlane, ...]] | None = None,
) -> LatentLayer:
    """Return latent (MLA) layers of a model whose KV format is ``kv_format``."""
    own = draw_layer_format(draw, kv_format) if layer_formats else None
    planes = () if side_planes is None else draw(side_planes)
    layer = draw_latent(draw, own or kv_format, windows=windows)
    return msgspec.structs.replace(layer, kv_format=own, side_planes=planes)


def draw_latent(draw: st.DrawFn, kv_format: ElementFormat, *, windows: bool = True) -> LatentLayer:
    """Draw a latent layer without side planes whose rows are of ``kv_format``."""
    multiple = dim_multiple(kv_format)
    latent_dim = draw_number(draw, LATENT_DIMS, MAX_HEAD_DIM, multiple=multiple)
    rope_dim = draw_one(draw, ROPE_DIMS)
    reach = draw_reach(draw, windows=windows)
    return LatentLayer(latent_dim=latent_dim, rope_dim=rope_dim, window=reach.window, sink_tokens=reach.sink_tokens)


@st.composite
def recurrent_layers(
    draw: st.DrawFn, *, ranks: int = 1, auxiliary: bool = False, state_formats: bool = False
) -> RecurrentLayer:
    """Return recurrent layers whose heads and channels divide over ``ranks``: published shapes, and any.

    ``auxiliary`` allows states beside the recurrent ones, ``state_formats`` formats of the layer's own.
    """
    return draw_recurrent(draw, ranks, auxiliary=auxiliary, state_formats=state_formats)


def draw_recurrent(draw: st.DrawFn, ranks: int, *, auxiliary: bool, state_formats: bool) -> RecurrentLayer:
    """Draw a recurrent layer; heads and groups are rounded up until the states divide over ``ranks``."""
    row = draw(between(0, len(_RECURRENT)))
    layer = _RECURRENT[row] if row < len(_RECURRENT) else _draw_any_recurrent(draw)
    extra = draw_one(draw, ("plain", "plain", "plain", "ssm", "conv", "auxiliary", "two auxiliaries"))
    change: dict[str, object] = {}
    if state_formats and extra in ("ssm", "conv"):
        change[f"{extra}_format"] = draw_one(draw, STATE_ORDER)
    if auxiliary and extra.endswith(("auxiliary", "auxiliaries")):
        change["auxiliary"] = (_NGRAM,) if extra == "auxiliary" else (_NGRAM, _PLE_CONV)
    change.update(shared_heads(layer, ranks))
    return msgspec.structs.replace(layer, **change) if change else layer


def _draw_any_recurrent(draw: st.DrawFn) -> RecurrentLayer:
    algorithm = draw_one(draw, _ALGORITHMS)
    heads, kernel = draw_number(draw, HEADS, MAX_HEADS), draw_one(draw, (4, 2, 3, 5, 8))
    if algorithm == "short_conv":
        return RecurrentLayer(algorithm="short_conv", heads=heads, conv_kernel=kernel)
    state_dim = draw_number(draw, (128, 64, 16, 1), 256)
    if algorithm == "mamba1":
        return RecurrentLayer(algorithm="mamba1", heads=heads, state_dim=state_dim, conv_kernel=kernel)
    head_dim, groups = draw_number(draw, (128, 64, 16, 1), 256), draw_one(draw, (1, 2, 4, 8))
    return RecurrentLayer(
        algorithm=algorithm, heads=heads, head_dim=head_dim, groups=groups, state_dim=state_dim, conv_kernel=kernel
    )


def shared_heads(layer: RecurrentLayer, ranks: int) -> dict[str, int]:
    """Return the heads and groups, rounded up, with which the states of ``layer`` divide over ``ranks``."""
    change = {}
    if layer.heads % ranks:
        change["heads"] = round_up(layer.heads, ranks)
    if layer.groups and 2 * layer.groups * layer.state_dim % ranks:
        change["groups"] = round_up(layer.groups, ranks)
    return change


@st.composite
def hybrid_layers(
    draw: st.DrawFn,
    *,
    kv_format: ElementFormat = ElementFormat.BF16,
    ranks: int = 1,
    attention: st.SearchStrategy[AttentionLayer] | None = None,
    recurrent: st.SearchStrategy[RecurrentLayer] | None = None,
) -> HybridLayer:
    """Return layers with an attention and a recurrent half, drawn from the strategies given or from all."""
    return HybridLayer(
        attention=draw(attention_layers(kv_format=kv_format) if attention is None else attention),
        recurrent=draw(recurrent_layers(ranks=ranks) if recurrent is None else recurrent),
    )
