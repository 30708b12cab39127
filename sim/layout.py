"""``Layout``: an allocator's answer, where every byte of every cache lies and how its consumers find it.

The byte of element ``(i, j, ...)`` of a buffer in slot ``s`` of its pool is

    offset_bytes + s * slot_stride_bytes + i * page.stride_bytes[0] + j * page.stride_bytes[1] + ...

from the pool's base. This covers a page inside one contiguous slot (slot stride = slot size), pools that keep the
layers
apart (slot stride = page), pages scattered over their slot, and several groups that overlay the same pool.

**Which cells may be live together** decides what an overlap means. A *life cycle* is a set of buffers that share slot
ids:
holding slot ``s`` means holding all of its buffers there. Life cycles of one *group* draw their ids from one
allocator, so an
id is held by one of them at a time: their cells may share bytes at equal slot ids, and only there. Life cycles of
different
groups hold their slots independently.
"""

from __future__ import annotations

import msgspec

from ..model.spec import CacheSpec
from .page import Page


class Pool(msgspec.Struct, frozen=True):
    """One raw allocation.

    ``slot_bytes`` is what one slot owns in it, of which ``padding_bytes`` hold nothing on purpose;
    ``alignment_bytes`` is what the
    base is a multiple of.
    """

    manager: str
    group: int
    index: int
    slot_count: int
    slot_bytes: int
    size_bytes: int
    alignment_bytes: int = 1
    padding_bytes: int = 0


class LifeCycle(msgspec.Struct, frozen=True):
    """Buffers that share slot ids. ``group`` names the allocator of the ids, within ``manager``.

    ``recurrent`` life cycles hold a slot per request, the others a slot per block of tokens; ``window`` and
    ``sink_blocks`` are the
    attention window in tokens and the blocks kept before it.
    """

    manager: str
    group: int
    recurrent: bool = False
    window: int | None = None
    sink_blocks: int = 0


class Part(msgspec.Struct, frozen=True, gc=False):
    """A named piece of a buffer that packs several planes: ``page`` lies ``offset_bytes`` into the buffer's page."""

    layer: int
    role: str
    offset_bytes: int
    page: Page


class Buffer(msgspec.Struct, frozen=True, gc=False):
    """The storage of one role of one layer in every slot of a pool.

    ``layer`` is the global layer index, ``pool`` and ``life_cycle`` index the layout's tuples. ``page_bytes`` is what
    the buffer
    takes of a slot. ``parts`` names the planes inside a packed buffer; where there are any, they are what is stored.
    """

    manager: str
    layer: int
    role: str
    life_cycle: int
    pool: int
    offset_bytes: int
    slot_stride_bytes: int
    slot_count: int
    page_bytes: int
    page: Page
    parts: tuple[Part, ...] = ()


class PageTable(msgspec.Struct, frozen=True):
    """What a paged consumer is given to find the pages of some layers of one life cycle.

    The consumer multiplies a slot id by ``index_scale`` (pages per slot), adds ``kv_offset`` for V, and starts each
    layer at
    ``mapping_offset`` K/V pairs past the pointer. ``key_buffers`` and ``mapping_offsets`` run over ``layers``.
    ``pointer_bytes`` is
    the pointer's place in pool ``pool``; ``scale_*`` are those of the block scales, None without them. ``row_offset``
    is added to the row itself
    (tables that serve a single layer). ``missing_lanes`` are the indices a missing page gets in the K and V lanes, and
    ``missing_guard`` what keeps consumers from them: ``length`` (masked by the sequence length), ``negative``
    (negative indices
    are skipped), or None. Empty lanes: the table has no entry for a missing page.
    """

    manager: str
    life_cycle: int
    layers: tuple[int, ...]
    key_buffers: tuple[int, ...]
    mapping_offsets: tuple[int, ...]
    pool: int
    pointer_bytes: int
    page_bytes: int
    index_scale: int
    kv_factor: int
    kv_offset: int
    expansion: int = 1
    row_offset: int = 0
    scale_pool: int | None = None
    scale_pointer_bytes: int = 0
    scale_page_bytes: int = 0
    scale_index_scale: int = 0
    missing_lanes: tuple[int, ...] = ()
    missing_guard: str | None = None


class Access(msgspec.Struct, frozen=True, gc=False):
    """The bytes that one consumer reaches for one role, by its own formula or view.

    The consumer believes that it sees buffer ``buffer`` (its part ``part`` where that is not negative). Its k-th cell
    stands for
    slot ``first_slot + k * slot_step`` and starts at ``offset_bytes + k * pitch_bytes`` in pool ``pool``; ``page`` is
    the page as
    the consumer addresses it.
    """

    consumer: str
    buffer: int
    pool: int
    offset_bytes: int
    pitch_bytes: int
    cell_count: int
    page: Page
    part: int = -1
    first_slot: int = 0
    slot_step: int = 1


class HeadMap(msgspec.Struct, frozen=True):
    """Which of a layer's ``heads`` KV heads each tensor-parallel rank stores, as (first, one past last), for
    ``layers``.

    ``rank_heads`` is the number of heads that the storage has room for on each rank.
    """

    manager: str
    layers: tuple[int, ...]
    heads: int
    rank_heads: int
    ranges: tuple[tuple[int, int], ...]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """An allocator's whole answer for one rank; see the module's text for the address of a byte.

    ``stages`` are the global layers that the allocator gives to each pipeline stage, ``block_bytes`` the allocator's
    own estimate of the
    bytes that one block of tokens takes, by manager (recurrent states not counted). ``notes`` are sentences for the
    report.
    ``allocator`` and ``spec`` say where the layout comes from; a layout built from raw views has no spec, and the
    rules that
    need one stay silent.
    """

    allocator: str
    pools: tuple[Pool, ...]
    life_cycles: tuple[LifeCycle, ...]
    buffers: tuple[Buffer, ...]
    tables: tuple[PageTable, ...] = ()
    accesses: tuple[Access, ...] = ()
    head_maps: tuple[HeadMap, ...] = ()
    stages: tuple[tuple[int, ...], ...] = ()
    block_bytes: tuple[tuple[str, int], ...] = ()
    spec: CacheSpec | None = None
    notes: tuple[str, ...] = ()

    @property
    def side_planes_bytes(self) -> int:
        """Bytes per slot of the packed side planes, over all managers; 0 where nothing is packed."""
        return sum(buffer.page_bytes for buffer in self.buffers if buffer.role == SIDE_PLANES)


KEY = "key"
VALUE = "value"
KEY_SCALE = "key_block_scale"
VALUE_SCALE = "value_block_scale"
SIDE_PLANES = "side_planes"
SSM_STATE = "ssm_state"
CONV_STATE = "conv_state"
