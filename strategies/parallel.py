"""Parallel layouts: a table of tensor-parallel degrees and kinds, then pipeline stages up to the layers there are.

>>> from hypothesis import find
>>> find(parallel_layouts(layers=3), lambda layout: layout.pp > 2 and layout.tp > 2).name
'tp4pp3'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal, TypeAlias

import msgspec
from hypothesis import strategies as st

from ..model.layers import HybridLayer, Layer, RecurrentLayer
from ..model.parallel import ParallelLayout
from .numbers import between, draw_one

TensorKind: TypeAlias = Literal["tp", "tep", "adp", "cp"]


class _Tensor(msgspec.Struct, frozen=True):
    """Everything of a layout but its pipeline stages."""

    kind: TensorKind
    tp: int
    ep: int = 1
    cp: int = 1

    @property
    def state_ranks(self) -> int:
        return 1 if self.kind == "adp" else self.tp * self.cp


_TENSOR: Final = (
    _Tensor("tp", 1),
    _Tensor("tp", 2),
    _Tensor("tp", 4),
    _Tensor("adp", 2),
    _Tensor("tep", 4, 4),
    _Tensor("tp", 8),
    _Tensor("tp", 3),
    _Tensor("adp", 4, 4),
    _Tensor("tep", 2, 2),
    _Tensor("tp", 4, 2),
    _Tensor("cp", 1, cp=2),
    _Tensor("cp", 2, cp=2),
    _Tensor("tp", 6),
    _Tensor("tp", 16),
    _Tensor("tp", 5),
    _Tensor("adp", 8, 2),
    _Tensor("tep", 8, 8),
    _Tensor("tp", 7),
    _Tensor("tp", 12, 3),
    _Tensor("tep", 32, 32),
)
_SHARED: Final = tuple(row for row in _TENSOR if row.tp > 1 and row.kind != "adp")
_STAGES: Final = (1, 1, 1, 2, 3, 4)
_PARTITIONS: Final = ("even", "even", "listed", "short")


@st.composite
def parallel_layouts(
    draw: st.DrawFn,
    *,
    layers: int = 1,
    max_tp: int = 32,
    max_pp: int = 4,
    kinds: tuple[TensorKind, ...] = ("tp", "tep", "adp", "cp"),
    uneven: bool = True,
    state_layers: tuple[Layer, ...] = (),
) -> ParallelLayout:
    """Return layouts for a model of ``layers`` layers: TP, TP with EP (``tep``), attention-DP (``adp``) and helix CP.

    Stages are at most ``layers`` and ``max_pp``; ``uneven`` allows an explicit partition. The recurrent heads and
    channels of ``state_layers`` divide over the ranks that share them.
    """
    divides = state_ranks_allowed(state_layers)
    return draw_parallel(draw, layers, max_tp=max_tp, max_pp=max_pp, kinds=kinds, uneven=uneven, divides=divides)


def draw_parallel(
    draw: st.DrawFn,
    layers: int,
    *,
    max_tp: int = 32,
    max_pp: int = 4,
    kinds: tuple[TensorKind, ...] = ("tp", "tep", "adp", "cp"),
    uneven: bool = True,
    divides: Callable[[int], bool] | None = None,
    shared: bool = False,
) -> ParallelLayout:
    """Draw a layout; ``divides`` says for which number of ranks recurrent states can be shared.

    ``shared`` asks for several ranks that share the heads of attention layers, where there is such a layout.
    """
    rows = _SHARED if shared else _TENSOR
    if divides is not None or max_tp < 32 or len(kinds) < 4:
        rows = tuple(
            row
            for row in rows
            if row.tp <= max_tp
            and (row.kind in kinds or row.tp * row.cp == 1)
            and (divides is None or divides(row.state_ranks))
        )
    row = draw_one(draw, rows or _TENSOR[:1])
    highest = min(layers, max_pp)
    pp = draw_one(draw, tuple(stages for stages in _STAGES if stages <= highest)) if highest > 1 else 1
    partition = _draw_partition(draw, layers, pp) if pp > 1 and uneven else None
    return ParallelLayout(
        tp=row.tp, pp=pp, ep=row.ep, cp=row.cp, attention_dp=row.kind == "adp", pp_partition=partition
    )


def _draw_partition(draw: st.DrawFn, layers: int, pp: int) -> tuple[int, ...] | None:
    """Draw the layers of each stage, None for an even split; ``short`` leaves a surplus that the last stage takes."""
    mode = draw_one(draw, _PARTITIONS)
    if mode == "even":
        return None
    left = layers - pp
    sizes = []
    for _ in range(pp - 1):
        extra = draw(between(0, left)) if left else 0
        left -= extra
        sizes.append(1 + extra)
    return (*sizes, 1 + left if mode == "listed" else 1)


def state_ranks_allowed(layers: Iterable[Layer]) -> Callable[[int], bool] | None:
    """Return which numbers of ranks can share the recurrent states of ``layers``; None where any can."""
    states = [layer.recurrent if isinstance(layer, HybridLayer) else layer for layer in layers]
    counts = [
        count for layer in states if isinstance(layer, RecurrentLayer) for count in (layer.heads, layer.conv_channels)
    ]
    if not counts:
        return None
    return lambda ranks: all(count % ranks == 0 for count in counts)
