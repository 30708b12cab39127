"""``HybridModel``: a tiny random model in float64 that remembers through a ``Store`` alone.

Its layers are those of a spec: attention (with a sliding window, or QSA's sparse selection), latent attention, gated
delta nets, and draft layers for multi-token prediction. Every token is computed alone, prompts included: so a chunk, a
prefix that was reused or a batch changes no rounding.
"""

from __future__ import annotations

from typing import Final

import msgspec
import torch

from ...model.errors import SpecError
from ...model.layers import INDEX_KEY, INDEX_POSITION, AttentionLayer, LatentLayer, RecurrentLayer
from ...model.spec import CacheSpec
from ...sim.layout import CONV_STATE, KEY, SSM_STATE, VALUE
from ..attention.sparse import ROTARY_BASE
from ..reference import sparse
from ..reference import state as recurrences
from .attending import SkipSoftmax, attend
from .store import StepRow, Store

WIDTH: Final = 24
VOCABULARY: Final = 50
QUERY_GROUP: Final = 4
"""Query heads of one KV head."""
INDEX_HEADS: Final = 2
JOIN_SIZE: Final = 0.03
OUT_SIZE: Final = 0.4
"""How much layers add to the stream: enough that what was said before decides what comes next."""


class Sparse(msgspec.Struct, frozen=True):
    """QSA's selection: contexts of more than ``budget_tokens`` keep ``kept_blocks`` blocks of ``block_tokens``."""

    budget_tokens: int = 8
    kept_blocks: int = 2
    block_tokens: int = 4


class HybridModel:
    """The model of ``spec`` with random weights; ``skipped`` counts the blocks that skip-softmax left out so far.

    ``sparse`` None leaves QSA off. Raises ``SpecError`` for layers that the model has no arithmetic for.
    """

    def __init__(
        self, spec: CacheSpec, seed: int = 0, *, skip: SkipSoftmax | None = None, sparse: Sparse | None = None
    ) -> None:
        self.spec = spec
        self.skip = skip
        self.sparse = sparse
        self.skipped = 0
        self._generator = torch.Generator().manual_seed(seed)
        self.embedding = self._weights(VOCABULARY, WIDTH, size=1.0)
        self.head = self._weights(WIDTH, VOCABULARY, size=1.0)
        self.layers = [self._layer(number) for number in range(len(spec.layers))]
        for number, layer in enumerate(spec.draft.layers, len(spec.layers)):
            # a draft that resembles the target is right now and then, and wrong now and then
            like = layer in spec.layers
            self.layers.append(self.layers[spec.layers.index(layer)] if like else self._layer(number))
        self.joins = [self._weights(WIDTH, WIDTH, size=JOIN_SIZE) for _ in spec.draft.layers]

    def hidden(self, store: Store, row: StepRow, position: int, token: int) -> torch.Tensor:
        """Return the last hidden state (WIDTH,) of one token, and leave its cache entries in ``store``."""
        stream = self.embedding[token] + _place(position)
        for number in range(len(self.spec.layers)):
            stream = stream + self._run(store, row, number, position, _normed(stream))
        return stream

    def draft(
        self, store: Store, row: StepRow, module: int, position: int, hidden: torch.Tensor, token: int
    ) -> torch.Tensor:
        """Return the hidden state of draft layer ``module``: from that of ``position`` and the token that comes next.

        ``token`` is the one ``module + 1`` positions further; the state predicts the one behind it.
        """
        stream = self.embedding[token] + _place(position + 1 + module) + _normed(hidden) @ self.joins[module]
        number = len(self.spec.layers) + module
        return stream + self._run(store, row, number, position, _normed(stream))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (VOCABULARY,) of a hidden state."""
        return _normed(hidden) @ self.head

    def _weights(self, *shape: int, size: float | None = None) -> torch.Tensor:
        scale = float(torch.rsqrt(torch.tensor(float(shape[0])))) if size is None else size
        return scale * torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def _layer(self, number: int) -> dict[str, torch.Tensor]:
        """Return the weights of one layer by name."""
        layer = (*self.spec.layers, *self.spec.draft.layers)[number]
        if isinstance(layer, AttentionLayer):
            heads = layer.kv_heads
            return {
                "query": self._weights(WIDTH, heads * QUERY_GROUP, layer.head_dim, size=0.7),
                "key": self._weights(WIDTH, heads, layer.head_dim),
                "value": self._weights(WIDTH, heads, layer.value_dim),
                "out": self._weights(heads * QUERY_GROUP * layer.value_dim, WIDTH, size=OUT_SIZE),
                **self._index_weights(layer),
            }
        if isinstance(layer, LatentLayer):
            return {
                "query": self._weights(WIDTH, QUERY_GROUP, layer.row_dim, size=0.7),
                "key": self._weights(WIDTH, 1, layer.row_dim),
                "out": self._weights(QUERY_GROUP * layer.latent_dim, WIDTH, size=OUT_SIZE),
            }
        if isinstance(layer, RecurrentLayer) and layer.algorithm == "gdn":
            return {
                "in": self._weights(WIDTH, layer.conv_channels),
                "conv": self._weights(layer.conv_channels, layer.conv_kernel, size=0.6),
                "gates": self._weights(WIDTH, 2, layer.heads),
                "decay": self._weights(layer.heads, size=0.5),
                "out": self._weights(layer.heads * layer.head_dim, WIDTH, size=OUT_SIZE),
            }
        found = f"layer {number} is {type(layer).__name__}"
        raise SpecError("layers", f"{found}, the testbed's model has attention, latent attention and gated delta nets")

    def _index_weights(self, layer: AttentionLayer) -> dict[str, torch.Tensor]:
        for plane in layer.side_planes:
            if plane.role == INDEX_KEY:
                return {
                    "index_query": self._weights(WIDTH, INDEX_HEADS, plane.dim),
                    "index_key": self._weights(WIDTH, 1, plane.dim),
                }
        return {}

    def _run(self, store: Store, row: StepRow, number: int, position: int, stream: torch.Tensor) -> torch.Tensor:
        layer = (*self.spec.layers, *self.spec.draft.layers)[number]
        if isinstance(layer, RecurrentLayer):
            return self._recur(store, row, number, layer, position, stream)
        if not isinstance(layer, AttentionLayer | LatentLayer):
            raise SpecError("layers", f"layer {number} is {type(layer).__name__}, which the model has not")
        weights = self.layers[number]
        queries = torch.einsum("w,whd->hd", stream, weights["query"])
        store.put(row, number, KEY, position, torch.einsum("w,whd->hd", stream, weights["key"]))
        if isinstance(layer, AttentionLayer):
            store.put(row, number, VALUE, position, torch.einsum("w,whd->hd", stream, weights["value"]))
        positions, keys = store.get(row, number, KEY, position, QUERY_GROUP)
        if isinstance(layer, LatentLayer):
            values = keys[..., : layer.latent_dim]
        else:
            values = store.get(row, number, VALUE, position, QUERY_GROUP)[1]
        seen = torch.ones(len(positions), dtype=torch.bool)
        if layer.window is not None:
            seen = (positions > position - layer.window) | (positions < layer.sink_tokens)
        if "index_key" in weights:
            seen &= self._chosen(store, row, number, position, stream)
        # what is not seen is left out, not masked: a cache may have dropped it
        answers, skipped = attend(
            queries, keys[seen].flatten(1, 2), values[seen].flatten(1, 2), positions[seen], self.skip
        )
        self.skipped += skipped
        return answers.flatten() @ weights["out"]

    def _chosen(self, store: Store, row: StepRow, number: int, position: int, stream: torch.Tensor) -> torch.Tensor:
        """Store one token's index key and place, and return which tokens QSA selects: all up to its budget."""
        weights, place = self.layers[number], _coordinates(position)
        store.put(row, number, INDEX_KEY, position, torch.einsum("w,whd->hd", stream, weights["index_key"]))
        owner = store.owner(number, INDEX_POSITION)
        if owner == number:
            store.put(row, number, INDEX_POSITION, position, place[None])
        everything = torch.ones(position + 1, dtype=torch.bool)
        if self.sparse is None or owner is None or position < self.sparse.budget_tokens:
            return everything
        keys = store.get(row, number, INDEX_KEY, position)[1][:, 0, 0]
        places = store.get(row, owner, INDEX_POSITION, position)[1][:, 0, 0]
        queries = torch.einsum("w,whd->hd", stream, weights["index_query"])
        scores = sparse.token_scores(queries, place, keys, places, ROTARY_BASE)
        kept = sparse.kept_blocks(sparse.block_scores(scores, self.sparse.block_tokens), self.sparse.kept_blocks)
        block = torch.arange(position + 1) // self.sparse.block_tokens  # floor: a token's block
        return torch.isin(block, torch.tensor(kept))

    def _recur(
        self, store: Store, row: StepRow, number: int, layer: RecurrentLayer, position: int, stream: torch.Tensor
    ) -> torch.Tensor:
        """Run one token of a gated delta net; convolution and state are read, moved on and written back."""
        weights = self.layers[number]
        taps = store.get_state(row, number, CONV_STATE, position)
        channels = (stream @ weights["in"])[None]
        bias = torch.zeros(layer.conv_channels, dtype=torch.float64)
        mixed, kept = recurrences.conv_step(taps[None], channels, weights["conv"], bias)
        store.put_state(row, number, CONV_STATE, kept[0])
        sizes = [layer.groups * layer.state_dim] * 2 + [layer.heads * layer.head_dim]
        query, key, value = mixed.split(sizes, dim=-1)
        gate, beta = torch.einsum("w,wgh->gh", stream, weights["gates"])
        answers, state = recurrences.delta_step(
            store.get_state(row, number, SSM_STATE, position)[None],
            query.reshape(1, layer.groups, layer.state_dim),
            key.reshape(1, layer.groups, layer.state_dim),
            value.reshape(1, layer.heads, layer.head_dim),
            gate[None],
            beta[None],
            weights["decay"],
            torch.zeros(layer.heads, dtype=torch.float64),
        )
        store.put_state(row, number, SSM_STATE, state[0])
        return answers.flatten() @ weights["out"]


def _normed(stream: torch.Tensor) -> torch.Tensor:
    return stream * torch.rsqrt((stream * stream).mean() + 1e-6)


def _place(position: int) -> torch.Tensor:
    """Return what tells one position from another, (WIDTH,)."""
    speeds = torch.exp2(-0.5 * torch.arange(WIDTH, dtype=torch.float64))
    return torch.sin(position * speeds + torch.arange(WIDTH, dtype=torch.float64))


def _coordinates(position: int) -> torch.Tensor:
    """Return the three coordinates of a position, as those of a picture of rows of five."""
    row, column = divmod(position, 5)
    return torch.tensor([position, row, column], dtype=torch.float64)
