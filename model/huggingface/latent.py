"""Multi-head latent attention: one row of latent and rope elements per token, and DSA's index keys beside it."""

from __future__ import annotations

from typing import Final

from ..arithmetic import InexactDivision, exact_div
from ..formats import ElementFormat
from ..layers import INDEX_KEY, LatentLayer, Layer, SidePlane
from .fields import Fields
from .geometry import FULL_NAMES, Built, draft_count, draft_like_last, kinds_from_names, layer_count, refuse_window
from .signs import refuse_encoders, refuse_signs

LATENT_FAMILIES: Final = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
DSA_FAMILIES: Final = ("deepseek_v32", "glm_moe_dsa")

_DSA_NAMES: Final = ("indexed_attention", "deepseek_sparse_attention", *FULL_NAMES)
_DSA_FIELDS: Final = frozenset(
    {
        "index_head_dim",
        "index_n_heads",
        "index_share_for_mtp_iteration",
        "index_skip_topk_offset",
        "index_topk",
        "index_topk_freq",
        "index_topk_pattern",
        "indexer_rope_interleave",
        "indexer_types",
    }
)
_INDEX_SCALE_ELEMENTS: Final = 128
"""Index-key elements (fp8) that share one scale of four bytes."""


def latent_layer(fields: Fields, side_planes: tuple[SidePlane, ...] = ()) -> LatentLayer:
    """Return one latent layer; the callers have required its two fields."""
    latent_dim = fields.whole("kv_lora_rank")
    return LatentLayer(latent_dim=latent_dim, rope_dim=fields.whole("qk_rope_head_dim", 0), side_planes=side_planes)


def read_latent(fields: Fields, model_type: str | None) -> Built:
    """Return a model whose every layer is latent attention without an indexer."""
    if model_type not in LATENT_FAMILIES:
        refuse_encoders(fields)
    fields.require("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    refuse_signs(fields)
    refuse_window(fields)
    if model_type not in LATENT_FAMILIES:
        known = f"model_type {model_type}" if model_type else "no model_type"
        fields.infer(f"{known} is no known family: read as latent attention as it has kv_lora_rank.")
    count = layer_count(fields)
    if fields.has("layer_types"):
        kinds_from_names(fields, "layer_types", dict.fromkeys(FULL_NAMES, "latent"), count)
    layers: tuple[Layer, ...] = (latent_layer(fields),) * count
    return Built(layers=layers, draft_layers=draft_like_last(fields, layers, draft_count(fields)))


def read_dsa(fields: Fields, model_type: str | None) -> Built:
    """Return a model of DeepSeek sparse attention: latent layers, with index keys where there is an indexer."""
    fields.require("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
    refuse_signs(fields, _DSA_FIELDS)
    refuse_window(fields)
    count = layer_count(fields)
    if fields.has("layer_types"):
        kinds_from_names(fields, "layer_types", dict.fromkeys(_DSA_NAMES, "latent"), count)
    indexed = latent_layer(fields, (_index_plane(fields),))
    layers: list[Layer] = [indexed] * count
    if fields.has("indexer_types"):
        kinds = kinds_from_names(fields, "indexer_types", {"full": "full", "shared": "shared"}, count)
        without = latent_layer(fields)
        layers = [indexed if kind == "full" else without for kind in kinds]
        if without in layers:
            fields.infer("indexer_types: layers of type shared use another layer's index and have no index keys.")
    elif fields.has("index_topk_pattern") or fields.optional_whole("index_topk_freq", 0, 10_000) not in (None, 0, 1):
        name = fields.first("index_topk_pattern", "index_topk_freq")
        raise fields.error("indexer_types", f"missing, needs one entry for each layer as {name} shares indexers")
    # A draft layer has an indexer of its own even where the last layer shares one.
    count_drafts = draft_count(fields)
    drafts = draft_like_last(fields, [indexed], count_drafts)
    return Built(layers=tuple(layers), draft_layers=drafts, sparse_algorithm="dsa")


def _index_plane(fields: Fields) -> SidePlane:
    """Return the plane of fp8 index keys, with the four-byte scale of every 128 elements in the same row."""
    dim = fields.whole("index_head_dim", 1, 1 << 16)
    try:
        scale_bytes = exact_div(dim, _INDEX_SCALE_ELEMENTS, "index_head_dim") * 4
    except InexactDivision:
        raise fields.error("index_head_dim", f"found {dim}, needs a multiple of {_INDEX_SCALE_ELEMENTS}") from None
    fields.infer(f"DSA index keys are taken as fp8 with 4-byte scales: {dim} + {scale_bytes} bytes per token.")
    return SidePlane(role=INDEX_KEY, dim=dim + scale_bytes, format=ElementFormat.UINT8)
