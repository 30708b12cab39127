"""Strategies for the selection of a cache manager: what the exhaustive audit cannot list.

The grid of inputs is finite and audited point by point (``kvsan.ci.audit``). Beam widths, batches and pipeline stages
are not, and neither are the models that the geometry is read from: layers with heads and dims of their own, budgets.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ..model.formats import KV_FORMATS
from ..model.layers import AttentionLayer, Layer
from ..model.parallel import ParallelLayout
from ..model.selection import AXES, AccuracyReference, KvRequest, SelectionInputs
from ..model.spec import CacheSpec

_COUNTS = {"beam_width": 16, "pp": 16}


def selection_inputs(**fixed: Any) -> st.SearchStrategy[SelectionInputs]:
    """Return a strategy for inputs of the selection; ``fixed`` ones have the value given."""
    drawn: dict[str, st.SearchStrategy[Any]] = {
        name: st.sampled_from(values) for name, values in AXES.items() if name not in _COUNTS
    }
    drawn |= {name: st.integers(1, most) for name, most in _COUNTS.items()}
    drawn["max_batch"] = st.integers(1, 4096)
    return st.builds(SelectionInputs, **(drawn | {name: st.just(value) for name, value in fixed.items()}))


@st.composite
def geometry_specs(draw: st.DrawFn, max_layers: int = 6) -> CacheSpec:
    """Draw a dense model whose layers take heads and head dims from a few shapes, on a quota of any size.

    One shape makes a uniform geometry; several may, or may not, meet in one model. Windows and formats vary too, and do
    not count.
    """
    shapes = draw(
        st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([64, 128, 256])), min_size=1, max_size=3)
    )
    count = draw(st.integers(1, max_layers))
    layers: list[Layer] = []
    for _ in range(count):
        heads, dim = draw(st.sampled_from(shapes))
        layers.append(AttentionLayer(kv_heads=heads, head_dim=dim, window=draw(st.sampled_from([None, 512]))))
    parallel = draw(st.sampled_from([ParallelLayout(), ParallelLayout(tp=2), ParallelLayout(tp=2, attention_dp=True)]))
    return CacheSpec(
        layers=tuple(layers),
        kv_format=draw(st.sampled_from(KV_FORMATS)),
        parallel=parallel,
        slots=None,
        quota_bytes=draw(st.integers(1, 1 << 40)),
    )


def kv_requests() -> st.SearchStrategy[KvRequest]:
    """Return a strategy for what is asked of the KV format, by whom, and what can be stored."""
    formats = st.sampled_from(KV_FORMATS)
    return st.builds(
        KvRequest,
        requested=st.none() | formats,
        checkpoint=st.none() | formats,
        model_format=formats,
        supported=st.lists(formats, unique=True, max_size=len(KV_FORMATS)).map(tuple),
    )


def accuracy_references(max_size: int = 6) -> st.SearchStrategy[tuple[AccuracyReference, ...]]:
    """Return a strategy for lists of accuracy references, with and without a KV selector."""
    formats = st.sampled_from(KV_FORMATS)
    reference = st.builds(
        AccuracyReference,
        name=st.sampled_from(["one", "two", "three"]),
        model_format=formats,
        kv_format=st.none() | formats,
    )
    return st.lists(reference, max_size=max_size).map(tuple)
