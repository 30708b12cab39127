"""What the consumers of a V2 cache are given, and the bytes that they reach with it.

Attention op: with its own page size ``page`` it reads

    layer pointer = pool pointer + mapping_offset * kv_factor * page
    K of slot s   = layer pointer + s * index_scale * page
    V of slot s   = K + kv_offset * page

and the block scales of NVFP4 by the same formula, the same mapping offset and the same index, only with the scale
page and the scale
pointer. One page table serves a life cycle, based at its first K page (the representative); when K pages of a life
cycle have several
sizes, every layer of the manager gets a table of its own, based at its pool, whose rows carry the layer's place.

Views (``get_buffers`` and its kin) are built at a buffer's own address. The dense K/V view counts rows of K/V pairs,
so a slot is a
whole number of rows only when ``kv_factor`` divides the pages per slot; the QSA, index, block-scale and state views
step by whole slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from ....model.arithmetic import InexactDivision, exact_div
from ...finding import Where
from ...layout import KEY, KEY_SCALE, SIDE_PLANES, VALUE, VALUE_SCALE, Access, Buffer, LifeCycle, PageTable, Pool
from ...rejection import Rejected
from .storage import Placement, Storage


class Stored(msgspec.Struct, frozen=True):
    """The storage of one manager as pools, life cycles and buffers; the k-th buffer is the k-th placement.

    ``first_*`` are the places of the first pool, life cycle and buffer in the whole layout.
    """

    manager: str
    first_pool: int
    first_life_cycle: int
    first_buffer: int
    storage: Storage
    pools: list[Pool]
    life_cycles: list[LifeCycle]
    buffers: list[Buffer]

    def placement(self, buffer: int) -> Placement:
        """Return the placement of a buffer, named by its place in the whole layout."""
        return self.storage.placements[buffer - self.first_buffer]

    def at(self, buffer: int) -> Buffer:
        """Return a buffer, named by its place in the whole layout."""
        return self.buffers[buffer - self.first_buffer]


class MappingQuestion(msgspec.Struct, frozen=True):
    """Which mapping offset a layer gets: ``distance_bytes`` from the representative's page, in units of ``pair_bytes``.

    ``buffer`` and ``representative`` are K pages or K scale pages, by their place in the layout; ``unit`` says which.
    """

    stored: Stored
    buffer: int
    representative: int
    distance_bytes: int
    pair_bytes: int
    unit: str


Mapping: TypeAlias = Callable[[MappingQuestion], int]


class Consumed(msgspec.Struct, frozen=True):
    """Page tables and accesses of one manager."""

    tables: list[PageTable]
    accesses: list[Access]


class PagedBuffers(msgspec.Struct):
    """The buffers of one layer with pages, by their place in the layout; -1 where the layer has none."""

    layer: int
    key: int = -1
    value: int = -1
    key_scale: int = -1
    value_scale: int = -1
    side_planes: bool = False


_FIELD_OF_ROLE = {KEY: "key", VALUE: "value", KEY_SCALE: "key_scale", VALUE_SCALE: "value_scale"}


def exact_mapping(question: MappingQuestion) -> int:
    """Return the mapping offset, or raise ``Rejected`` naming the buffer that broke the division and why it is
    there."""
    try:
        return exact_div(question.distance_bytes, question.pair_bytes, "mapping offset")
    except InexactDivision:
        raise explain_mapping(question) from None


def consumers_of(stored: Stored, mapping: Mapping) -> Consumed:
    """Return the tables and accesses of one manager; raise ``Rejected`` where no mapping offset exists."""
    by_cycle: dict[int, list[PagedBuffers]] = {}
    consumed = Consumed([], [])
    accesses = consumed.accesses
    current = PagedBuffers(-1)
    for index, buffer in enumerate(stored.buffers, start=stored.first_buffer):
        role = buffer.role
        if role == KEY:
            current = PagedBuffers(buffer.layer, key=index)
            by_cycle.setdefault(buffer.life_cycle, []).append(current)
        elif role in _FIELD_OF_ROLE:
            setattr(current, _FIELD_OF_ROLE[role], index)
        elif stored.life_cycles[buffer.life_cycle - stored.first_life_cycle].recurrent:
            # a state view steps by pages per slot times the state's size, which is the slot
            accesses.append(_by_slot("state-view", index, buffer))
        else:
            accesses += _plane_views(index, buffer)
            current.side_planes = current.side_planes or buffer.layer == current.layer
    _mark_packed_layers(stored, by_cycle)
    page_sizes = [{_kernel_page_bytes(stored, layer.key) for layer in layers} for layers in by_cycle.values()]
    per_layer = any(len(sizes) > 1 for sizes in page_sizes)
    for layers in by_cycle.values():
        if per_layer:
            consumed.tables.extend([_layer_table(stored, layer) for layer in layers])
        else:
            consumed.tables.append(_shared_table(stored, layers, mapping))
    layers_of_key = {layer.key: layer for layers in by_cycle.values() for layer in layers}
    for table in consumed.tables:
        for key, mapping_offset in zip(table.key_buffers, table.mapping_offsets, strict=True):
            accesses += op_accesses(stored, table, layers_of_key[key], mapping_offset)
            accesses += _kv_views(stored, table, layers_of_key[key])
    return consumed


def _mark_packed_layers(stored: Stored, by_cycle: dict[int, list[PagedBuffers]]) -> None:
    """Mark the layers whose side planes lie in a packed buffer of another layer."""
    packed = {part.layer for buffer in stored.buffers for part in buffer.parts}
    for layers in by_cycle.values() if packed else ():
        for layer in layers:
            layer.side_planes = layer.side_planes or layer.layer in packed


def _by_slot(consumer: str, index: int, buffer: Buffer) -> Access:
    """Return a view that starts at a buffer and steps by whole slots."""
    pitch = buffer.slot_stride_bytes
    return Access(consumer, index, buffer.pool, buffer.offset_bytes, pitch, buffer.slot_count, buffer.page)


def _plane_views(index: int, buffer: Buffer) -> list[Access]:
    """Return the views of a side plane, or of each plane in a packed buffer; they step by whole slots."""
    if buffer.role != SIDE_PLANES:
        return [_by_slot("side-plane-view", index, buffer)]
    pool, offset, pitch, count = buffer.pool, buffer.offset_bytes, buffer.slot_stride_bytes, buffer.slot_count
    return [
        Access("side-plane-view", index, pool, offset + part.offset_bytes, pitch, count, part.page, number)
        for number, part in enumerate(buffer.parts)
    ]


def _kernel_page_bytes(stored: Stored, buffer: int) -> int:
    """Return the size of one kernel page: the buffer's page over its expansion."""
    entry = stored.placement(buffer).registration
    return exact_div(entry.size_bytes, entry.expansion, "bytes of a kernel page")


def _pages_per_slot(stored: Stored, buffer: int) -> int:
    """Return how many buffers of this size one slot of its pool holds: the page-index scale."""
    held = stored.at(buffer)
    return exact_div(held.slot_stride_bytes, held.page_bytes, "page-index scale")


def _shared_table(stored: Stored, layers: list[PagedBuffers], mapping: Mapping) -> PageTable:
    """Return the one table of a life cycle, based at its representative's K page."""
    first = min(layers, key=lambda layer: (stored.at(layer.key).pool, stored.at(layer.key).offset_bytes))
    page_bytes = _kernel_page_bytes(stored, first.key)
    kv_factor = 1 if first.value < 0 else 2
    origin = stored.at(first.key).offset_bytes
    offsets = []
    for layer in layers:
        distance = stored.at(layer.key).offset_bytes - origin
        offset = mapping(MappingQuestion(stored, layer.key, first.key, distance, kv_factor * page_bytes, "K/V pages"))
        _check_scale_offset(stored, layer, first, offset, kv_factor, mapping)
        offsets.append(offset)
    return _table(stored, layers, first, tuple(offsets), per_layer=False)


def _check_scale_offset(
    stored: Stored, layer: PagedBuffers, first: PagedBuffers, offset: int, kv_factor: int, mapping: Mapping
) -> None:
    """Refuse a layer whose block scales would need another mapping offset than its data: the op applies one to both."""
    if layer.key_scale < 0 and first.key_scale < 0:
        return
    if layer.key_scale < 0 or first.key_scale < 0:
        raise Rejected(
            f"layer {layer.layer} and layer {first.layer} share one page table, and only one of them has block scales",
            "give all layers of a life cycle with equal K pages one KV format",
            where=(_where(stored, layer.key), _where(stored, first.key)),
        )
    pair = kv_factor * _kernel_page_bytes(stored, layer.key_scale)
    distance = stored.at(layer.key_scale).offset_bytes - stored.at(first.key_scale).offset_bytes
    found = mapping(MappingQuestion(stored, layer.key_scale, first.key_scale, distance, pair, "K/V scale pages"))
    if found != offset:
        raise Rejected(
            f"Layer {layer.layer}'s K scale page has mapping offset {found} and its K page {offset}; the attention op "
            "applies one offset to both",
            "give all layers of a life cycle with equal K pages one KV format",
            where=(_where(stored, layer.key), _where(stored, layer.key_scale)),
        )


def _layer_table(stored: Stored, layer: PagedBuffers) -> PageTable:
    """Return the table of a single layer: based at its pool, its rows start at the layer's own place in the slot."""
    if stored.placement(layer.key).registration.expansion != 1:
        raise Rejected(
            f"layer {layer.layer} has {stored.placement(layer.key).registration.expansion} kernel pages per block, "
            "which a page table per layer does not support",
            "drop the layer's tokens_per_block, or give all layers of a life cycle one K page size",
            where=(_where(stored, layer.key),),
            supported=False,
        )
    return _table(stored, [layer], layer, (0,), per_layer=True)


def _table(
    stored: Stored, layers: list[PagedBuffers], first: PagedBuffers, offsets: tuple[int, ...], *, per_layer: bool
) -> PageTable:
    """Return a page table based at ``first``'s K page, or at its pool with the layer's place in the rows."""
    key = stored.at(first.key)
    page_bytes = _kernel_page_bytes(stored, first.key)
    expansion = stored.placement(first.key).registration.expansion
    kv_offset = 0
    if first.value >= 0:
        kv_offset = exact_div(
            stored.at(first.value).offset_bytes - key.offset_bytes, page_bytes, "K to V distance in pages"
        )
    scales = stored.at(first.key_scale) if first.key_scale >= 0 else None
    return PageTable(
        manager=stored.manager,
        life_cycle=key.life_cycle,
        layers=tuple([layer.layer for layer in layers]),
        key_buffers=tuple([layer.key for layer in layers]),
        mapping_offsets=offsets,
        pool=key.pool,
        pointer_bytes=0 if per_layer else key.offset_bytes,
        page_bytes=page_bytes,
        index_scale=_pages_per_slot(stored, first.key),
        kv_factor=1 if first.value < 0 else 2,
        kv_offset=kv_offset,
        expansion=expansion,
        row_offset=exact_div(key.offset_bytes, page_bytes, "row offset of a layer") if per_layer else 0,
        scale_pool=None if scales is None else scales.pool,
        scale_pointer_bytes=0 if scales is None or per_layer else scales.offset_bytes,
        scale_page_bytes=0 if scales is None else exact_div(scales.page_bytes, expansion, "bytes of a scale page"),
        scale_index_scale=0 if scales is None else _pages_per_slot(stored, first.key_scale),
        missing_lanes=(0,) if first.value < 0 else (0, 0),
        missing_guard="length",
    )


def op_accesses(stored: Stored, table: PageTable, layer: PagedBuffers, mapping_offset: int) -> list[Access]:
    """Return what the attention op reaches for one layer: K, V and their block scales."""
    count = stored.at(layer.key).slot_count
    rows = table.index_scale * table.expansion
    start = mapping_offset * table.kv_factor + table.row_offset
    base = table.pointer_bytes + start * table.page_bytes
    pitch = rows * table.page_bytes
    reached = [Access("attention-op", layer.key, table.pool, base, pitch, count, stored.at(layer.key).page)]
    if layer.value >= 0:
        base += table.kv_offset * table.page_bytes
        reached.append(Access("attention-op", layer.value, table.pool, base, pitch, count, stored.at(layer.value).page))
    if layer.key_scale >= 0 and table.scale_pool is not None:
        page_bytes = table.scale_page_bytes
        base = table.scale_pointer_bytes + start * page_bytes
        pitch = rows * page_bytes
        for lane, index in ((0, layer.key_scale), (table.kv_offset, layer.value_scale)):
            if index >= 0:
                offset = base + lane * page_bytes
                reached.append(
                    Access("attention-op", index, table.scale_pool, offset, pitch, count, stored.at(index).page)
                )
    return reached


def _kv_views(stored: Stored, table: PageTable, layer: PagedBuffers) -> list[Access]:
    """Return the tensor views of one layer's K and V, and of its block scales where the manager gives them out."""
    key = stored.at(layer.key)
    block_scaled = layer.key_scale >= 0
    views = []
    if layer.side_planes and block_scaled:
        for index in (layer.key_scale, layer.value_scale):
            if index >= 0:
                views.append(_by_slot("block-scale-view", index, stored.at(index)))
    lanes = [(layer.key, key.offset_bytes)]
    if layer.value >= 0:
        lanes.append((layer.value, key.offset_bytes + key.page_bytes))  # the view asserts that V follows K
    whole_rows = table.index_scale % table.kv_factor == 0
    if whole_rows or (layer.side_planes and not block_scaled):
        for index, offset in lanes:
            views.append(Access("kv-view", index, key.pool, offset, key.slot_stride_bytes, key.slot_count, key.page))
        return views
    # rows of K/V pairs and an odd number of pages per slot: row = floor(slot * index_scale / 2), exact for even slots
    # alone
    page_bytes = key.page_bytes
    for index, offset in lanes:
        for parity in (0, 1):
            start = offset + parity * (table.index_scale - 1) * page_bytes
            count = (key.slot_count + 1 - parity) >> 1
            pitch = 2 * key.slot_stride_bytes
            if count:
                views.append(Access("kv-view", index, key.pool, start, pitch, count, key.page, -1, parity, 2))
    return views


def explain_mapping(question: MappingQuestion) -> Rejected:
    """Return the refusal of a layer whose K page does not start on a whole number of K/V pairs."""
    stored, buffer = question.stored, stored_at(question)
    scale = buffer.role == KEY_SCALE
    noun = "K scale page" if scale else "K page"
    message = (
        f"Layer {buffer.layer}'s {noun} starts {question.distance_bytes} B into its pool slot, which is not a "
        f"multiple of one layer's {question.unit} ({question.pair_bytes} B)"
    )
    where = [_where(stored, question.buffer)]
    remedy = "give the layers of this life cycle one geometry and one KV format"
    intruder = _intruder(question)
    if intruder >= 0:
        guest = stored.at(intruder)
        own = stored.placement(question.representative).registration
        entry = stored.placement(intruder).registration
        message += (
            f". Layer {guest.layer}'s {guest.role} page ({entry.arithmetic}) is as large as a {noun} "
            f"({own.arithmetic}), and the storage groups buffers by size alone, so it joined the "
            f"{question.unit.removesuffix(' pages')} pool: a slot holds "
            f"{_pages_per_slot(stored, question.representative)} pages instead of {_expected_pages(question)}, and "
            f"the offset is {question.distance_bytes}/{question.pair_bytes} of a pair"
        )
        where.append(_where(stored, intruder))
        remedy = (
            "choose a KV dtype, tensor-parallel size or index dim that makes the two sizes differ; tokens per block "
            "does not help, since both sizes grow with it"
        )
        if guest.role not in (SIDE_PLANES, KEY, VALUE, KEY_SCALE, VALUE_SCALE):
            remedy = "pack the side planes into one buffer (--allocator trtllm-v2-qsa-packed), or " + remedy
    return Rejected(message, remedy, where=tuple(where))


def stored_at(question: MappingQuestion) -> Buffer:
    """Return the buffer that a mapping question is about."""
    return question.stored.at(question.buffer)


def _pool_mates(question: MappingQuestion) -> list[int]:
    """Return the buffers of the representative's pool and life cycle, in slot order."""
    stored, first = question.stored, question.stored.at(question.representative)
    mates = [
        index
        for index, buffer in enumerate(stored.buffers, start=stored.first_buffer)
        if buffer.pool == first.pool and buffer.life_cycle == first.life_cycle
    ]
    return sorted(mates, key=lambda index: stored.at(index).offset_bytes)


def _expected_roles(question: MappingQuestion) -> tuple[str, str]:
    return (KEY_SCALE, VALUE_SCALE) if stored_at(question).role == KEY_SCALE else (KEY, VALUE)


def _intruder(question: MappingQuestion) -> int:
    """Return the first buffer in the representative's pool that is not one of its pair's roles; -1 if there is none."""
    roles = _expected_roles(question)
    return next((index for index in _pool_mates(question) if question.stored.at(index).role not in roles), -1)


def _expected_pages(question: MappingQuestion) -> int:
    """Return how many pages a slot of the pool would hold without the intruders."""
    roles = _expected_roles(question)
    return sum(question.stored.at(index).role in roles for index in _pool_mates(question))


def _where(stored: Stored, index: int) -> Where:
    buffer = stored.at(index)
    pool = stored.pools[buffer.pool - stored.first_pool]
    first = buffer.offset_bytes
    return Where(
        manager=stored.manager,
        layer=buffer.layer,
        role=buffer.role,
        group=pool.group,
        pool=pool.index,
        first_byte=first,
        last_byte=first + buffer.page_bytes - 1,
    )
