"""Models that mix recurrent layers with attention: in turn, or side by side in one layer.

In turn: Jamba, Bamba, Granite 4, Nemotron-H, Kimi Linear. Side by side: Falcon-H1, Zamba, Zamba2.
"""

from __future__ import annotations

from typing import Final

from ..errors import require_int
from ..formats import ElementFormat
from ..layers import MAX_DIM, HybridLayer, Layer, RecurrentLayer, UncachedLayer
from .fields import MAX_LAYERS, Fields, shown_briefly
from .geometry import (
    ATTENTION,
    HYBRID,
    RECURRENT,
    UNCACHED,
    Built,
    Heads,
    attention_heads,
    draft_count,
    draft_like_last,
    inner_channels,
    kinds_from_names,
    layer_count,
    refuse_window,
)
from .latent import latent_layer
from .recurrent import KINDS, ORDINARY, conv_taps, require_inner

_MAMBA_2_FIELDS: Final = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_PATTERN: Final = {"M": RECURRENT, "*": ATTENTION, "-": UNCACHED, "E": UNCACHED}
_NEMOTRON_KINDS: Final = {**KINDS, "moe": UNCACHED, "mlp": UNCACHED}


def _in_turn(kinds: list[str], attention: Layer, recurrent: Layer) -> tuple[Layer, ...]:
    by_kind: dict[str, Layer] = {ATTENTION: attention, RECURRENT: recurrent, UNCACHED: UncachedLayer()}
    return tuple(by_kind[kind] for kind in kinds)


def _mamba1(fields: Fields) -> RecurrentLayer:
    return RecurrentLayer(
        algorithm="mamba1",
        heads=inner_channels(fields, "mamba_expand"),
        state_dim=fields.whole("mamba_d_state"),
        conv_kernel=conv_taps(fields, "mamba_d_conv"),
    )


def _share_of_inner(fields: Fields, inner: int, by: str, name: str) -> int:
    """Return the absent field ``name``: the ``inner`` channels divided by field ``by``, exactly."""
    divisor = fields.whole(by)
    share, remainder = divmod(inner, divisor)
    if remainder or not share:
        raise fields.error(by, f"found {divisor}, needs a divisor of the {inner} inner channels")
    fields.infer(f"{name} is not given: taken as inner channels / {by}, {inner} / {divisor} = {share}.")
    return share


def _mamba2(fields: Fields, inner: int) -> RecurrentLayer:
    """Return the Mamba-2 layer of the Bamba spelling (``mamba_d_head`` may be ``"auto"``); its heads fill ``inner``."""
    heads = fields.whole("mamba_n_heads")
    given = fields.values.get("mamba_d_head")
    if given is None or (isinstance(given, str) and given == "auto"):
        head_dim = _share_of_inner(fields, inner, "mamba_n_heads", "mamba_d_head")
    else:
        head_dim = fields.whole("mamba_d_head")
    layer = RecurrentLayer(
        algorithm="mamba2",
        heads=heads,
        head_dim=head_dim,
        groups=fields.whole("mamba_n_groups"),
        state_dim=fields.whole("mamba_d_state"),
        conv_kernel=conv_taps(fields, "mamba_d_conv"),
    )
    require_inner(fields, layer, "mamba_n_heads", inner)
    return layer


def read_jamba(fields: Fields, model_type: str | None) -> Built:
    """Return a Jamba model: attention in every ``attn_layer_period``-th layer, Mamba in the others."""
    named = fields.first("layers_block_type", "layer_types")
    placed = () if fields.has(named) else ("attn_layer_period", "attn_layer_offset")
    fields.require(*ORDINARY, "hidden_size", *placed, "mamba_expand", "mamba_d_state", "mamba_d_conv")
    refuse_window(fields)
    count = layer_count(fields)
    if fields.has(named):
        kinds = kinds_from_names(fields, named, KINDS, count)
    else:
        period = fields.whole("attn_layer_period", 1, MAX_LAYERS)
        offset = fields.whole("attn_layer_offset", 0, period - 1)
        kinds = [ATTENTION if index % period == offset else RECURRENT for index in range(count)]
    return Built(layers=_in_turn(kinds, attention_heads(fields).layer(), _mamba1(fields)))


def read_bamba(fields: Fields, model_type: str | None) -> Built:
    """Return a Bamba or Granite 4 model: attention where ``attn_layer_indices`` or ``layer_types`` say so."""
    fields.require(*ORDINARY, "hidden_size", *_MAMBA_2_FIELDS, "mamba_expand")
    refuse_window(fields)
    count = layer_count(fields)
    named = fields.first("layer_types", "layers_block_type")
    if fields.has(named):
        kinds = kinds_from_names(fields, named, KINDS, count)
    elif fields.has("attn_layer_indices"):
        attention_at = set(fields.indices("attn_layer_indices", 0, count - 1))
        kinds = [ATTENTION if index in attention_at else RECURRENT for index in range(count)]
    else:
        fields.infer("layer_types and attn_layer_indices are absent: no layer is attention, as transformers takes it.")
        kinds = [RECURRENT] * count
    recurrent = _mamba2(fields, inner_channels(fields, "mamba_expand"))
    return Built(layers=_in_turn(kinds, attention_heads(fields).layer(), recurrent))


def read_falcon_h1(fields: Fields, model_type: str | None) -> Built:
    """Return a Falcon-H1 model: attention and Mamba-2 side by side in every layer."""
    inner_names = ("head_dim|hidden_size",) if fields.has("mamba_d_ssm") else ("hidden_size", "mamba_expand")
    fields.require(*ORDINARY, *inner_names, *_MAMBA_2_FIELDS)
    refuse_window(fields)
    inner = inner_channels(fields, "mamba_expand", explicit="mamba_d_ssm")
    layer = HybridLayer(attention=attention_heads(fields).layer(), recurrent=_mamba2(fields, inner))
    return Built(layers=(layer,) * layer_count(fields))


def _zamba_kinds(fields: Fields, count: int) -> list[str]:
    vocabulary = {"hybrid": HYBRID, "linear_attention": RECURRENT, "mamba": RECURRENT, "g": HYBRID, "m": RECURRENT}
    if fields.has("layers_block_type"):
        return kinds_from_names(fields, "layers_block_type", vocabulary, count)
    hybrid_at = set(fields.indices("hybrid_layer_ids", 0, count - 1))
    return [HYBRID if index in hybrid_at else RECURRENT for index in range(count)]


def _zamba_heads(fields: Fields) -> Heads:
    """Return the heads of the shared attention block, which runs over twice the hidden size."""
    if not fields.has("attention_head_dim"):
        fields.require("hidden_size")
        heads, doubled = fields.whole("num_attention_heads"), 2 * fields.whole("hidden_size", 1, 1 << 19)
        head_dim, remainder = divmod(doubled, heads)
        if remainder or not head_dim:
            raise fields.error("num_attention_heads", f"found {heads}, needs a divisor of 2 * hidden_size, {doubled}")
        fields.infer(f"attention_head_dim is absent: taken as 2 * hidden_size / num_attention_heads, {head_dim}.")
        fields = Fields({**fields.values, "attention_head_dim": head_dim}, fields.prefix, fields.inferred)
    return attention_heads(fields, ("attention_head_dim",))


def read_zamba2(fields: Fields, model_type: str | None) -> Built:
    """Return a Zamba2 model: Mamba-2 in every layer, and in some of them attention (of shared weights) before it."""
    renamed = ("mamba_d_state|state_size", "mamba_d_conv|conv_dimension", "mamba_expand|expansion_factor")
    mamba = ("n_mamba_heads|mamba_headdim", "mamba_ngroups", *renamed, "hidden_size")
    fields.require(*ORDINARY, *mamba, "layers_block_type|hybrid_layer_ids")
    refuse_window(fields)
    kinds = _zamba_kinds(fields, layer_count(fields))
    state, taps, expand = (fields.first(*names.split("|")) for names in renamed)
    inner = inner_channels(fields, expand)
    heads, head_dim = fields.optional_whole("n_mamba_heads"), fields.optional_whole("mamba_headdim")
    if heads is None:
        heads = _share_of_inner(fields, inner, "mamba_headdim", "n_mamba_heads")
    if head_dim is None:
        head_dim = _share_of_inner(fields, inner, "n_mamba_heads", "mamba_headdim")
    recurrent = RecurrentLayer(
        algorithm="mamba2",
        heads=heads,
        head_dim=head_dim,
        groups=fields.whole("mamba_ngroups"),
        state_dim=fields.whole(state),
        conv_kernel=conv_taps(fields, taps),
    )
    require_inner(fields, recurrent, "n_mamba_heads", inner)
    return _side_by_side(fields, kinds, recurrent)


def read_zamba(fields: Fields, model_type: str | None) -> Built:
    """Return a Zamba model: as Zamba2, with Mamba-1 layers."""
    mamba = ("mamba_d_state", "mamba_d_conv", "mamba_expand", "hidden_size")
    fields.require(*ORDINARY, *mamba, "layers_block_type|hybrid_layer_ids")
    refuse_window(fields)
    kinds = _zamba_kinds(fields, layer_count(fields))
    return _side_by_side(fields, kinds, _mamba1(fields))


def _side_by_side(fields: Fields, kinds: list[str], recurrent: RecurrentLayer) -> Built:
    hybrid = HybridLayer(attention=_zamba_heads(fields).layer(), recurrent=recurrent)
    fields.infer("Hybrid layers share attention weights, not caches: each has its own K/V beside its Mamba states.")
    return Built(layers=tuple(hybrid if kind == HYBRID else recurrent for kind in kinds))


def read_nemotron_h(fields: Fields, model_type: str | None) -> Built:
    """Return a Nemotron-H model: Mamba-2, attention, and MLP or expert layers that have no cache."""
    groups = fields.first("n_groups", "mamba_n_groups")
    taps = fields.first("conv_kernel", "mamba_d_conv")
    attention = ("num_attention_heads", "head_dim|attention_head_dim|hidden_size")
    mamba = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size")
    renamed = ("n_groups|mamba_n_groups", "conv_kernel|mamba_d_conv")
    fields.require("layers_block_type|layer_types|hybrid_override_pattern", *attention, *mamba, *renamed)
    refuse_window(fields)
    count = fields.optional_whole("num_hidden_layers", 1, MAX_LAYERS)
    kinds = _nemotron_kinds(fields, ("layers_block_type", "layer_types"), "hybrid_override_pattern", count)
    recurrent = RecurrentLayer(
        algorithm="mamba2",
        heads=fields.whole("mamba_num_heads"),
        head_dim=fields.whole("mamba_head_dim"),
        groups=fields.whole(groups),
        state_dim=fields.whole("ssm_state_size"),
        conv_kernel=conv_taps(fields, taps),
    )
    attention_layer = attention_heads(fields, ("head_dim", "attention_head_dim")).layer()
    layers = _in_turn(kinds, attention_layer, recurrent)
    return Built(layers=layers, draft_layers=_nemotron_drafts(fields, layers, attention_layer))


def _nemotron_kinds(fields: Fields, lists: tuple[str, ...], pattern_name: str, count: int | None) -> list[str]:
    named = fields.first(*lists)
    if fields.has(named):
        return kinds_from_names(fields, named, _NEMOTRON_KINDS, count)
    pattern = fields.text(pattern_name) or ""
    for position, character in enumerate(pattern):
        if character not in _PATTERN:
            found, known = shown_briefly(character), ", ".join(_PATTERN)
            raise fields.error(f"{pattern_name}[{position}]", f"found {found}, needs one of {known}")
    if count is not None and len(pattern) != count:
        raise fields.error(pattern_name, f"found {len(pattern)} layers, needs {count} as num_hidden_layers says")
    return [_PATTERN[character] for character in pattern]


def _nemotron_drafts(fields: Fields, layers: tuple[Layer, ...], attention: Layer) -> tuple[Layer, ...]:
    """Return the draft layers: one run of the draft pattern (usually attention, experts) for each draft position."""
    count = draft_count(fields)
    if not count:
        return ()
    lists, pattern_name = ("mtp_layers_block_type",), "mtp_hybrid_override_pattern"
    if not fields.has(lists[0]) and not fields.has(pattern_name):
        return draft_like_last(fields, layers, count)
    kinds = _nemotron_kinds(fields, lists, pattern_name, None)
    require_int(f"{fields.prefix}draft layers", len(kinds) * count, 1, MAX_LAYERS)
    if RECURRENT in kinds:
        raise fields.error(fields.first(*lists, pattern_name), "found a Mamba layer, needs attention, mlp or moe")
    by_kind: dict[str, Layer] = {ATTENTION: attention, UNCACHED: UncachedLayer()}
    return tuple(by_kind[kind] for kind in kinds) * count


def read_kimi_linear(fields: Fields, model_type: str | None) -> Built:
    """Return a Kimi Linear model: delta attention (KDA) with latent attention between."""
    nested = fields.sub("linear_attn_config")
    linear = fields if nested is None else nested
    names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if nested is not None:
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
    fields.require("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", *(names if nested is None else ()))
    linear.require(*names)
    refuse_window(fields)
    count = layer_count(fields)
    heads_name, dim_name, taps_name = names
    heads = linear.whole(heads_name)
    dim = linear.whole(dim_name)
    require_int(f"{linear.prefix}{heads_name} * {dim_name}", heads * dim, 1, MAX_DIM)
    recurrent = RecurrentLayer(
        algorithm="kda",
        heads=heads,
        head_dim=dim,
        groups=heads,
        state_dim=dim,
        conv_kernel=conv_taps(linear, taps_name),
    )
    layers = _in_turn(_kimi_kinds(fields, nested, count), latent_layer(fields), recurrent)
    drafts = draft_like_last(fields, layers, draft_count(fields))
    return Built(layers=layers, draft_layers=drafts, state_format=ElementFormat.FP32)


def _kimi_kinds(fields: Fields, nested: Fields | None, count: int) -> list[str]:
    if nested is None or not (nested.has("full_attn_layers") or nested.has("kda_layers")):
        fields.require("layer_types")
        return kinds_from_names(fields, "layer_types", KINDS, count)
    nested.require("full_attn_layers", "kda_layers")
    full = nested.indices("full_attn_layers", 1, count)  # the numbers count from 1
    delta = nested.indices("kda_layers", 1, count)
    if set(full) & set(delta) or len(full) + len(delta) != count:
        raise nested.error("kda_layers", f"needs each layer from 1 to {count} once, here or in full_attn_layers")
    attention_at = set(full)
    return [ATTENTION if index + 1 in attention_at else RECURRENT for index in range(count)]
