"""The kinds of layers that a cache is made for, with model-wide (not yet sharded) geometry.

Each kind is a frozen, validated value; equal layers compare and hash equal. Head counts are those of the whole model;
a rank's
share follows from the parallel layout (``model.parallel``).
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from .errors import SpecError, require_choice, require_int, require_members, shown
from .formats import KV_FORMATS, STATE_FORMATS, ElementFormat

MAX_DIM: Final = 1 << 20
"""Largest head count or dimension accepted: far above any model, small enough that every size stays a machine word."""
MAX_TOKENS: Final = 1 << 31
"""Largest window or sequence length accepted, in tokens."""

INDEX_KEY: Final = "index_key"
INDEX_POSITION: Final = "qsa_index_position"


def _require_format(field: str, value: object, allowed: tuple[ElementFormat, ...]) -> None:
    if not isinstance(value, ElementFormat) or value not in allowed:
        found = shown(value.value if isinstance(value, ElementFormat) else value)
        raise SpecError(field, f"found {found}, needs one of {', '.join(f.value for f in allowed)}")


class SidePlane(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """A plane of per-token data beside K and V, never sharded over heads.

    One page is ``tokens x heads x dim`` elements of ``format``. ``scope`` is ``"layer"`` for one plane per layer
    (index keys)
    and ``"rank"`` for one plane per rank, owned by the first local layer that asks for it (the position plane).
    """

    role: str
    dim: int
    format: ElementFormat
    heads: int = 1
    scope: Literal["layer", "rank"] = "layer"

    def __post_init__(self) -> None:
        if type(self.role) is not str or not self.role.isidentifier() or len(self.role) > 64:
            raise SpecError(
                "side_planes.role", f"found {shown(self.role)}, needs a name of letters, digits and underscores"
            )
        if self.role in ("key", "value", "key_block_scale", "value_block_scale", "side_planes"):
            raise SpecError("side_planes.role", f"{self.role!r} is a standard role, needs a role of its own")
        require_int("side_planes.heads", self.heads, 1, MAX_DIM)
        require_int("side_planes.dim", self.dim, 1, MAX_DIM)
        if not isinstance(self.format, ElementFormat) or self.format.block_scaled:
            raise SpecError("side_planes.format", f"found {shown(self.format)}, needs a format without block scales")
        require_choice("side_planes.scope", self.scope, ("layer", "rank"))

    @property
    def token_bytes(self) -> int:
        """Bytes that the plane holds for one token."""
        return self.format.bytes_of(self.heads * self.dim)


def _check_paged(layer: AttentionLayer | LatentLayer) -> None:
    if layer.window is not None:
        require_int("window", layer.window, 1, MAX_TOKENS)
    require_int("sink_tokens", layer.sink_tokens, 0, MAX_TOKENS)
    if layer.sink_tokens and layer.window is None:
        raise SpecError("sink_tokens", f"found {layer.sink_tokens} without a window, needs a window or 0 sink tokens")
    if layer.kv_format is not None:
        _require_format("kv_format", layer.kv_format, KV_FORMATS)
    if layer.tokens_per_block is not None:
        require_int("tokens_per_block", layer.tokens_per_block, 1, MAX_TOKENS)
    planes = require_members("side_planes", layer.side_planes, SidePlane, "a side plane")
    msgspec.structs.force_setattr(layer, "side_planes", planes)
    roles = [plane.role for plane in planes]
    if len(set(roles)) != len(roles):
        raise SpecError("side_planes", f"found roles {', '.join(roles)}, needs each role once in a layer")


class AttentionLayer(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    cache_hash=True,
    tag="attention",
    tag_field="kind",
):
    """Attention with K and V pages.

    ``head_dim`` and ``value_dim`` are elements per K and V head (``value_dim`` 0 means equal to ``head_dim`` and is
    stored
    as that). ``window`` is the sliding window in tokens (None: full attention), ``sink_tokens`` the tokens kept
    before it.
    ``kv_format`` and ``tokens_per_block`` override the spec's for this layer alone.
    """

    kv_heads: int
    head_dim: int
    value_dim: int = 0
    window: int | None = None
    sink_tokens: int = 0
    kv_format: ElementFormat | None = None
    tokens_per_block: int | None = None
    side_planes: tuple[SidePlane, ...] = ()

    def __post_init__(self) -> None:
        require_int("kv_heads", self.kv_heads, 1, MAX_DIM)
        require_int("head_dim", self.head_dim, 1, MAX_DIM)
        if self.value_dim == 0:
            msgspec.structs.force_setattr(self, "value_dim", self.head_dim)  # one spelling, so equal layers are equal
        require_int("value_dim", self.value_dim, 1, MAX_DIM)
        _check_paged(self)


class LatentLayer(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    cache_hash=True,
    tag="latent",
    tag_field="kind",
):
    """Multi-head latent attention: one shared row of ``latent_dim + rope_dim`` elements per token, K only, never
    sharded."""

    latent_dim: int
    rope_dim: int = 0
    window: int | None = None
    sink_tokens: int = 0
    kv_format: ElementFormat | None = None
    tokens_per_block: int | None = None
    side_planes: tuple[SidePlane, ...] = ()

    def __post_init__(self) -> None:
        require_int("latent_dim", self.latent_dim, 1, MAX_DIM)
        require_int("rope_dim", self.rope_dim, 0, MAX_DIM)
        _check_paged(self)

    @property
    def row_dim(self) -> int:
        """Elements of one token's row."""
        return self.latent_dim + self.rope_dim


class AuxiliaryState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """A per-request state that lives beside a recurrent layer's own, replicated on every rank.

    Per-layer-embedding models keep an n-gram context (``shape=(length,)``, int64) and a convolution state
    (``shape=(channels, length)``) this way.
    """

    role: str
    shape: tuple[int, ...]
    format: ElementFormat

    def __post_init__(self) -> None:
        if type(self.role) is not str or not self.role.isidentifier() or len(self.role) > 64:
            raise SpecError(
                "auxiliary.role", f"found {shown(self.role)}, needs a name of letters, digits and underscores"
            )
        if self.role in ("ssm_state", "conv_state"):
            raise SpecError("auxiliary.role", f"{self.role!r} is a standard role, needs a role of its own")
        msgspec.structs.force_setattr(
            self, "shape", require_members("auxiliary.shape", self.shape, int, "a whole number")
        )
        if not 1 <= len(self.shape) <= 4:
            raise SpecError("auxiliary.shape", f"found {len(self.shape)} axes, needs 1 to 4")
        for size in self.shape:
            require_int("auxiliary.shape", size, 1, MAX_DIM)
        if not isinstance(self.format, ElementFormat) or self.format.block_scaled:
            raise SpecError("auxiliary.format", f"found {shown(self.format)}, needs a format without block scales")


RECURRENT_KINDS: Final = ("mamba1", "mamba2", "gdn", "kda", "short_conv")


class RecurrentLayer(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    cache_hash=True,
    tag="recurrent",
    tag_field="kind",
):
    """A recurrent layer: a temporal state and a convolution state per request, whatever its length.

    With ``inner = heads * head_dim`` the convolution runs over ``inner`` channels (mamba1, short_conv) or over
    ``inner + 2 * groups * state_dim`` (mamba2, gdn, kda) and keeps ``conv_kernel - 1`` taps; the temporal state is
    ``[heads, head_dim, state_dim]``. The other families are written in these terms:

    ==========  =====================  ============  ==============  =====================
    algorithm   heads                  head_dim      groups          state_dim
    ==========  =====================  ============  ==============  =====================
    mamba1      inner channels         1             0               SSM state size
    mamba2      heads                  head dim      groups          SSM state size
    gdn, kda    value heads            value dim     key heads       key dim
    short_conv  channels               1             0               0 (no temporal state)
    ==========  =====================  ============  ==============  =====================

    Heads are sharded over tensor parallelism and must divide. ``ssm_format`` and ``conv_format`` override the spec's.
    """

    algorithm: Literal["mamba1", "mamba2", "gdn", "kda", "short_conv"]
    heads: int
    head_dim: int = 1
    groups: int = 0
    state_dim: int = 0
    conv_kernel: int = 4
    ssm_format: ElementFormat | None = None
    conv_format: ElementFormat | None = None
    auxiliary: tuple[AuxiliaryState, ...] = ()

    def __post_init__(self) -> None:
        require_choice("algorithm", self.algorithm, RECURRENT_KINDS)
        convolves_inner_only = self.algorithm in ("mamba1", "short_conv")
        temporal = self.algorithm != "short_conv"
        require_int("heads", self.heads, 1, MAX_DIM)
        require_int("head_dim", self.head_dim, 1, MAX_DIM)
        require_int("groups", self.groups, 0 if convolves_inner_only else 1, 0 if convolves_inner_only else MAX_DIM)
        require_int("state_dim", self.state_dim, 1 if temporal else 0, MAX_DIM if temporal else 0)
        require_int("conv_kernel", self.conv_kernel, 2, 1024)
        for field in ("ssm_format", "conv_format"):
            if getattr(self, field) is not None:
                _require_format(field, getattr(self, field), STATE_FORMATS)
        states = require_members("auxiliary", self.auxiliary, AuxiliaryState, "an auxiliary state")
        msgspec.structs.force_setattr(self, "auxiliary", states)
        roles = [state.role for state in states]
        if len(set(roles)) != len(roles):
            raise SpecError("auxiliary", f"found roles {', '.join(roles)}, needs each role once in a layer")

    @property
    def conv_channels(self) -> int:
        """Channels that the convolution runs over, before sharding."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_dim


class HybridLayer(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    cache_hash=True,
    tag="hybrid",
    tag_field="kind",
):
    """A layer whose attention and recurrent halves run side by side on the same input (Falcon-H1, Zamba2).

    One layer of the model, and so one unit of pipeline partitioning, with both kinds of cache.
    """

    attention: AttentionLayer
    recurrent: RecurrentLayer

    def __post_init__(self) -> None:
        for field, kind in (("attention", AttentionLayer), ("recurrent", RecurrentLayer)):
            if not isinstance(getattr(self, field), kind):
                raise SpecError(field, f"found {shown(getattr(self, field))}, needs a layer of that kind")


class UncachedLayer(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    cache_hash=True,
    tag="uncached",
    tag_field="kind",
):
    """A layer without any cache (an MLP or expert layer of its own): it counts in the pipeline partition, no more."""


Layer: TypeAlias = AttentionLayer | LatentLayer | RecurrentLayer | HybridLayer | UncachedLayer
LAYER_KINDS: Final = (AttentionLayer, LatentLayer, RecurrentLayer, HybridLayer, UncachedLayer)


def paged_part(layer: Layer) -> AttentionLayer | LatentLayer | None:
    """Return the half of ``layer`` that has K/V pages (and side planes), None where it has none."""
    if isinstance(layer, AttentionLayer | LatentLayer):
        return layer
    return layer.attention if isinstance(layer, HybridLayer) else None


def recurrent_part(layer: Layer) -> RecurrentLayer | None:
    """Return the half of ``layer`` that keeps a recurrent state, None where it has none."""
    if isinstance(layer, RecurrentLayer):
        return layer
    return layer.recurrent if isinstance(layer, HybridLayer) else None
