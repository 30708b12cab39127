"""Pairs of deployments of one model, between which a cache is to move.

>>> from hypothesis import find
>>> pair = find(peer_pairs(), lambda pair: pair.source.parallel.tp > pair.destination.parallel.tp)
>>> pair.source.parallel.name, pair.destination.parallel.name
('tp2', 'tp1')
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from ..model.formats import KV_FORMATS
from ..model.parallel import ParallelLayout
from ..model.spec import CacheSpec, Draft
from ..sim.transfer.pair import Pair
from .numbers import draw_one
from .specs import cache_specs

_TENSOR: Final = ("tp1", "tp2", "tp4", "adp2", "tep4", "tp8", "adp4", "tp3", "tp6")
_STAGES: Final = (1, 1, 1, 1, 2, 3)
_TOKENS: Final = (1, 2, 4, 8)
_OTHER_TOKENS: Final = (*_TOKENS, 3)
"""Tokens per block of a destination that has its own: divisible, or not."""
_SAME: Final = (False,) * 7 + (True,)
"""One in eight sides differs in something beside its parallel layout."""


def peer_pairs(*, family: str = "any", max_layers: int = 6, alike: bool = False) -> st.SearchStrategy[Pair]:
    """Return pairs of a family of specs (``cache_specs``), with small pages, on up to 8 ranks and 3 stages.

    The destination is the source under another parallel layout; one in eight has other tokens per block, another axis
    order, another KV format or other draft layers, unless ``alike`` asks for none of that.
    """
    sources = cache_specs(
        family=family,
        tokens_per_block=st.sampled_from(_TOKENS),
        heads=st.sampled_from((1, 2, 4, 8, 3, 6)),
        parallel=st.just(ParallelLayout()),
        slots=st.just(1),
        max_layers=max_layers,
        quotas=False,
    )
    return _pairs(sources, alike)


@st.composite
def _pairs(draw: st.DrawFn, sources: st.SearchStrategy[CacheSpec], alike: bool) -> Pair:
    source = draw(sources)
    stages = len(source.layers)
    one, other = _parallel(draw, stages), _parallel(draw, stages)
    changes: dict[str, Any] = {"parallel": other}
    if not alike and draw_one(draw, _SAME):
        changes["tokens_per_block"] = draw_one(draw, _OTHER_TOKENS)
    if not alike and draw_one(draw, _SAME):
        order = "NHD" if source.consumer.kv_layout == "HND" else "HND"
        changes["consumer"] = msgspec.structs.replace(source.consumer, kv_layout=order)
    if not alike and draw_one(draw, _SAME):
        changes["kv_format"] = draw_one(draw, KV_FORMATS)
    if not alike and source.draft.layers and draw_one(draw, _SAME):
        changes["draft"] = draw_one(draw, (Draft(), Draft(mode="separate", layers=source.draft.layers)))
    return Pair(
        source=msgspec.structs.replace(source, parallel=one),
        destination=msgspec.structs.replace(source, **changes),
        source_dp=_dp(draw, one),
        destination_dp=_dp(draw, other),
    )


def _parallel(draw: st.DrawFn, layers: int) -> ParallelLayout:
    tensor = draw_one(draw, _TENSOR)
    stages = min(draw_one(draw, _STAGES), layers)
    return ParallelLayout.parse(tensor if stages == 1 else f"{tensor}pp{stages}")


def _dp(draw: st.DrawFn, parallel: ParallelLayout) -> int:
    return draw(st.integers(0, parallel.tp - 1)) if parallel.attention_dp else 0
