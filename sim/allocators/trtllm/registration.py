"""What each layer registers with the storage: its roles in order, each with its page on this rank.

Order within an attention layer: K, V, K scales, V scales, then side planes. A recurrent layer registers its temporal
state, its
convolution state, then auxiliary states. All later offsets follow from this order and from the order of the layers.
"""

from __future__ import annotations

import msgspec

from ....model.arithmetic import InexactDivision, exact_div
from ....model.formats import ElementFormat
from ....model.layers import AttentionLayer, LatentLayer, RecurrentLayer, SidePlane
from ....model.parallel import rank_heads
from ....model.spec import CacheSpec
from ...layout import CONV_STATE, KEY, KEY_SCALE, SSM_STATE, VALUE, VALUE_SCALE, Part
from ...page import Page, dense_page, kv_page, repeated_page, scale_page
from ...rejection import Rejected


class Registration(msgspec.Struct, frozen=True):
    """One buffer that a layer asks for.

    ``page`` is what the buffer holds of one slot; ``size_bytes`` its size and ``expansion`` the kernel pages in it
    (more than 1 where
    the layer's own block is smaller than the manager's). ``arithmetic`` spells the size for a reader.
    """

    role: str
    page: Page
    size_bytes: int
    expansion: int = 1
    arithmetic: str = ""
    parts: tuple[Part, ...] = ()


def register_paged(layer: AttentionLayer | LatentLayer, spec: CacheSpec) -> tuple[Registration, ...]:
    """Return K, V and block-scale registrations of a layer with pages, without its side planes.

    Raises ``Rejected`` where a page would not be a whole number of bytes or blocks.
    """
    kv_format = layer.kv_format or spec.kv_format
    tokens = layer.tokens_per_block or spec.tokens_per_block
    try:
        expansion = exact_div(spec.tokens_per_block, tokens, "tokens per block of the manager over those of a layer")
        if isinstance(layer, LatentLayer):
            heads, dim, lanes = 1, layer.row_dim, 1
        else:
            heads, dim, lanes = rank_heads(layer.kv_heads, spec.parallel.attention_tp), layer.head_dim, 2
        page = kv_page(kv_format, heads, tokens, dim, spec.consumer.kv_layout)
        scales = scale_page(heads, tokens, dim, spec.consumer.kv_layout) if kv_format.block_scaled else None
    except InexactDivision as error:
        remedy = "choose a KV dtype, head dim and tokens per block that give whole bytes"
        raise Rejected(f"a page is not a whole number: {error}", remedy, supported=False) from None
    times = f" x {expansion} pages" if expansion > 1 else ""
    shape = f"{_counted(heads, 'head')} x {dim}"
    spelled = f"{shape} {kv_format.value} x {tokens} tokens{times}"
    registered = [_registration(role, page, expansion, spelled) for role in (KEY, VALUE)[:lanes]]
    if scales is not None:
        spelled = f"{shape} / 16 scales x {tokens} tokens{times}"
        registered += [_registration(role, scales, expansion, spelled) for role in (KEY_SCALE, VALUE_SCALE)[:lanes]]
    return tuple(registered)


def register_side_plane(plane: SidePlane, spec: CacheSpec) -> Registration:
    """Return the registration of one side plane as a buffer of its own: ``tokens x heads x dim``."""
    tokens = spec.tokens_per_block
    page = dense_page(plane.format, ("token", "head", "dim"), (tokens, plane.heads, plane.dim))
    spelled = f"{_counted(plane.heads, 'head')} x {plane.dim} {plane.format.value} x {tokens} tokens"
    return _registration(plane.role, page, 1, spelled)


def register_states(layer: RecurrentLayer, spec: CacheSpec) -> tuple[Registration, ...]:
    """Return the state registrations of a recurrent layer on one rank; sizes are bytes per request.

    Raises ``Rejected`` when the heads or convolution channels do not divide over the ranks that share them.
    """
    ranks = spec.parallel.state_tp
    for count, what in ((layer.heads, "heads"), (layer.conv_channels, "convolution channels")):
        if count % ranks:
            raise Rejected(
                f"a {layer.algorithm} layer's {count} recurrent {what} do not divide over {ranks} ranks",
                f"choose a tensor-parallel size that divides {count}, or attention-DP, which keeps recurrent states "
                "whole",
                supported=False,
            )
    ssm_format = layer.ssm_format or spec.state_format
    conv_format = layer.conv_format or spec.conv_format
    heads, channels = (
        exact_div(layer.heads, ranks, "recurrent heads"),
        exact_div(layer.conv_channels, ranks, "channels"),
    )
    registered = []
    if layer.state_dim:
        shape = (heads, layer.head_dim, layer.state_dim)
        registered.append(_state(SSM_STATE, ssm_format, ("head", "dim", "state"), shape))
    registered.append(_state(CONV_STATE, conv_format, ("channel", "tap"), (channels, layer.conv_kernel - 1)))
    for state in layer.auxiliary:
        axes = ("channel", "row", "column", "entry")[: len(state.shape)]
        registered.append(_state(state.role, state.format, axes, state.shape))
    return tuple(registered)


def _state(role: str, format: ElementFormat, axes: tuple[str, ...], shape: tuple[int, ...]) -> Registration:
    page = dense_page(format, axes, shape)
    return _registration(role, page, 1, f"{' x '.join(str(size) for size in shape)} {format.value}")


def _registration(role: str, page: Page, expansion: int, spelled: str) -> Registration:
    whole = repeated_page(page, expansion)
    return Registration(role, whole, whole.span_bytes, expansion, f"{spelled} = {whole.span_bytes} B")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
