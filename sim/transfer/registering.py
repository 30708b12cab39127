"""``register``: what one rank registers of its ``Layout``, role by role.

K, V and block scales are shared out over the ranks that share heads, and lie in the axis order of their pages. Side
planes and auxiliary states are the same on every rank. A temporal state is shared out by heads, a convolution state in
sections (queries, keys and values, or x, B and C), each by its channels. The facts are told in ``docs/trtllm.md``, and
what is checked here in ``docs/peers.md``.
"""

from __future__ import annotations

from ...model.arithmetic import exact_div
from ...model.layers import AttentionLayer, Layer, RecurrentLayer, paged_part, recurrent_part
from ...model.spec import CacheSpec
from ..finding import Where
from ..layout import CONV_STATE, KEY, KEY_SCALE, SSM_STATE, VALUE, VALUE_SCALE, Buffer, Layout
from ..page import Page
from ..rejection import Rejected
from .declaration import Entry, Kind, Region, Registration, RoleLayout, View

_HEAD_ROLES = (KEY, VALUE, KEY_SCALE, VALUE_SCALE)


def register(layout: Layout) -> Registration:
    """Return what the rank of ``layout`` registers; raise ``Rejected`` naming the buffer that cannot be registered."""
    spec = layout.spec
    if spec is None:
        raise Rejected("the layout names no spec, so nobody knows how its roles are shared out", "give it its spec")
    if spec.parallel.cp > 1:
        raise Rejected(
            f"{spec.parallel.name} spreads the positions of a sequence over {spec.parallel.cp} context-parallel ranks, "
            "and views say nothing of positions",
            "use cp 1 on both sides of the transfer",
            supported=False,
        )
    local = {layer: number for number, layer in enumerate(dict.fromkeys(b.layer for b in layout.buffers))}
    grouped: dict[tuple[int, int, int, RoleLayout], list[Entry]] = {}
    known: dict[tuple[Layer, str, Page], RoleLayout] = {}
    for buffer in layout.buffers:
        layer = _layer_of(spec, buffer)
        key = (layer, buffer.role, buffer.page)
        role_layout = known.get(key)
        if role_layout is None:
            recurrent = layout.life_cycles[buffer.life_cycle].recurrent
            role_layout = known[key] = _role_layout(spec, layer, buffer, recurrent)
        entry = Entry(
            buffer.layer,
            local[buffer.layer],
            buffer.role,
            buffer.offset_bytes,
            buffer.page.span_bytes,
            buffer.parts,
            once_per_rank(layer, buffer.role),
        )
        place = (buffer.life_cycle, buffer.pool, buffer.slot_stride_bytes, role_layout)
        grouped.setdefault(place, []).append(entry)
    views = tuple([_view(*place, entries) for place, entries in grouped.items()])
    coordinates = spec.parallel.coordinates(spec.rank)
    return Registration(spec.rank, coordinates.pp_rank, views, _regions(layout, views), layout.life_cycles)


def _layer_of(spec: CacheSpec, buffer: Buffer) -> Layer:
    layers = len(spec.layers)
    if 0 <= buffer.layer < layers:
        return spec.layers[buffer.layer]
    if layers <= buffer.layer < layers + len(spec.draft.layers):
        return spec.draft.layers[buffer.layer - layers]
    raise _refused(buffer, f"belongs to no layer of the model, which has {layers}", "number layers as the model does")


def _role_layout(spec: CacheSpec, layer: Layer, buffer: Buffer, recurrent: bool) -> RoleLayout:
    """Return how one buffer's role is shared out."""
    page = buffer.page
    if not page.dense or page.self_overlap:
        raise _refused(buffer, "has a page with gaps, and a view is contiguous", "register the role densely")
    if recurrent:
        state = recurrent_part(layer)
        if state is None:
            raise _refused(buffer, "is a state of a layer that keeps none", "store states for recurrent layers alone")
        return _state_layout(spec, state, buffer)
    paged = paged_part(layer)
    if paged is None:
        raise _refused(buffer, "is a page of a layer that keeps none", "store pages for attention layers alone")
    axes = dict(zip(page.axes, page.shape, strict=True))
    pages = axes.get("page", 1)
    if buffer.role not in _HEAD_ROLES:
        ranks = spec.parallel.attention_tp
        return _replicated(spec, ranks, page.format.value, pages, exact_div(spec.tokens_per_block, pages, "tokens"))
    if "head" not in axes or "token" not in axes:
        raise _refused(
            buffer, f"has the axes {', '.join(page.axes)}, and needs a head and a token axis", "name its axes"
        )
    heads = paged.kv_heads if isinstance(paged, AttentionLayer) else 1
    kind: Kind = "HND" if page.axes.index("head") < page.axes.index("token") else "NHD"
    shards = _shards(buffer, heads, spec.parallel.attention_tp, "KV heads")
    held = exact_div(heads, shards, "KV heads per shard")
    if axes["head"] != held:
        raise _refused(
            buffer, f"holds {axes['head']} heads, and its share is {held} of {heads}", "store the rank's own heads"
        )
    row_bytes = exact_div(page.span_bytes, pages * axes["token"] * held, "bytes of one head's token")
    unit_bytes = row_bytes * axes["token"] if kind == "HND" else row_bytes
    return _shared(spec, spec.parallel.attention_tp, shards, kind, unit_bytes, (), page, pages, axes["token"])


def _state_layout(spec: CacheSpec, layer: RecurrentLayer, buffer: Buffer) -> RoleLayout:
    """Return how a recurrent layer's state is shared out."""
    ranks = spec.parallel.state_tp
    page = buffer.page
    if buffer.role == SSM_STATE:
        shards = _shards(buffer, layer.heads, ranks, "recurrent heads")
        unit_bytes = exact_div(page.span_bytes, exact_div(layer.heads, shards, "heads"), "bytes of one head's state")
        return _shared(spec, ranks, shards, "HND", unit_bytes, (), page, 1, None)
    if buffer.role == CONV_STATE:
        channel_bytes = page.stride_bytes[0]
        sections = []
        for name, channels in conv_sections(layer):
            if channels % ranks:
                raise _refused(
                    buffer,
                    f"has {channels} channels of {name}, which do not divide over {ranks} ranks",
                    "choose a tensor-parallel size that divides every section of the convolution",
                )
            sections.append(exact_div(channels, ranks, "channels") * channel_bytes)
        if sum(sections) != page.span_bytes:
            raise _refused(
                buffer, f"takes {page.span_bytes} B, and its sections {sum(sections)} B", "store all sections"
            )
        return _shared(spec, ranks, ranks, "SECTIONED", 0, tuple(sections), page, 1, None)
    if any(state.role == buffer.role for state in layer.auxiliary):
        return _replicated(spec, ranks, page.format.value, 1, None)
    raise _refused(buffer, "is a state that nobody says how to share out", "declare it as an auxiliary state")


def conv_sections(layer: RecurrentLayer) -> tuple[tuple[str, int], ...]:
    """Return the sections of a convolution state as (name, channels of the whole model), in their order in memory.

    Gated delta nets store queries, keys, values; Mamba-2 stores x, B, C; the others have one section.
    """
    inner = layer.heads * layer.head_dim
    grouped = layer.groups * layer.state_dim
    if layer.algorithm in ("gdn", "kda"):
        return ("queries", grouped), ("keys", grouped), ("values", inner)
    if layer.algorithm == "mamba2":
        return ("x", inner), ("B", grouped), ("C", grouped)
    return (("x", inner),)


def once_per_rank(layer: Layer, role: str) -> bool:
    """Whether a role is a side plane that each rank keeps once, beside its first layer that has it."""
    paged = paged_part(layer)
    return paged is not None and any(plane.role == role and plane.scope == "rank" for plane in paged.side_planes)


def _shards(buffer: Buffer, heads: int, ranks: int, what: str) -> int:
    """Return over how many shards heads are spread; more ranks than heads replicate them."""
    shards = min(ranks, heads)
    if heads % shards or ranks % shards:
        raise _refused(
            buffer,
            f"has {heads} {what} over {ranks} ranks: {heads} and {ranks} do not divide one another, so shards would "
            "not be equal",
            "choose a tensor-parallel size that divides the heads or is a multiple of them, or attention-DP",
        )
    return shards


def _shared(
    spec: CacheSpec,
    ranks: int,
    shards: int,
    kind: Kind,
    unit_bytes: int,
    sections: tuple[int, ...],
    page: Page,
    pages: int,
    tokens: int | None,
) -> RoleLayout:
    replicas = exact_div(ranks, shards, "replicas")
    rank = 0 if ranks == 1 else spec.parallel.coordinates(spec.rank).tp_rank
    shard, replica = divmod(rank, replicas)
    name = page.format.value
    return RoleLayout(kind, shards, shard, replicas, replica, unit_bytes, sections, name, pages, tokens)


def _replicated(spec: CacheSpec, ranks: int, name: str, pages: int, tokens: int | None) -> RoleLayout:
    rank = 0 if ranks == 1 else spec.parallel.coordinates(spec.rank).tp_rank
    return RoleLayout("REPLICATED", 1, 0, ranks, rank, 0, (), name, pages, tokens)


def _view(life_cycle: int, pool: int, stride: int, role_layout: RoleLayout, entries: list[Entry]) -> View:
    """Return one view; refuse a layer whose entries are apart, and layers of different sizes."""
    entries.sort(key=lambda entry: entry.offset_bytes)
    held: dict[int, tuple[int, int]] = {}
    runs: list[tuple[int, int]] = []
    for entry in entries:
        first, size = held.get(entry.layer, (entry.offset_bytes, 0))
        if first + size != entry.offset_bytes:
            raise Rejected(
                f"layer {entry.layer}'s {entry.role} starts at byte {entry.offset_bytes} of pool {pool}, and what else "
                f"of the layer is shared out alike ends at byte {first + size}; a layer's part of a view is contiguous",
                "place the roles of a layer side by side, or declare them differently",
                where=(Where(layer=entry.layer, role=entry.role, pool=pool),),
                supported=False,
            )
        held[entry.layer] = (first, size + entry.size_bytes)
        if runs and runs[-1][0] + runs[-1][1] == entry.offset_bytes:
            runs[-1] = (runs[-1][0], runs[-1][1] + entry.size_bytes)
        else:
            runs.append((entry.offset_bytes, entry.size_bytes))
    sizes: dict[int, int] = {}
    for layer, (_, size) in held.items():
        sizes.setdefault(size, layer)
    if len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise Rejected(
            f"layers {first} and {second} have {one} B and {other} B in one view of pool {pool}; every layer of a view "
            "has as many bytes",
            "give the layers roles of equal sizes, or pools of their own",
            where=(Where(layer=first, pool=pool), Where(layer=second, pool=pool)),
            supported=False,
        )
    return View(life_cycle, pool, stride, role_layout, tuple(entries), next(iter(sizes)), tuple(runs))


def _regions(layout: Layout, views: tuple[View, ...]) -> tuple[Region, ...]:
    """Return the memory that the views reach: from base to the end of the last slot, each base once."""
    ends: dict[tuple[int, int], int] = {}
    for view in views:
        first = view.runs[0][0]
        extent = view.runs[-1][0] + view.runs[-1][1] - first
        end = first + view.slot_stride_bytes * (layout.pools[view.pool].slot_count - 1) + extent
        ends[view.pool, first] = max(end, ends.get((view.pool, first), 0))
    return tuple([Region(pool, first, end - first) for (pool, first), end in sorted(ends.items())])


def _refused(buffer: Buffer, problem: str, remedy: str) -> Rejected:
    return Rejected(
        f"layer {buffer.layer}'s {buffer.role} {problem}",
        remedy,
        where=(Where(manager=buffer.manager, layer=buffer.layer, role=buffer.role),),
        supported=False,
    )
