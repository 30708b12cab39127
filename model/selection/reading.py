"""From a spec to the inputs of the selection, and from a decision to numbers of bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from ..cost import block_bytes
from ..formats import ElementFormat
from ..layers import AttentionLayer, LatentLayer, recurrent_part
from ..layers import paged_part as paged
from ..rank import manager_layers
from ..spec import CacheSpec
from .deciding import Decision
from .inputs import SelectionInputs


def inputs_of(spec: CacheSpec, **others: Any) -> SelectionInputs:
    """Return the inputs that ``spec`` decides, with ``others`` (the flags, and whatever a spec does not know).

    The sparse algorithm, recurrent layers, geometry, FP4 latents and parallelism come from the spec. A rank without a
    recurrent layer of a hybrid model is one with ``zero`` of them.
    """
    known = {
        "sparse": spec.sparse_algorithm or "none",
        "hybrid": _hybrid(spec),
        "geometry": "variable" if has_variable_geometry(spec) else "uniform",
        "fp4_mla": any(
            isinstance(layer, LatentLayer) and (layer.kv_format or spec.kv_format) is ElementFormat.NVFP4
            for layer in spec.layers
        ),
        "attention_dp": spec.parallel.attention_dp,
        "pp": spec.parallel.pp,
    }
    return SelectionInputs(**(known | others))


def has_variable_geometry(spec: CacheSpec) -> bool:
    """Say whether the target's layers differ in KV heads or head dim (windows and formats do not count)."""
    shapes: set[tuple[int, ...]] = set()
    for layer in dict.fromkeys(map(paged, spec.layers)):
        if isinstance(layer, AttentionLayer):
            shapes.add((layer.kv_heads, layer.head_dim, layer.value_dim))
        elif isinstance(layer, LatentLayer):
            shapes.add((1, layer.row_dim))
    return len(shapes) > 1


def _hybrid(spec: CacheSpec) -> str:
    if not spec.has_recurrent:
        return "no"
    mine = (rank_layer.layer for manager in manager_layers(spec) for rank_layer in manager.layers)
    return "some" if any(recurrent_part(layer) is not None for layer in mine) else "zero"


def priced(decision: Decision, spec: CacheSpec) -> Decision:
    """Return ``decision`` with the bytes per token of ``spec`` on this rank, over all managers, and with the tokens
    that the spec's quota buys, where it has one (recurrent states not counted)."""
    single = msgspec.structs.replace(spec, tokens_per_block=1)
    token_bytes = sum(block_bytes(manager, single) for manager in manager_layers(single))
    values = {"bytes per token": token_bytes}
    if spec.quota_bytes is not None and token_bytes:
        values["budget"] = spec.quota_bytes // token_bytes  # floor: tokens that fit whole
    numbers = [
        msgspec.structs.replace(number, value=values.get(number.name, number.value)) for number in decision.numbers
    ]
    return msgspec.structs.replace(decision, numbers=tuple(numbers))
