"""Draft layers and consumers.

>>> from hypothesis import find
>>> find(consumers(demanding=True), lambda consumer: consumer.alignment_bytes > 16).alignment_bytes
128
"""

from __future__ import annotations

from typing import Final, Literal

from hypothesis import strategies as st

from ..model.layers import AttentionLayer, Layer
from ..model.spec import Consumer, Draft
from .classes import ClassSource, vary_pages
from .geometry import Paged
from .layers import attention_layers
from .numbers import between, draw_one
from .options import DRAFT_MODES

_KV_LAYOUTS: Final[tuple[Literal["HND", "NHD"], ...]] = ("HND", "NHD")
_DEMANDS: Final = ((1, 32, 64), (16, 32, 64), (128, 32, 64), (1, 64, 64), (1, 32, 32), (4096, 32, 64))


@st.composite
def consumers(draw: st.DrawFn, *, demanding: bool = False) -> Consumer:
    """Return consumers: both axis orders; with ``demanding`` also wide accesses, wide indices and narrow offsets.

    An allocator that pads nothing cannot promise wide accesses to any geometry, so by default nobody asks for them.
    """
    kv_layout = draw_one(draw, _KV_LAYOUTS)
    if not demanding:
        return Consumer(kv_layout=kv_layout)
    alignment, index_bits, offset_bits = draw_one(draw, _DEMANDS)
    return Consumer(kv_layout=kv_layout, alignment_bytes=alignment, index_bits=index_bits, offset_bits=offset_bits)


@st.composite
def drafts(
    draw: st.DrawFn,
    *,
    modes: tuple[str, ...] = DRAFT_MODES,
    layers: st.SearchStrategy[Paged] | None = None,
    max_layers: int = 2,
) -> Draft:
    """Return draft modes with 1 to ``max_layers`` equal draft layers, drawn from ``layers`` or any K/V layer."""
    mode = draw_one(draw, modes)
    if mode == "none":
        return Draft()
    count = draw(between(1, max_layers))
    layer = draw(attention_layers() if layers is None else layers)
    return _draft(mode, (layer,) * count)


def _draft(mode: str, layers: tuple[Layer, ...]) -> Draft:
    return Draft(mode="separate" if mode == "separate" else "folded", layers=layers)


def draw_draft(draw: st.DrawFn, source: ClassSource, base: Paged | None, *, attention_dp: bool) -> Draft:
    """Draw the draft layers of a model: variations of its layer ``base``, in a mode that its layout supports."""
    modes = source.options.draft_modes
    if attention_dp and source.family.name != "any":
        modes = tuple(mode for mode in modes if mode != "separate") or modes
    weighted = ("none", *modes) if "none" in modes and len(modes) > 1 else modes
    mode = draw_one(draw, weighted)
    if mode == "none":
        return Draft()
    if base is None:
        base = AttentionLayer(kv_heads=1, head_dim=128)
    kinds = source.family.separate_drafts if mode == "separate" else source.family.drafts
    layer = vary_pages(draw, source, base, draw_one(draw, _allowed(source, base, kinds)))
    layers = (layer,) * draw_one(draw, (1, 1, 2))
    return _draft(mode, layers)


def _allowed(source: ClassSource, base: Paged, kinds: tuple[str, ...]) -> tuple[str, ...]:
    refused = set()
    if not source.options.layer_formats_allowed:
        refused.add("format")
    if isinstance(base, AttentionLayer):
        refused.add("attention")  # the same as "geometry"
    return tuple(kind for kind in kinds if kind not in refused)
