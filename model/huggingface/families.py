"""From a decoded config to an ``Architecture``: find the text model, run its family's reader, add what all share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from ..architecture import Architecture
from ..formats import KV_FORMATS, STATE_FORMATS, ElementFormat
from ..layers import MAX_TOKENS, HybridLayer, Layer, RecurrentLayer
from .dense import DENSE_FAMILIES, read_dense
from .fields import Fields, one_line
from .geometry import Built
from .hybrid import (
    read_bamba,
    read_falcon_h1,
    read_jamba,
    read_kimi_linear,
    read_nemotron_h,
    read_zamba,
    read_zamba2,
)
from .latent import DSA_FAMILIES, LATENT_FAMILIES, read_dsa, read_latent
from .recurrent import read_gdn, read_lfm2, read_mamba1, read_mamba2
from .signs import is_set

Reader: TypeAlias = Callable[[Fields, str | None], Built]

FAMILIES: Final[Mapping[str, Reader]] = {
    **dict.fromkeys(DENSE_FAMILIES, read_dense),
    **dict.fromkeys(LATENT_FAMILIES, read_latent),
    **dict.fromkeys(DSA_FAMILIES, read_dsa),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), read_gdn),
    **dict.fromkeys(("qwen3_8_flash_next", "qwen3_8_flash_next_text"), read_gdn),
    **dict.fromkeys(("mamba", "falcon_mamba"), read_mamba1),
    **dict.fromkeys(("lfm2", "lfm2_moe"), read_lfm2),
    "mamba2": read_mamba2,
    **dict.fromkeys(("bamba", "granitemoehybrid"), read_bamba),
    "jamba": read_jamba,
    "falcon_h1": read_falcon_h1,
    "zamba": read_zamba,
    "zamba2": read_zamba2,
    "nemotron_h": read_nemotron_h,
    "kimi_linear": read_kimi_linear,
}
"""The reader of each known ``model_type``."""

_TEXT_LEVELS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where a multimodal config keeps its text model."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a decoded config describes; raise ``SpecError`` naming the field at fault."""
    outer = Fields(config)
    levels = [outer]
    while len(levels) < 4:  # a thinker_config holds a text_config; the bound keeps a dict that contains itself finite
        inner = next((level for level in map(levels[-1].sub, _TEXT_LEVELS) if level is not None and level.values), None)
        if inner is None:
            break
        levels.append(inner)
    for level in levels:
        if level.flag("is_encoder_decoder"):
            raise level.error("is_encoder_decoder", "found True, needs a decoder; cross attention is not read")
    if is_set(levels[-1].values.get("per_layer_config")):
        raise levels[-1].error("per_layer_config", "overrides of single layers are not read, needs none")
    types = [found for found in (level.text("model_type", 100) for level in reversed(levels)) if found is not None]
    model_type = next((found for found in types if found in FAMILIES), types[0] if types else None)
    text = levels[-1]
    _note_quantized_cache(levels)
    reader = FAMILIES.get(model_type or "")
    if reader is None:
        reader = read_latent if text.has("kv_lora_rank") else read_dense
    built = reader(text, model_type)
    return Architecture(
        name=one_line(types[-1]) if types else "unnamed",
        layers=built.layers,
        draft_layers=built.draft_layers,
        model_format=_model_format(levels),
        state_format=_state_format(levels, built),
        sparse_algorithm=built.sparse_algorithm,
        max_sequence_tokens=_max_sequence_tokens(text),
        inferred=tuple(outer.inferred),
    )


def _note_quantized_cache(levels: list[Fields]) -> None:
    for level in levels:
        quantization = level.values.get("quantization_config")
        for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if isinstance(quantization, dict) and is_set(quantization.get(name)):
                level.infer(f"quantization_config.{name} is not applied: the K/V format is left to the deployment.")


def _max_sequence_tokens(text: Fields) -> int | None:
    return text.optional_whole(text.first("max_position_embeddings", "model_max_length"), 1, MAX_TOKENS)


def _model_format(levels: list[Fields]) -> ElementFormat | None:
    """Return the model's dtype: that of the innermost level that has one."""
    found: list[ElementFormat] = []
    for level in reversed(levels):
        for name in ("dtype", "torch_dtype"):
            format_ = level.format(name, KV_FORMATS)
            if format_ is not None:
                found.append(format_)
    if not found:
        levels[0].infer("dtype is absent: the model's format is not known.")
        return None
    if len(set(found)) > 1:
        names = ", ".join(format_.value for format_ in found)
        levels[0].infer(f"Several dtypes are given ({names}): that of the text model, {found[0].value}, holds.")
    return found[0]


def _state_format(levels: list[Fields], built: Built) -> ElementFormat | None:
    """Return the format of the recurrent states, None if there are none or the config does not say."""
    if not _any_recurrent((*built.layers, *built.draft_layers)):
        return None
    for level in reversed(levels):
        for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
            format_ = level.format(name, STATE_FORMATS)
            if format_ is not None:
                return format_
    if built.state_format is not None:
        name = built.state_format.value
        levels[0].infer(f"The state's dtype is absent: taken as {name}, which the family's code uses.")
        return built.state_format
    levels[0].infer("The state's dtype is absent: the recurrent states follow the model's dtype.")
    return None


def _any_recurrent(layers: Iterable[Layer]) -> bool:
    return any(isinstance(layer, (RecurrentLayer, HybridLayer)) for layer in layers)
