"""Recipes for rare classes: each turns a drawn plan into one of its class by solving for a size.

A recipe leaves a plan alone where it does not apply: too few layers, an axis that the caller pinned, a number that
does not divide. It keeps the plan valid and inside what the family's allocators support. Recipes that set one layer's
planes alone are for the families whose attention may differ from layer to layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from ..model.formats import ElementFormat
from ..model.layers import (
    INDEX_KEY,
    MAX_DIM,
    AttentionLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    SidePlane,
    paged_part,
    recurrent_part,
)
from .classes import with_format
from .formats import dim_multiple
from .geometry import Paged, key_elements, key_token_bytes, plane_of_bytes
from .plan import Plan

Recipe: TypeAlias = Callable[[Plan, int], None]
"""Changes a plan; the number, 0 to 3, picks a variant."""


def scaled_key(layer: Paged, times: int, attention_tp: int) -> Paged:
    """Return ``layer`` with a K page ``times`` as large as that of one head (or of its row) on every rank."""
    if isinstance(layer, LatentLayer):
        return msgspec.structs.replace(layer, latent_dim=layer.latent_dim * times, rope_dim=layer.rope_dim * times)
    return msgspec.structs.replace(layer, kv_heads=times * attention_tp)


def _full(layer: Paged) -> Paged:
    """Return ``layer`` with full attention and without side planes."""
    return msgspec.structs.replace(layer, window=None, sink_tokens=0, side_planes=())


def _set_index_plane(plan: Plan, plane: SidePlane) -> bool:
    """Give ``plane`` to all layers of the model that have an index plane, and to a local one if none has."""
    base = plan.first_paged()
    sparse_kind = AttentionLayer if plan.options.family.sparse_attention else LatentLayer
    if base is None or not isinstance(base, sparse_kind) or not plan.may("planes", "layers"):
        return False

    def with_plane(layer: Paged) -> Paged:
        others = tuple(other for other in layer.side_planes if other.role != INDEX_KEY)
        return msgspec.structs.replace(layer, side_planes=(plane, *others))

    plan.replace_paged(lambda layer: with_plane(layer) if layer.side_planes else layer)
    local = plan.local()
    if not any(_sparse(plan.layers[index]) for index in local):
        home = next((index for index in local if isinstance(plan.layers[index], sparse_kind)), local[0])
        paged = paged_part(plan.layers[home]) or base
        plan.layers[home] = with_plane(paged)
    return True


def _sparse(layer: Layer) -> bool:
    paged = paged_part(layer)
    return paged is not None and bool(paged.side_planes)


def index_in_own_pool(plan: Plan, variant: int) -> None:
    """Solve the index dim for the K page of the same layer on this rank."""
    layer = plan.first_paged()
    if layer is None:
        return
    plane = plane_of_bytes(INDEX_KEY, key_token_bytes(layer, plan.kv_format, plan.parallel.attention_tp), variant)
    if plane is not None:
        _set_index_plane(plan, plane)


def index_in_other_pool(plan: Plan, variant: int) -> None:
    """Make two layers of different K pages, the first with an index page as large as the second's K page."""
    base, local = plan.first_paged(), plan.gather(2)
    mixed = plan.options.family.name in ("dense", "any")
    if base is None or len(local) < 2 or not mixed or not plan.may("planes", "layers", "heads"):
        return
    if isinstance(base, AttentionLayer) and plan.options.family.name == "dense":
        return
    tp = plan.parallel.attention_tp
    small, large = _full(scaled_key(base, 1, tp)), _full(scaled_key(base, 2, tp))
    pair = (small, large) if variant < 2 else (large, small)
    plane = plane_of_bytes(INDEX_KEY, key_token_bytes(pair[1], plan.kv_format, tp), variant)
    if plane is not None:
        plan.layers[local[0]] = msgspec.structs.replace(pair[0], side_planes=(plane,))
        plan.layers[local[1]] = pair[1]


def tie_of_sizes(plan: Plan, variant: int) -> None:
    """Make the slots of two page sizes equal: an index page of two K pages, or one large layer and several small
    ones."""
    if plan.options.family.sparse_attention and (variant < 3 or plan.options.family.name == "qsa"):
        layer = plan.first_paged()
        if layer is None or not plan.may("planes", "layers"):
            return
        size = 2 * key_token_bytes(layer, plan.kv_format, plan.parallel.attention_tp)
        plane = plane_of_bytes(INDEX_KEY, size, variant)
        if plane is not None and _set_index_plane(plan, plane):
            plan.replace_paged(lambda paged: msgspec.structs.replace(paged, side_planes=paged.side_planes or (plane,)))
        return
    base, local = plan.first_paged(), plan.gather(3)
    if base is None or len(local) < 3 or not plan.may("layers", "heads") or not plan.drop_folded_draft():
        return
    if plan.options.family.name == "dense-v1" and isinstance(base, LatentLayer):
        return  # V1 has one row per window
    tp, small = plan.parallel.attention_tp, _full(scaled_key(base, 1, plan.parallel.attention_tp))
    few = min(len(local) - 1, 2 + variant)
    filler = plan.filler()
    if filler is None:
        return
    for index in local:
        plan.layers[index] = filler
    plan.layers[local[0]] = _full(scaled_key(base, few, tp))
    for index in local[1 : 1 + few]:
        plan.layers[index] = small


def merged_cycles(plan: Plan, variant: int) -> None:
    """Make as many layers with a window as without, or a recurrent state as large as the pages."""
    if plan.options.family.name == "qsa":
        _merge_with_states(plan, variant)
        return
    base, local, filler = plan.first_paged(), plan.gather(2), plan.filler()
    if base is None or len(local) < 2 or filler is None or not plan.may("layers", "windows"):
        return
    if not plan.drop_folded_draft():
        return
    plan.max_sequence_tokens = None
    full = msgspec.structs.replace(base, window=None, sink_tokens=0)
    windowed = msgspec.structs.replace(base, window=(128, 32, 1, 4096)[variant], sink_tokens=0)
    pairs = len(local) >> 1
    _assign(plan, local, [full, windowed] * pairs, filler)


def merged_with_other_pages(plan: Plan, variant: int) -> None:
    """Make one layer of large pages with full attention for every two of half the size with a window."""
    if plan.options.family.name == "qsa":
        _merge_with_states(plan, variant)
        return
    base, local, filler = plan.first_paged(), plan.gather(3), plan.filler()
    if base is None or len(local) < 3 or filler is None or not plan.may("layers", "windows", "heads"):
        return
    if not plan.drop_folded_draft():
        return
    plan.max_sequence_tokens = None
    tp = plan.parallel.attention_tp
    large = _full(scaled_key(base, 2, tp))
    small = msgspec.structs.replace(_full(scaled_key(base, 1, tp)), window=(128, 32, 1, 4096)[variant])
    triples = len(local) // 3  # floor: the rest is filled up
    _assign(plan, local, ([large, small, small] if variant < 2 else [small, large, small]) * triples, filler)


def _assign(plan: Plan, local: list[int], layers: Sequence[Layer], filler: Layer) -> None:
    """Put ``layers`` in the places ``local``, and ``filler`` in the rest of them."""
    for place, index in enumerate(local):
        plan.layers[index] = layers[place] if place < len(layers) else filler


def _merge_with_states(plan: Plan, variant: int) -> None:
    """Pair every sparse layer with a recurrent layer whose states are as large as its K/V pair and its index page.

    A state of ``channels`` rows of ``width`` elements beside a convolution of as many channels and one tap: the taps
    fill the index page, ``width`` of them the K/V pair.
    """
    base, local, filler = plan.first_paged(), plan.gather(2), plan.filler()
    if (
        not isinstance(base, AttentionLayer)
        or len(local) < 2
        or filler is None
        or "recurrent" not in plan.options.kinds
    ):
        return
    if not plan.may("planes", "layers", "state_formats") or (
        plan.kv_format.block_scaled and not plan.may("kv_formats")
    ):
        return
    if not plan.drop_folded_draft():
        return
    if plan.kv_format.block_scaled:
        plan.kv_format = ElementFormat.BF16
    pair = 2 * key_token_bytes(base, plan.kv_format, plan.parallel.attention_tp)
    widths = (4 << variant, 4, 8, 3, 5, 7)  # 2 would make the index page as large as K, 1 the two states equal
    width = next((width for width in widths if pair % (2 * width) == 0), 0)
    if not width:
        return
    channels = pair // (2 * width)  # floor: width was chosen to divide
    if channels > MAX_DIM:
        return
    plane = SidePlane(role=INDEX_KEY, dim=channels, format=ElementFormat.BF16)
    plan.replace_paged(lambda layer: msgspec.structs.replace(layer, side_planes=(plane,) if layer.side_planes else ()))
    state = RecurrentLayer(
        algorithm="mamba1",
        heads=plan.tokens_per_block * plan.parallel.state_tp,
        head_dim=channels,
        state_dim=width,
        conv_kernel=2,
        ssm_format=ElementFormat.BF16,
        conv_format=ElementFormat.BF16,
    )
    sparse = msgspec.structs.replace(base, side_planes=(plane,))
    _assign(plan, local, [sparse, state] * (len(local) >> 1), filler)


def scale_equals_page(plan: Plan, variant: int) -> None:
    """Make a page as large as an NVFP4 block-scale page: an index page, or a K page of an eighth of the elements."""
    if not plan.kv_format.block_scaled:
        if not plan.may("kv_formats"):
            return
        plan.kv_format = ElementFormat.NVFP4
        plan.replace_paged(_whole_blocks)
    tp = plan.parallel.attention_tp
    layer = plan.first_paged()
    if layer is None:
        return
    scaled = (layer.kv_format or plan.kv_format).block_scaled
    if plan.options.family.name == "qsa" or (layer.side_planes and variant < 2 and scaled):
        elements = key_elements(layer, tp)
        plane = plane_of_bytes(INDEX_KEY, elements >> 4, variant)
        if plane is not None:
            _set_index_plane(plan, plane)
        return
    local = plan.gather(2)
    if len(local) < 2 or not plan.may("layers", "heads") or plan.options.family.name == "dense-v1":
        return
    small = _whole_blocks(msgspec.structs.replace(_full(scaled_key(layer, 1, tp)), kv_format=None))
    plan.layers[local[0]], plan.layers[local[1]] = scaled_key(small, 8, tp), small


def _whole_blocks(layer: Paged) -> Paged:
    """Return ``layer`` with dims that NVFP4 can hold, unless it has a format of its own."""
    if layer.kv_format is not None:
        return layer
    return msgspec.structs.replace(with_format(layer, ElementFormat.NVFP4), kv_format=None)


def heads_equal_tp(plan: Plan, variant: int) -> None:
    """Give every attention layer as many KV heads as there are ranks to share them."""
    _set_heads(plan, plan.parallel.attention_tp)


def heads_replicated(plan: Plan, variant: int) -> None:
    """Give every attention layer fewer KV heads than ranks."""
    tp = plan.parallel.attention_tp
    _set_heads(plan, max(1, tp - 1 - variant) if tp > 1 else 0)


def heads_padded(plan: Plan, variant: int) -> None:
    """Give every attention layer more KV heads than ranks, but no multiple of them."""
    tp = plan.parallel.attention_tp
    _set_heads(plan, tp + 1 + variant % (tp - 1) if tp > 1 else 0)


def _set_heads(plan: Plan, heads: int) -> None:
    if heads < 1 or not plan.may("heads", "layers"):
        return
    plan.replace_paged(
        lambda layer: msgspec.structs.replace(layer, kv_heads=heads) if isinstance(layer, AttentionLayer) else layer
    )


def one_local_sparse_layer(plan: Plan, variant: int) -> None:
    """Take the side planes of all but one of this rank's layers."""
    layer = plan.first_paged()
    if layer is None or not plan.may("planes", "layers") or not plan.drop_folded_draft():
        return
    plane = next((own for own in layer.side_planes if own.role == INDEX_KEY), plane_of_bytes(INDEX_KEY, 256))
    if plane is None or not _set_index_plane(plan, plane):
        return
    sparse = [index for index in plan.local() if _sparse(plan.layers[index])]
    for index in sparse[: variant % len(sparse)] + sparse[variant % len(sparse) + 1 :]:
        paged = paged_part(plan.layers[index])
        if paged is not None:
            plan.layers[index] = msgspec.structs.replace(paged, side_planes=())


def two_formats(plan: Plan, variant: int) -> None:
    """Give one layer a KV format of its own: other pages, or equal pages with as many more heads as bits are fewer."""
    base, local = plan.first_paged(), plan.gather(2)
    if base is None or len(local) < 2 or not plan.may("layer_formats", "layers"):
        return
    mine = base.kv_format or plan.kv_format
    own = ElementFormat.FP8 if mine is not ElementFormat.FP8 else ElementFormat.BF16
    other = with_format(base, own)
    if variant > 1 and isinstance(base, AttentionLayer) and plan.may("heads"):
        if base.head_dim % dim_multiple(own):
            return
        tp = plan.parallel.attention_tp
        heads = math.lcm(mine.bits, own.bits)
        base = msgspec.structs.replace(base, kv_heads=tp * heads // mine.bits)  # floor: lcm
        other = msgspec.structs.replace(other, kv_heads=tp * heads // own.bits, head_dim=base.head_dim)  # floor: lcm
    pair = (base, other) if variant % 2 == 0 else (other, base)
    plan.layers[local[0]], plan.layers[local[1]] = pair


def equal_states(plan: Plan, variant: int) -> None:
    """Make a temporal state as large as its convolution state: as many columns as taps, by the widths of the
    formats."""
    if not plan.may("layers") or not {"recurrent", "hybrid"} & set(plan.options.kinds):
        return
    if not any(recurrent_part(plan.layers[index]) for index in plan.local()):
        local = plan.gather(2)
        if "recurrent" not in plan.options.kinds or not local:
            return
        plan.layers[local[-1]] = RecurrentLayer(algorithm="mamba1", heads=16 * plan.parallel.state_tp, state_dim=16)

    def equal(layer: RecurrentLayer) -> RecurrentLayer:
        ssm, conv = (layer.ssm_format or plan.state_format).bits, (layer.conv_format or plan.conv_format).bits
        unit = math.gcd(ssm, conv)
        columns, taps = (conv // unit) * (1 + variant), (ssm // unit) * (1 + variant)  # floor: gcd
        change = {"groups": 0, "state_dim": columns, "conv_kernel": taps + 1}
        return msgspec.structs.replace(layer, algorithm="mamba1", **change)

    plan.replace_recurrent(equal)


def packed_equals_page(plan: Plan, variant: int) -> None:
    """Make the planes of all local sparse layers together as large as the K page of as many heads."""
    layer = plan.first_paged()
    if not isinstance(layer, AttentionLayer) or not plan.may("planes", "heads", "layers"):
        return
    one_head = key_token_bytes(msgspec.structs.replace(layer, kv_heads=1), plan.kv_format, 1)
    plane = plane_of_bytes(INDEX_KEY, one_head, variant)
    if plane is None or not _set_index_plane(plan, plane):
        return
    plan.replace_paged(lambda paged: msgspec.structs.replace(paged, side_planes=paged.side_planes[:1]))
    local = [plan.layers[index] for index in plan.local()]
    count = sum(_sparse(layer) for layer in local)
    if plan.draft.mode == "folded" and plan.parallel.coordinates(plan.rank).pp_rank == plan.parallel.pp - 1:
        count += sum(_sparse(layer) for layer in plan.draft.layers)
    _set_heads(plan, count * plan.parallel.attention_tp)


class RareRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe, and the plans that it wants to be given.

    ``layers`` is the least number of layers, ``sparse_layers`` that in families with sparse attention; ``shared`` asks
    for heads shared by several ranks, ``base`` for a kind of base (``sparse``: the kind that has side planes in the
    family). ``recurrent`` says that it may add recurrent layers.
    """

    change: Recipe
    layers: int = 1
    sparse_layers: int = 1
    shared: bool = False
    base: Literal["attention", "latent", "sparse"] | None = None
    recurrent: bool = False


RECIPES: Final[dict[str, RareRecipe]] = {
    "index plane in its own layer's K/V pool": RareRecipe(change=index_in_own_pool, base="sparse"),
    "index plane in another layer's pool": RareRecipe(
        change=index_in_other_pool, layers=2, sparse_layers=2, base="latent"
    ),
    "tie of two size classes": RareRecipe(change=tie_of_sizes, layers=3, base="attention"),
    "life cycles merged": RareRecipe(change=merged_cycles, layers=2, sparse_layers=2),
    "life cycles merged with different page sizes": RareRecipe(
        change=merged_with_other_pages, layers=3, sparse_layers=2
    ),
    "scale page equal to another page": RareRecipe(change=scale_equals_page, layers=2, sparse_layers=2),
    "KV heads = TP": RareRecipe(change=heads_equal_tp, shared=True, base="attention"),
    "heads replicated": RareRecipe(change=heads_replicated, shared=True, base="attention"),
    "heads padded": RareRecipe(change=heads_padded, shared=True, base="attention"),
    "one local sparse layer": RareRecipe(change=one_local_sparse_layer, base="sparse"),
    "two KV formats in one life cycle": RareRecipe(change=two_formats, layers=2, sparse_layers=2),
    "ssm bytes == conv bytes": RareRecipe(change=equal_states, layers=2, sparse_layers=2, recurrent=True),
    "packed planes equal to another page": RareRecipe(change=packed_equals_page, base="attention"),
}
"""Recipes by the class that they make."""

_FREQUENT: Final = ("KV heads = TP", "heads replicated", "heads padded", "two KV formats in one life cycle")
"""Classes that need no recipe in a mixture: theirs are for asking by name."""

FAMILY_RECIPES: Final[dict[str, tuple[str, ...]]] = {
    "dense": tuple(name for name in RECIPES if name not in (*_FREQUENT, "packed planes equal to another page")),
    "dense-v1": ("tie of two size classes", "one local sparse layer", "ssm bytes == conv bytes"),
    "qsa": tuple(name for name in RECIPES if name not in (*_FREQUENT, "index plane in another layer's pool")),
    "any": tuple(name for name in RECIPES if name not in _FREQUENT),
}
"""The recipes that a family's specs are mixed with."""
