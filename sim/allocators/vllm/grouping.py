"""The planner's groups: layers that share block ids, with pages of one size unless there is a single group.

A group's layers hold a block together; groups take block ids from one allocator and overlay the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ....model.arithmetic import div_up, exact_div
from ...rejection import Rejected
from .layer_specs import CachedLayer, LayerSpec
from .packing import pack_layers, uniform

_SIMILAR = 3, 2
"""Buckets whose sizes differ by less than 3 : 2 form groups of the larger size, with virtual layers to fill up."""


class Unifying(msgspec.Struct, frozen=True):
    """How an era makes pages equal: may it pad states, and K/V pages, where more tokens per block do not fit.

    ``keeps_sizes``: pages of several sizes are not made equal but packed side by side into blocks.
    """

    pads_states: bool
    pads_pages: bool
    keeps_sizes: bool = False


def group_layers(layers: Sequence[CachedLayer], unifying: Unifying) -> list[list[CachedLayer]]:
    """Return the groups of ``layers``, none for no layers.

    Raises ``Rejected`` where pages cannot be made equal.
    """
    if not layers:
        return []
    specs = dict.fromkeys(layer.spec for layer in layers)
    if uniform(list(specs), one_state_size=unifying.pads_states):
        return [list(layers)]
    if unifying.keeps_sizes and len({spec.page_bytes for spec in specs}) > 1:
        return pack_layers(layers)
    try:
        unified = _unify(list(specs), unifying)
    except Rejected:
        whole = _without_windows(layers) if unifying.pads_pages else None
        if whole is None:
            raise
        return [whole]
    buckets: dict[LayerSpec, list[CachedLayer]] = {}
    for layer in layers:
        spec = unified[layer.spec]
        buckets.setdefault(spec, []).append(msgspec.structs.replace(layer, spec=spec))
    sizes = [len(bucket) for bucket in buckets.values()]
    similar = max(sizes) * _SIMILAR[1] < min(sizes) * _SIMILAR[0]
    size = max(sizes) if similar else min(sizes)
    groups = []
    for bucket in buckets.values():
        count = div_up(len(bucket), size)
        groups += [bucket[number::count] for number in range(count)]
    return groups


def _without_windows(layers: Sequence[CachedLayer]) -> list[CachedLayer] | None:
    """Return the one group that era 3 falls back to where pages cannot be made equal: K/V layers with a window keep all
    their blocks, as latent layers beside them do. None where that does not make one group of all layers."""
    latent = any(layer.spec.kind in ("latent", "index") for layer in layers)
    if not latent or any(layer.spec.kind == "latent" and layer.spec.window is not None for layer in layers):
        return None
    whole = [msgspec.structs.replace(layer, spec=msgspec.structs.replace(layer.spec, window=None)) for layer in layers]
    return whole if uniform([layer.spec for layer in whole]) else None


def _unify(specs: list[LayerSpec], unifying: Unifying) -> dict[LayerSpec, LayerSpec]:
    """Return each spec with a page as large as the largest."""
    largest = max(spec.page_bytes for spec in specs)
    unified = {}
    for spec in specs:
        page = spec.page_bytes
        if page == largest:
            unified[spec] = spec
        elif spec.kind == "recurrent" and unifying.pads_states:
            unified[spec] = msgspec.structs.replace(spec, padded_bytes=largest)
        elif spec.kind != "recurrent" and largest % page == 0:
            tokens = spec.block_tokens * exact_div(largest, page, "largest page over a page")
            unified[spec] = msgspec.structs.replace(spec, block_tokens=tokens)
        elif unifying.pads_pages and (spec.kind == "attention" or spec.window is not None):
            unified[spec] = msgspec.structs.replace(spec, padded_bytes=largest)
        else:
            what = "a recurrent layer's states" if spec.kind == "recurrent" else f"a page of {spec.block_tokens} tokens"
            raise Rejected(
                f"{what} ({page} B, {spec.kind}) cannot be made as large as the largest page of the model ({largest} "
                "B), and groups that share memory need pages of one size",
                "choose tokens per block, heads or head dims that give pages of one size or a multiple (vllm-e3 pads "
                "K/V pages and states)",
                supported=False,
            )
    return unified
