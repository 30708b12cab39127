"""Parallel layouts: how ranks share the layers and the heads of a model.

    >>> ParallelLayout.parse("tep4")
    ParallelLayout(tp=4, pp=1, ep=4, cp=1, attention_dp=False, pp_partition=None)
    >>> ParallelLayout(tp=2, pp=3).name
    'tp2pp3'

Ranks are numbered tensor-parallel innermost, then context-parallel, then pipeline stage:
``rank = (pp_rank * cp + cp_rank) * tp + tp_rank``.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from .arithmetic import div_up
from .errors import SpecError, require_int, require_members, shown

MAX_RANKS: Final = 1 << 14
"""Largest degree of any one kind of parallelism."""

_NAME: Final = re.compile(r"(tp|tep|adp|pp|cp|ep)([0-9]{1,6})")


class RankCoordinates(msgspec.Struct, frozen=True):
    """Where one rank stands on each axis of a parallel layout."""

    tp_rank: int
    cp_rank: int
    pp_rank: int


class ParallelLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Degrees of tensor, pipeline, expert and context parallelism, and whether attention runs data-parallel.

    ``ep`` spreads experts over the tensor-parallel ranks and does not change any cache. Under ``attention_dp`` every
    rank of
    the tensor-parallel group keeps all heads. ``pp_partition`` gives the layers of each pipeline stage; without it
    the layers
    are split evenly, the first stages taking one more when they do not divide.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    attention_dp: bool = False
    pp_partition: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "ep", "cp"):
            require_int(axis, getattr(self, axis), 1, MAX_RANKS)
        if self.tp % self.ep:
            raise SpecError("ep", f"found {self.ep}, needs a divisor of the tensor-parallel size {self.tp}")
        if type(self.attention_dp) is not bool:
            raise SpecError("attention_dp", f"found {shown(self.attention_dp)}, needs true or false")
        if self.pp_partition is None:
            return
        partition = require_members("pp_partition", self.pp_partition, object, "a whole number")
        msgspec.structs.force_setattr(self, "pp_partition", partition)
        if len(self.pp_partition) != self.pp:
            raise SpecError(
                "pp_partition", f"found {len(self.pp_partition)} entries, needs one for each of {self.pp} stages"
            )
        for layers in self.pp_partition:
            require_int("pp_partition", layers, 1, 10_000)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.pp

    @property
    def attention_tp(self) -> int:
        """Ranks that share the heads of an attention layer: 1 under attention-DP."""
        return 1 if self.attention_dp else self.tp

    @property
    def state_tp(self) -> int:
        """Ranks that share the heads of a recurrent layer: 1 under attention-DP, else tensor times context parallel."""
        return 1 if self.attention_dp else self.tp * self.cp

    @property
    def name(self) -> str:
        """The short name: ``tpN``, ``tepN`` (TP N with EP N) or ``adpN`` (TP N with attention-DP), then ``ppN``,
        ``cpN``."""
        if self.attention_dp:
            name = f"adp{self.tp}" + (f"ep{self.ep}" if self.ep > 1 else "")
        elif self.ep == self.tp > 1:
            name = f"tep{self.tp}"
        else:
            name = f"tp{self.tp}" + (f"ep{self.ep}" if self.ep > 1 else "")
        return name + (f"pp{self.pp}" if self.pp > 1 else "") + (f"cp{self.cp}" if self.cp > 1 else "")

    @classmethod
    def parse(cls, name: str, pp_partition: tuple[int, ...] | None = None) -> ParallelLayout:
        """Return the layout with the short name ``name`` (see ``name``); raise ``SpecError`` for anything else."""
        if not isinstance(name, str):
            raise SpecError("layout", f"found {shown(name)}, needs a name such as tp4, tep4, adp4 or tp2pp2")
        text = name.strip().lower()
        parts = _NAME.findall(text)
        if not parts or "".join(axis + size for axis, size in parts) != text:
            raise SpecError(
                "layout", f"unknown parallel layout {shown(name)}, needs a name such as tp4, tep4, adp4 or tp2pp2"
            )
        sizes: dict[str, int] = {}
        for axis, size in parts:
            if axis in sizes:
                raise SpecError("layout", f"{shown(name)} gives {axis} twice")
            sizes[axis] = int(size)
        tensor_axes = [axis for axis in ("tp", "tep", "adp") if axis in sizes]
        if len(tensor_axes) > 1 or ("tep" in sizes and "ep" in sizes):
            raise SpecError("layout", f"{shown(name)} mixes tp, tep, adp and ep, needs one of tpN, tpNepM, tepN, adpN")
        tp = sizes[tensor_axes[0]] if tensor_axes else 1
        return cls(
            tp=tp,
            pp=sizes.get("pp", 1),
            ep=tp if "tep" in sizes else sizes.get("ep", 1),
            cp=sizes.get("cp", 1),
            attention_dp="adp" in sizes,
            pp_partition=pp_partition,
        )

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return where ``rank`` stands; raise ``SpecError`` when there is no such rank."""
        require_int("rank", rank, 0, self.world_size - 1)
        outer, tp_rank = divmod(rank, self.tp)
        pp_rank, cp_rank = divmod(outer, self.cp)
        return RankCoordinates(tp_rank, cp_rank, pp_rank)


def pipeline_stages(layer_count: int, pp: int, partition: tuple[int, ...] | None) -> tuple[range, ...]:
    """Return the global layers of each pipeline stage, contiguous and in order.

    Even split: the first ``layer_count mod pp`` stages take one layer more. With a ``partition``, layers beyond its
    sum go to
    the last stage. Raises ``SpecError`` when a stage would have no layer or the partition asks for more layers than
    there are.
    """
    if pp > layer_count:
        raise SpecError("pp", f"found {pp} pipeline stages for {layer_count} layers, needs at most one stage per layer")
    if partition is None:
        each, extra = divmod(layer_count, pp)
        sizes = [each + (stage < extra) for stage in range(pp)]
    else:
        surplus = layer_count - sum(partition)
        if surplus < 0:
            raise SpecError(
                "pp_partition", f"found {sum(partition)} layers in all, needs at most the model's {layer_count}"
            )
        sizes = [*partition[:-1], partition[-1] + surplus]
    stages = []
    first = 0
    for size in sizes:
        stages.append(range(first, first + size))
        first += size
    return tuple(stages)


def rank_heads(heads: int, ranks: int) -> int:
    """Return the KV heads that each of ``ranks`` tensor-parallel ranks stores for a layer of ``heads`` heads.

    Rounded up: fewer heads than ranks are replicated (1 per rank), and heads that do not divide leave padding heads
    at the end.
    """
    return div_up(heads, ranks)


def rank_head_range(heads: int, ranks: int, tp_rank: int) -> range:
    """Return the model's heads whose K/V one rank stores; empty where the rank holds nothing but padding heads.

    With at least as many heads as ranks, rank r holds the heads from ``r * ceil(heads / ranks)`` on; with fewer, head
    ``floor(r * heads / ranks)``, so that every head is held by ranks that stand side by side.
    """
    if heads < ranks:
        head = tp_rank * heads // ranks  # floor: which replica group a rank stands in, not a size
        return range(head, head + 1)
    each = div_up(heads, ranks)
    return range(min(heads, tp_rank * each), min(heads, (tp_rank + 1) * each))
