"""What the TensorRT-LLM managers declare to support: the reasons for which a spec lies outside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ....model.layers import AttentionLayer, LatentLayer, paged_part
from ....model.rank import model_layers
from ....model.spec import CacheSpec
from ...rejection import Rejected


def distinct_paged(spec: CacheSpec, manager: str) -> tuple[AttentionLayer | LatentLayer, ...]:
    """Return the different layers with pages of one manager over the whole model."""
    paged = (paged_part(layer) for layer in dict.fromkeys(model_layers(spec, manager)))
    return tuple(dict.fromkeys(layer for layer in paged if layer is not None))


def refuse_unsupported(reasons: Iterator[tuple[str, str]] | Iterable[tuple[str, str]]) -> None:
    """Raise ``Rejected`` (unsupported) for the first of ``reasons``: pairs of a message and a remedy."""
    for message, remedy in reasons:
        raise Rejected(message, remedy, supported=False)


def manager_names(spec: CacheSpec) -> tuple[str, ...]:
    """Return the names of the managers of a deployment, over all ranks."""
    return ("target", "draft") if spec.draft.mode == "separate" else ("target",)


def common_reasons(spec: CacheSpec) -> Iterator[tuple[str, str]]:
    """Yield what no TensorRT-LLM manager supports, as (message, remedy)."""
    if spec.draft.mode == "separate" and spec.parallel.attention_dp:
        yield (
            "attention-DP keeps the draft layers in the target's manager, a separate draft manager was asked for",
            "use --draft folded with attention-DP",
        )
    for manager in manager_names(spec):
        layers = distinct_paged(spec, manager)
        if len({type(layer) for layer in layers}) > 1:
            yield (
                f"the {manager} manager has both K/V layers and latent (K-only) layers, and one manager has one kind",
                "check the two kinds as models of their own, or use separate draft layers",
            )
        for layer in layers:
            if isinstance(layer, AttentionLayer) and layer.value_dim != layer.head_dim:
                yield (
                    (
                        f"K pages of head dim {layer.head_dim} beside V pages of head dim {layer.value_dim}: both "
                        "must be equal"
                    ),
                    "pad the smaller head dim",
                )
