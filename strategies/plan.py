"""``Plan``: a spec in the making, whose parts a rare recipe may still change."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..model.architecture import SparseAlgorithm
from ..model.formats import ElementFormat
from ..model.layers import (
    AttentionLayer,
    HybridLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    UncachedLayer,
    paged_part,
    recurrent_part,
)
from ..model.parallel import ParallelLayout, pipeline_stages
from ..model.spec import CacheSpec, Consumer, Draft
from .geometry import Paged
from .options import Options


class Plan(msgspec.Struct):
    """The parts of one spec. ``base`` is the half with pages that the model's layers are variations of."""

    options: Options
    kv_format: ElementFormat
    tokens_per_block: int
    layers: list[Layer]
    base: Paged | None
    parallel: ParallelLayout
    rank: int = 0
    state_format: ElementFormat = ElementFormat.BF16
    conv_format: ElementFormat = ElementFormat.BF16
    max_sequence_tokens: int | None = None
    draft: Draft = Draft()
    slots: int = 1
    state_slots: int | None = None
    consumer: Consumer = Consumer()

    def spec(self) -> CacheSpec:
        """Return the finished spec."""
        return CacheSpec(
            layers=tuple(self.layers),
            kv_format=self.kv_format,
            state_format=self.state_format,
            conv_format=self.conv_format,
            tokens_per_block=self.tokens_per_block,
            max_sequence_tokens=self.max_sequence_tokens,
            parallel=self.parallel,
            rank=self.rank,
            draft=self.draft,
            sparse_algorithm=self._sparse_algorithm(),
            slots=self.slots,
            state_slots=self.state_slots,
            consumer=self.consumer,
        )

    def _sparse_algorithm(self) -> SparseAlgorithm | None:
        sparse = {type(paged) for layer in self.layers if (paged := paged_part(layer)) and paged.side_planes}
        if AttentionLayer in sparse:
            return "qsa"
        return "dsa" if LatentLayer in sparse else None

    def may(self, *axes: str) -> bool:
        """Whether the caller has left all of ``axes`` free."""
        return self.options.pinned.isdisjoint(axes)

    def local(self) -> list[int]:
        """Return the target layers of this rank."""
        stages = pipeline_stages(len(self.layers), self.parallel.pp, self.parallel.pp_partition)
        return list(stages[self.parallel.coordinates(self.rank).pp_rank])

    def gather(self, count: int) -> list[int]:
        """Return this rank's layers when they are at least ``count``; if need be all layers, on one stage.

        Empty where the model has too few layers, or the caller pinned the layout.
        """
        local = self.local()
        if len(local) >= count:
            return local
        if len(self.layers) < count or not self.may("parallel"):
            return []
        where = self.parallel.coordinates(self.rank)
        self.rank = where.cp_rank * self.parallel.tp + where.tp_rank
        self.parallel = msgspec.structs.replace(self.parallel, pp=1, pp_partition=None)
        return self.local()

    def filler(self) -> Layer | None:
        """Return a layer that adds nothing to the attention life cycles; None where no kind of layer may."""
        if "uncached" in self.options.kinds:
            return UncachedLayer()
        return next((layer for layer in self.layers if isinstance(layer, RecurrentLayer)), None)

    def first_paged(self) -> Paged | None:
        """Return the first local layer with pages, else the model's base."""
        for index in self.local():
            paged = paged_part(self.layers[index])
            if paged is not None:
                return paged
        return self.base

    def replace_paged(self, change: Callable[[Paged], Paged]) -> None:
        """Change all layers with pages: the target's, the draft's, and the base."""
        self.layers = [_with_pages(layer, change) for layer in self.layers]
        if self.draft.layers:
            layers = tuple([_with_pages(layer, change) for layer in self.draft.layers])
            self.draft = msgspec.structs.replace(self.draft, layers=layers)
        self.base = change(self.base) if self.base is not None else None

    def replace_recurrent(self, change: Callable[[RecurrentLayer], RecurrentLayer]) -> None:
        """Change all layers with a recurrent state."""
        changed: list[Layer] = []
        for layer in self.layers:
            state = recurrent_part(layer)
            if state is None:
                changed.append(layer)
            elif isinstance(layer, HybridLayer):
                changed.append(msgspec.structs.replace(layer, recurrent=change(state)))
            else:
                changed.append(change(state))
        self.layers = changed

    def drop_folded_draft(self) -> bool:
        """Take folded draft layers out of the target's manager; False where the caller wants them folded."""
        if self.draft.mode != "folded":
            return True
        if "none" not in self.options.draft_modes:
            return False
        self.draft = Draft()
        return True


def _with_pages(layer: Layer, change: Callable[[Paged], Paged]) -> Layer:
    if isinstance(layer, HybridLayer):
        changed = change(layer.attention)
        return msgspec.structs.replace(layer, attention=changed) if isinstance(changed, AttentionLayer) else layer
    return change(layer) if isinstance(layer, AttentionLayer | LatentLayer) else layer
