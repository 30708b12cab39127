"""Models whose every layer is ordinary attention, known families and unknown ones alike."""

from __future__ import annotations

from typing import Final

from ..layers import Layer, UncachedLayer
from .fields import MAX_LAYERS, Fields
from .geometry import Built, Heads, attention_heads, draft_count, draft_like_last, layer_count
from .signs import refuse_encoders, refuse_signs
from .windows import WindowRule, read_windows

DENSE_FAMILIES: Final[dict[str, WindowRule]] = {
    "cohere2": 4,
    "gemma": "all",
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "glm4_moe": "all",
    "gpt_oss": 2,
    "llama": "all",
    "minimax_m2": "all",
    "mistral": "all",
    "mixtral": "all",
    "phi3": "all",
    "qwen2": "tail",
    "qwen3": "tail",
    "qwen3_moe": "all",
}
"""The families known to be dense attention, with their window rule. gpt_oss's attention sinks are learned logits, not
tokens: they take no place in the cache."""

_GEMMA3_DEFAULTS: Final = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
"""Fields that a nested gemma3_text config leaves out when they have the class's default, as published files do."""


def read_dense(fields: Fields, model_type: str | None) -> Built:
    """Return a model of attention layers. A ``model_type`` of no known family is read so, and that is said."""
    if model_type == "gemma3_text" and fields.prefix:
        fields = _with_defaults(fields, _GEMMA3_DEFAULTS)
    rule = DENSE_FAMILIES.get(model_type or "")
    if rule is None:
        refuse_encoders(fields)
    fields.require("num_hidden_layers", "num_attention_heads", "head_dim|hidden_size")
    refuse_signs(fields)
    if rule is None:
        known = f"model_type {model_type}" if model_type else "no model_type"
        fields.infer(f"{known} is no known family: read as dense attention from the ordinary fields.")
    count = layer_count(fields)
    heads = _heads(fields)
    windows = read_windows(fields, count, "unknown" if rule is None else rule)
    distinct = {window: heads.layer(window) for window in set(windows)}
    layers: list[Layer] = [distinct[window] for window in windows]
    _share_last(fields, layers)
    drafts = draft_like_last(fields, layers, _draft_count(fields))
    return Built(layers=tuple(layers), draft_layers=drafts)


def _with_defaults(fields: Fields, defaults: dict[str, int]) -> Fields:
    values = dict(fields.values)
    for name, value in defaults.items():
        if name not in values:
            values[name] = value
            fields.infer(f"{fields.prefix}{name} is absent: taken as {value}, transformers' default for gemma3_text.")
    return Fields(values, fields.prefix, fields.inferred)


def _heads(fields: Fields) -> Heads:
    heads = attention_heads(fields)
    for name in ("kv_channels", "attention_head_dim"):
        other = fields.optional_whole(name)
        if other not in (None, heads.head_dim):
            raise fields.error(name, f"found {other}, needs the head_dim, {heads.head_dim}, or nothing")
    value_dim = fields.optional_whole("v_head_dim")
    if value_dim is None or value_dim == heads.head_dim:
        return heads
    fields.infer(f"v_head_dim is {value_dim}: V heads are taken to be that wide, K heads {heads.head_dim}.")
    return Heads(kv_heads=heads.kv_heads, head_dim=heads.head_dim, value_dim=value_dim)


def _share_last(fields: Fields, layers: list[Layer]) -> None:
    """Make the last ``num_kv_shared_layers`` layers uncached: they read the K/V of earlier ones."""
    shared = fields.optional_whole("num_kv_shared_layers", 0, MAX_LAYERS) or 0
    if not shared:
        return
    if shared >= len(layers):
        raise fields.error("num_kv_shared_layers", f"found {shared}, needs fewer than the {len(layers)} layers")
    layers[len(layers) - shared :] = [UncachedLayer()] * shared
    fields.infer(f"num_kv_shared_layers is {shared}: the last {shared} layers read earlier K/V and have no cache.")


def _draft_count(fields: Fields) -> int:
    if not fields.has("num_mtp_modules"):
        return draft_count(fields)
    if fields.flag("use_mtp") is False:  # MiniMax M2: use_mtp switches its draft modules, each of some layers
        return 0
    each = fields.optional_whole("mtp_transformer_layers", 1, 100)
    return fields.whole("num_mtp_modules", 0, 100) * (1 if each is None else each)
