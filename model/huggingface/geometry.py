"""What several families share: how many layers, of which kinds, the attention heads, the draft layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from ..architecture import SparseAlgorithm
from ..errors import require_int
from ..formats import ElementFormat
from ..layers import MAX_DIM, AttentionLayer, LatentLayer, Layer
from .fields import MAX_LAYERS, Fields, shown_briefly

ATTENTION: Final = "attention"
RECURRENT: Final = "recurrent"
UNCACHED: Final = "uncached"
HYBRID: Final = "hybrid"

FULL_NAMES: Final = ("full_attention", "attention")
"""Names of full attention in ``layer_types``: today's, and the one before."""
RECURRENT_NAMES: Final = ("linear_attention", "mamba")

DRAFT_COUNTS: Final = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """What a family makes of a config. ``state_format`` is the one that the family's code fixes, None if none."""

    layers: tuple[Layer, ...]
    draft_layers: tuple[Layer, ...] = ()
    sparse_algorithm: SparseAlgorithm | None = None
    state_format: ElementFormat | None = None


class Heads(msgspec.Struct, frozen=True, kw_only=True):
    """The K and V heads of one attention layer, over the whole model."""

    kv_heads: int
    head_dim: int
    value_dim: int = 0

    def layer(self, window: int | None = None) -> AttentionLayer:
        """Return the attention layer of these heads with a window of ``window`` tokens (None: full attention)."""
        return AttentionLayer(kv_heads=self.kv_heads, head_dim=self.head_dim, value_dim=self.value_dim, window=window)


def layer_count(fields: Fields) -> int:
    """Return the number of layers, which is small enough to make lists of that length."""
    return fields.whole("num_hidden_layers", 1, MAX_LAYERS)


def attention_heads(fields: Fields, head_dim_names: tuple[str, ...] = ("head_dim",)) -> Heads:
    """Return the K and V heads; callers have required ``num_attention_heads``, and ``head_dim`` or ``hidden_size``."""
    heads = fields.whole("num_attention_heads")
    hidden_size = fields.optional_whole("hidden_size")
    kv_heads = fields.optional_whole("num_key_value_heads")
    if kv_heads is None:
        kv_heads = heads
        fields.infer(f"num_key_value_heads is absent: taken as num_attention_heads, {heads}.")
    elif heads % kv_heads:
        needed = f"a divisor of num_attention_heads, {heads}"
        raise fields.error("num_key_value_heads", f"found {kv_heads}, needs {needed}")
    head_dim = fields.optional_whole(fields.first(*head_dim_names))
    if head_dim is None:
        if hidden_size is None:
            raise fields.error("hidden_size", f"missing, needs a whole number from 1 to {MAX_DIM}")
        head_dim = head_dim_from_hidden(fields, hidden_size, heads)
    return Heads(kv_heads=kv_heads, head_dim=head_dim)


def head_dim_from_hidden(fields: Fields, hidden_size: int, heads: int) -> int:
    """Return ``hidden_size / heads``, rounded down as the models themselves do, and say so."""
    head_dim, remainder = divmod(hidden_size, heads)
    if head_dim == 0:
        raise fields.error("hidden_size", f"found {hidden_size}, needs at least num_attention_heads, {heads}")
    rounded = ", rounded down as transformers does" if remainder else ""
    quotient = f"{hidden_size} / {heads} = {head_dim}{rounded}"
    fields.infer(f"head_dim is absent: taken as hidden_size / num_attention_heads, {quotient}.")
    return head_dim


def kinds_from_names(fields: Fields, name: str, vocabulary: Mapping[str, str], count: int | None) -> list[str]:
    """Return the kind of each layer from the list ``name``; ``count`` is the length it must have, None for any."""
    entries = fields.entries(name)
    if not entries:
        raise fields.error(name, "found an empty list, needs one entry for each layer")
    if count is not None and len(entries) != count:
        raise fields.error(name, f"found {len(entries)} entries, needs {count} as num_hidden_layers says")
    kinds: list[str] = []
    for position, entry in enumerate(entries):
        kind = vocabulary.get(entry) if isinstance(entry, str) else None
        if kind is None:
            found, known = shown_briefly(entry), ", ".join(vocabulary)
            raise fields.error(f"{name}[{position}]", f"found {found}, needs one of {known}")
        kinds.append(kind)
    return kinds


def kinds_from_interval(fields: Fields, name: str, count: int, default: int) -> list[str]:
    """Return the kinds of a model in which every ``name``-th layer is attention and the rest recurrent."""
    interval = fields.optional_whole(name, 1, MAX_LAYERS)
    if interval is None:
        interval = default
        fields.infer(f"layer_types and {name} are absent: every {default}th layer is taken as attention.")
    return [RECURRENT if (index + 1) % interval else ATTENTION for index in range(count)]


def draft_count(fields: Fields) -> int:
    """Return how many draft (multi-token-prediction) layers the config asks for."""
    return fields.optional_whole(fields.first(*DRAFT_COUNTS), 0, MAX_LAYERS) or 0


def draft_like_last(fields: Fields, layers: Sequence[Layer], count: int) -> tuple[Layer, ...]:
    """Return ``count`` draft layers, each like the last attention layer, its side planes included."""
    if not count:
        return ()
    last = next((layer for layer in reversed(layers) if isinstance(layer, (AttentionLayer, LatentLayer))), None)
    name = fields.first(*DRAFT_COUNTS)
    if last is None:
        raise fields.error(name, f"found {count}, needs 0 in a model without attention layers")
    fields.infer(f"{name} is {count}: each draft layer is taken to be like the last attention layer.")
    return (last,) * count


def refuse_window(fields: Fields) -> None:
    """Refuse a sliding window in a family whose windows are not known."""
    if fields.has("sliding_window") and fields.flag("use_sliding_window") is not False:
        found = shown_briefly(fields.values["sliding_window"])
        raise fields.error("sliding_window", f"found {found}, needs null: windows are not known in this family")


def inner_channels(fields: Fields, expand_name: str, explicit: str | None = None) -> int:
    """Return the channels of a Mamba layer: the field ``explicit`` if it is there, else expand * hidden_size."""
    expanded: int | None = None
    if fields.has(expand_name) and fields.has("hidden_size"):
        expanded = fields.whole(expand_name, 1, 1024) * fields.whole("hidden_size")
    if explicit is not None and fields.has(explicit):
        channels = fields.whole(explicit)
        if expanded is not None and expanded != channels:
            fields.infer(f"{explicit} {channels} is not {expand_name} * hidden_size, {expanded}: {explicit} holds.")
        return channels
    fields.require(expand_name, "hidden_size")
    return require_int(f"{fields.prefix}{expand_name} * hidden_size", expanded, 1, MAX_DIM)
