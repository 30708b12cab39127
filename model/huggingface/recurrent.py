"""Models of Mamba layers alone, and of gated delta nets or short convolutions with attention between."""

from __future__ import annotations

from typing import Final

from ..formats import KV_FORMATS, ElementFormat
from ..layers import INDEX_KEY, INDEX_POSITION, AttentionLayer, Layer, RecurrentLayer, SidePlane
from .fields import Fields
from .geometry import (
    ATTENTION,
    FULL_NAMES,
    RECURRENT,
    RECURRENT_NAMES,
    Built,
    attention_heads,
    draft_count,
    draft_like_last,
    inner_channels,
    kinds_from_interval,
    kinds_from_names,
    layer_count,
    refuse_window,
)

ORDINARY: Final = ("num_hidden_layers", "num_attention_heads")
"""What every hybrid model needs of its attention half, beside ``head_dim`` or ``hidden_size``."""

KINDS: Final = {**dict.fromkeys(FULL_NAMES, ATTENTION), **dict.fromkeys(RECURRENT_NAMES, RECURRENT)}
"""What the entries of ``layer_types`` mean in a hybrid model."""

_GDN_FIELDS: Final = (
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_conv_kernel_dim",
)
_QSA_FAMILIES: Final = ("qwen3_8_flash_next", "qwen3_8_flash_next_text")


def conv_taps(fields: Fields, name: str) -> int:
    """Return the width of a causal convolution."""
    return fields.whole(name, 2, 1024)


def read_mamba1(fields: Fields, model_type: str | None) -> Built:
    """Return a Mamba model (falcon_mamba is one)."""
    inner = () if fields.has("intermediate_size") else ("expand", "hidden_size")
    fields.require("num_hidden_layers", *inner, "state_size", "conv_kernel")
    layer = RecurrentLayer(
        algorithm="mamba1",
        heads=inner_channels(fields, "expand", explicit="intermediate_size"),
        state_dim=fields.whole("state_size"),
        conv_kernel=conv_taps(fields, "conv_kernel"),
    )
    return Built(layers=(layer,) * layer_count(fields))


def read_mamba2(fields: Fields, model_type: str | None) -> Built:
    """Return a Mamba-2 model."""
    fields.require("num_hidden_layers", "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
    layer = RecurrentLayer(
        algorithm="mamba2",
        heads=fields.whole("num_heads"),
        head_dim=fields.whole("head_dim"),
        groups=fields.whole("n_groups"),
        state_dim=fields.whole("state_size"),
        conv_kernel=conv_taps(fields, "conv_kernel"),
    )
    if fields.has("expand") and fields.has("hidden_size"):
        require_inner(fields, layer, "num_heads", inner_channels(fields, "expand"))
    return Built(layers=(layer,) * layer_count(fields))


def require_inner(fields: Fields, layer: RecurrentLayer, heads_name: str, inner: int) -> None:
    """Raise an error unless the heads of ``layer`` fill ``inner`` channels."""
    if layer.heads * layer.head_dim != inner:
        found = f"found {layer.heads} heads of {layer.head_dim}"
        raise fields.error(heads_name, f"{found}, needs heads that fill the {inner} inner channels")


def read_gdn(fields: Fields, model_type: str | None) -> Built:
    """Return a model of gated delta nets with every few layers full attention, which QSA makes sparse."""
    indexed = ("sparse_attention_config",) if model_type in _QSA_FAMILIES else ()
    fields.require(*ORDINARY, "head_dim|hidden_size", *_GDN_FIELDS, *indexed)
    sparse = fields.sub("sparse_attention_config")
    refuse_window(fields)
    count = layer_count(fields)
    if fields.has("layer_types"):
        kinds = kinds_from_names(fields, "layer_types", KINDS, count)
    else:
        kinds = kinds_from_interval(fields, "full_attention_interval", count, default=4)
    heads = attention_heads(fields)
    planes = () if sparse is None else _qsa_planes(sparse)
    attention = AttentionLayer(kv_heads=heads.kv_heads, head_dim=heads.head_dim, side_planes=planes)
    recurrent = RecurrentLayer(
        algorithm="gdn",
        heads=fields.whole("linear_num_value_heads"),
        head_dim=fields.whole("linear_value_head_dim"),
        groups=fields.whole("linear_num_key_heads"),
        state_dim=fields.whole("linear_key_head_dim"),
        conv_kernel=conv_taps(fields, "linear_conv_kernel_dim"),
    )
    layers: tuple[Layer, ...] = tuple(attention if kind == ATTENTION else recurrent for kind in kinds)
    drafts = draft_like_last(fields, layers, draft_count(fields))
    return Built(layers=layers, draft_layers=drafts, sparse_algorithm="qsa" if planes else None)


def _qsa_planes(sparse: Fields) -> tuple[SidePlane, ...]:
    """Return QSA's two planes: index keys per layer, and the positions per rank."""
    sparse.require("algorithm", "index_head_dim")
    algorithm = sparse.text("algorithm", 100)
    if algorithm != "qsa":
        raise sparse.error("algorithm", f"found {algorithm!r}, needs 'qsa' in this family")
    heads = sparse.optional_whole("index_kv_heads")
    axes = sparse.optional_whole("position_axes", 1, 16)
    format_ = sparse.format("index_dtype", tuple(format for format in KV_FORMATS if not format.block_scaled))
    defaults = (("index_kv_heads", heads, "1"), ("position_axes", axes, "3"), ("index_dtype", format_, "bf16"))
    for name, value, default in defaults:
        if value is None:
            sparse.infer(f"{sparse.prefix}{name} is absent: taken as {default}.")
    index_key = SidePlane(
        role=INDEX_KEY,
        heads=1 if heads is None else heads,
        dim=sparse.whole("index_head_dim"),
        format=ElementFormat.BF16 if format_ is None else format_,
    )
    position = SidePlane(role=INDEX_POSITION, dim=3 if axes is None else axes, format=ElementFormat.INT32, scope="rank")
    return (index_key, position)


def read_lfm2(fields: Fields, model_type: str | None) -> Built:
    """Return a model of gated short convolutions with attention between."""
    fields.require(*ORDINARY, "hidden_size", "conv_L_cache")
    refuse_window(fields)
    count = layer_count(fields)
    vocabulary = {**dict.fromkeys(FULL_NAMES, ATTENTION), "conv": RECURRENT}
    if fields.has("layer_types"):
        kinds = kinds_from_names(fields, "layer_types", vocabulary, count)
    elif fields.has("full_attn_idxs"):
        attention_at = set(fields.indices("full_attn_idxs", 0, count - 1))
        kinds = [ATTENTION if index in attention_at else RECURRENT for index in range(count)]
    else:
        fields.infer("layer_types and full_attn_idxs are absent: every layer is attention, as transformers takes it.")
        kinds = [ATTENTION] * count
    attention = attention_heads(fields).layer()
    recurrent = RecurrentLayer(
        algorithm="short_conv", heads=fields.whole("hidden_size"), conv_kernel=conv_taps(fields, "conv_L_cache")
    )
    return Built(layers=tuple(attention if kind == ATTENTION else recurrent for kind in kinds))
