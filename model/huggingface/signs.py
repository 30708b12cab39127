"""Signs that a config means something else than the plain reading of its ordinary fields.

The plain readers (dense and latent attention) would load such a config and be wrong in silence, so each sign is refused
by name. A field that is null, false, zero or empty is no sign. A family that has such fields has its own reader.
"""

from __future__ import annotations

import re
from typing import Final

from .fields import Fields, shown_briefly

_RECURRENT: Final = "recurrent layers, which are not read for this model_type"
_GEOMETRY: Final = "head geometry that is not read for this model_type"
_PLACES: Final = "which layer is what in a way that is not read for this model_type"
_WINDOWS: Final = "local attention in a way that is not read for this model_type"
_CROSS: Final = "cross attention or an encoder, which have caches of another kind"
_ENCODER: Final = "an encoder, which keeps no cache"
_SPARSE: Final = "sparse or compressed attention, whose extra planes are not read for this model_type"
_SHARED: Final = "K/V shared between layers in a way that is not read for this model_type"

_SIGNS: Final = tuple(
    (re.compile(pattern), meaning)
    for pattern, meaning in (
        (r"(n_|num_|use_|hidden_)?(ssm|mamba|rwkv|lru|xlstm|mlstm|retention|gdn|kda)(_.*)?$", _RECURRENT),
        (r"(state_size|conv_kernel|conv_L_cache|conv1d_width|number_of_conv_states|ple_.*|short_conv.*)$", _RECURRENT),
        (r"linear_(attn|attention|conv|key|value|num|head|dt|cache).*$", _RECURRENT),
        (r"((n_)?recurrent.*|.*_recurrent_.*|loop_.*|num_loops)$", _RECURRENT),
        (r"(conv_(size|dim|kernel).*|use_short_conv.*)$", _RECURRENT),
        (r"(layers_block_type|block_types?|block_configs|attn_layers|attention_layers|full_attn_idxs)$", _PLACES),
        (r"(attn_layer_|hybrid_|full_attention_(interval|layers|idx)|global_attn_|global_attention_).*$", _PLACES),
        (r"(layer_pattern|layer_group_size|layers_pattern|num_layers_per_stack|kv_source_layers)$", _PLACES),
        (r"(add_cross_attention|cross_.*|encoder_.*|decoder_(layers|hidden|num|attention|ffn).*)$", _CROSS),
        (r"(type_vocab_size|mlm_.*|mask_token_prob|patch_size|num_channels|num_mel_bins)$", _ENCODER),
        (r"(num_)?global_(head|kv|key|attn|attention|window).*$|num_global_.*|hidden_size_global$", _GEOMETRY),
        (r"(swa_.*|.*_swa|num_sliding_.*|num_attention_heads_per_.*|num_key_value_heads_per_.*)$", _GEOMETRY),
        (r"(num_kv_heads|n_head_kv|multi_query.*|num_query_groups|d_kv|dim_head|attention_head_size)$", _GEOMETRY),
        (r"(attention_k_eq_v|attention_hidden_size|value_head_dim|head_dims?_per_layer)$", _GEOMETRY),
        (r"(attention_chunk_size|window_size|attention_window.*|local_attention.*|keep_window_size)$", _WINDOWS),
        (r"(local_(attn|window|layers).*|sliding_windows|blocksparse_.*|sparse_attention.*|sparse_attn.*)$", _SPARSE),
        (r"(index_.*|indexer_.*|compress.*|moba_.*|nsa_.*|dsa_.*|lightning_.*)$", _SPARSE),
        (r"(use_cla|cla_.*|kv_shared.*|share_kv.*|yoco.*|.*kv_share_factor)$", _SHARED),
    )
)

_ENCODER_ARCHITECTURES: Final = ("ForMaskedLM", "ForPreTraining", "ForImageClassification", "EncoderModel")


def is_set(value: object) -> bool:
    """Return whether ``value`` says anything: not null, false, zero or empty."""
    if value is None or value is False:
        return False
    return bool(value) if type(value) in (int, float, str, list, tuple, dict) else True


def refuse_signs(fields: Fields, understood: frozenset[str] = frozenset()) -> None:
    """Raise an error for the first field that is a sign and is not ``understood`` by the caller."""
    for name, value in fields.values.items():
        if not isinstance(name, str) or len(name) > 100 or name in understood or not is_set(value):
            continue
        for pattern, meaning in _SIGNS:
            if pattern.match(name):
                problem = f"found {shown_briefly(value)}, a sign of {meaning}; needs a config without it"
                raise fields.error(name, problem)
    if fields.values.get("use_bidirectional_attention") is True:
        raise fields.error("use_bidirectional_attention", f"found True, a sign of {_ENCODER}; needs causal attention")
    _refuse_other_attention_types(fields)


def refuse_encoders(fields: Fields) -> None:
    """Refuse a config of unknown family whose ``architectures`` are those of an encoder."""
    # is_decoder false refuses nothing: transformers 4 writes it for every model, and GPT-NeoX has it.
    names = fields.values.get("architectures")
    if isinstance(names, (list, tuple)):
        for name in names[:10]:
            if isinstance(name, str) and name.endswith(_ENCODER_ARCHITECTURES):
                raise fields.error("architectures", f"found {shown_briefly(name)}, {_ENCODER}; needs a decoder")


def _refuse_other_attention_types(fields: Fields) -> None:
    """Refuse an ``attn_type_list`` (MiniMax) with any entry but 1, softmax attention."""
    if not fields.has("attn_type_list"):
        return
    for position, value in enumerate(fields.entries("attn_type_list")):
        if type(value) is not int or value != 1:
            found = shown_briefly(value)
            raise fields.error(f"attn_type_list[{position}]", f"found {found}, a sign of {_RECURRENT}; needs 1")
