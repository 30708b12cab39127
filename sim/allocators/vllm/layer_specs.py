"""What each cached layer asks of vLLM's planner: ``LayerSpec``, the page of one layer and one block.

A layer of the model may register several: attention and recurrent halves, and the index keys of sparse latent
attention, are layers of their own to the planner. Sizes are those of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from ....model.arithmetic import div_up, exact_div
from ....model.formats import SCALE_BLOCK_ELEMENTS, ElementFormat
from ....model.layers import AttentionLayer, LatentLayer, RecurrentLayer, SidePlane, paged_part, recurrent_part
from ....model.rank import stage_layers
from ....model.spec import CacheSpec
from ...layout import CONV_STATE, KEY, SSM_STATE

LATENT_GRANULE_TOKENS = 128
"""Smallest block, in tokens, that a latent layer beside recurrent ones is given."""


class State(msgspec.Struct, frozen=True):
    """One recurrent state of a request on this rank; ``shape`` counts elements along ``axes``."""

    role: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    format: ElementFormat

    @property
    def size_bytes(self) -> int:
        """Bytes of the state."""
        return self.format.bytes_of(math.prod(self.shape))


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The page of one layer: equal specs may share a group.

    ``kind`` is ``attention`` (K and V), ``latent`` (rows), ``index`` (index keys, called ``role``) or ``recurrent``.
    Paged kinds hold ``block_tokens`` tokens of ``heads`` heads of ``dim`` (V: ``value_dim``) elements. ``padded_bytes``
    is the page as it is laid out, None where nothing is added.
    """

    kind: str
    role: str
    block_tokens: int
    window: int | None = None
    heads: int = 0
    dim: int = 0
    value_dim: int = 0
    format: ElementFormat = ElementFormat.UINT8
    states: tuple[State, ...] = ()
    padded_bytes: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, block scales included; 0 for states."""
        elements = self.heads * (self.dim + self.value_dim)
        scales = (
            exact_div(elements, SCALE_BLOCK_ELEMENTS, "elements per block scale") if self.format.block_scaled else 0
        )
        return self.format.bytes_of(elements) + scales

    @property
    def natural_bytes(self) -> int:
        """Bytes of the page without padding."""
        if self.kind == "recurrent":
            return sum(state.size_bytes for state in self.states)
        return self.block_tokens * self.token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of the page as it is laid out."""
        return self.natural_bytes if self.padded_bytes is None else self.padded_bytes

    @property
    def content(self) -> tuple[int, int, int]:
        """(head slots, tokens, bytes): specs of different ones cannot be scattered over one block alike."""
        if self.kind == "recurrent":
            return 1, 1, self.page_bytes
        return self.heads, self.block_tokens, self.page_bytes


class CachedLayer(msgspec.Struct, frozen=True):
    """A layer of the planner: ``index`` is the model's layer (draft layers follow), ``stage`` its pipeline stage."""

    index: int
    stage: int
    spec: LayerSpec


def cached_layers(spec: CacheSpec) -> tuple[CachedLayer, ...]:
    """Return the planner's layers of all pipeline stages, in model order, blocks raised to what states need."""
    stages = stage_layers(spec)
    found = []
    numbered = [(index, stage) for stage, members in enumerate(stages) for index in members]
    numbered += [
        (index, len(stages) - 1) for index in range(len(spec.layers), len(spec.layers) + len(spec.draft.layers))
    ]
    layers = spec.layers + spec.draft.layers
    for index, stage in numbered:
        found += [CachedLayer(index, stage, entry) for entry in _specs_of(layers[index], spec)]
    return _aligned(tuple(found), spec.tokens_per_block)


def _specs_of(layer: object, spec: CacheSpec) -> Iterator[LayerSpec]:
    paged, recurrent = paged_part(layer), recurrent_part(layer)  # type: ignore[arg-type]
    if isinstance(paged, AttentionLayer):
        ranks = spec.parallel.attention_tp
        yield LayerSpec(
            kind="attention", role=KEY, block_tokens=spec.tokens_per_block, window=paged.window,
            heads=div_up(paged.kv_heads, ranks), dim=paged.head_dim, value_dim=paged.value_dim, format=spec.kv_format,
        )  # fmt: skip
    elif isinstance(paged, LatentLayer):
        yield LayerSpec(
            kind="latent", role=KEY, block_tokens=spec.tokens_per_block, window=paged.window, heads=1,
            dim=paged.row_dim, format=spec.kv_format,
        )  # fmt: skip
        yield from [_index_spec(plane, spec) for plane in paged.side_planes]
    if recurrent is not None:
        yield LayerSpec(
            kind="recurrent", role=CONV_STATE, block_tokens=spec.tokens_per_block, states=states_of(recurrent, spec)
        )


def _index_spec(plane: SidePlane, spec: CacheSpec) -> LayerSpec:
    return LayerSpec(
        kind="index", role=plane.role, block_tokens=spec.tokens_per_block, heads=1, dim=plane.heads * plane.dim,
        format=plane.format,
    )  # fmt: skip


def conv_channels(layer: RecurrentLayer, ranks: int) -> int:
    """Return the convolution channels of all ranks together, replicated Mamba2 groups counted for each rank."""
    groups = layer.groups
    if layer.algorithm == "mamba2" and groups % ranks:
        groups = ranks
    return layer.heads * layer.head_dim + 2 * groups * layer.state_dim


def states_of(layer: RecurrentLayer, spec: CacheSpec) -> tuple[State, ...]:
    """Return a layer's states in the order of the page: convolution first; heads and channels must divide."""
    ranks = spec.parallel.state_tp
    channels = exact_div(conv_channels(layer, ranks), ranks, "convolution channels over ranks")
    conv = State(
        CONV_STATE, ("tap", "channel"), (layer.conv_kernel - 1, channels), layer.conv_format or spec.conv_format
    )
    if not layer.state_dim:
        return (conv,)
    shape = (exact_div(layer.heads, ranks, "recurrent heads over ranks"), layer.head_dim, layer.state_dim)
    return conv, State(SSM_STATE, ("head", "dim", "state"), shape, layer.ssm_format or spec.state_format)


def _aligned(layers: tuple[CachedLayer, ...], tokens: int) -> tuple[CachedLayer, ...]:
    """Raise the block of a hybrid model until an attention page holds the largest state page, and pad states to it.

    The first layer with pages stands for all, as the engine takes one head count and dim from the model.
    """
    first = next((layer.spec for layer in layers if layer.spec.kind in ("attention", "latent")), None)
    largest = max((layer.spec.natural_bytes for layer in layers if layer.spec.kind == "recurrent"), default=0)
    if first is None or largest == 0:
        return layers
    granule = max(tokens, LATENT_GRANULE_TOKENS) if first.kind == "latent" else tokens
    block = max(tokens, granule * div_up(largest, granule * first.token_bytes))
    page = block * first.token_bytes
    aligned = []
    for layer in layers:
        change = {"block_tokens": block}
        if layer.spec.kind == "recurrent":
            change["padded_bytes"] = page
        aligned.append(CachedLayer(layer.index, layer.stage, msgspec.structs.replace(layer.spec, **change)))
    return tuple(aligned)
