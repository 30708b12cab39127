"""What the bytes of a rank's pools stand for in the one cache that nobody has cut up.

Every logical byte has an address: that of its (layer, role), then position, head and byte of the head's row. A plane
that each rank keeps once (``SidePlane.scope``) belongs to no layer. The addresses come from the pages, the model and
the map of heads to ranks, and from nothing that a rank registers: so a plan is judged by something else than itself.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ...model.layers import AttentionLayer, Layer, RecurrentLayer, paged_part, recurrent_part
from ...model.parallel import rank_head_range
from ...model.spec import CacheSpec
from ..layout import CONV_STATE, KEY, KEY_SCALE, SSM_STATE, VALUE, VALUE_SCALE, Buffer, Layout
from ..page import Page
from .registering import conv_sections, once_per_rank

Tags: TypeAlias = npt.NDArray[np.uint64]
Name: TypeAlias = tuple[int, str]
"""A layer (-1: the rank's own) and a role."""
_Steps: TypeAlias = tuple[int, int, int, tuple[tuple[int, ...], ...]]

NOTHING = 0
"""The tag of a byte that holds no logical byte; logical addresses start at 1."""


class Plane(msgspec.Struct, frozen=True):
    """One role in one rank's pool: where it lies, and which logical bytes it holds.

    ``steps`` gives for every page axis but the last the logical bytes that each index is away from index 0, and
    ``first_byte`` where index 0 stands; both count from the (layer, role)'s own start. ``position_bytes`` is what all
    heads take of one position.
    """

    name: Name
    pool: int
    life_cycle: int
    offset_bytes: int
    slot_stride_bytes: int
    page: Page
    heads: int
    head_bytes: int
    block_positions: int
    first_byte: int
    steps: tuple[tuple[int, ...], ...]

    @property
    def position_bytes(self) -> int:
        """Logical bytes of one position (a token, or a request's state)."""
        return self.heads * self.head_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of the last axis, which follow each other in the page and in the cache."""
        return self.page.shape[-1] * self.page.format.container_bytes


def planes_of(layout: Layout) -> list[Plane]:
    """Return the planes of a rank; packed buffers give one for each part."""
    spec = layout.spec
    if spec is None:
        return []
    layers = spec.layers + spec.draft.layers
    known: dict[tuple[Layer, str, Page], _Steps] = {}
    planes = []
    for buffer in layout.buffers:
        recurrent = layout.life_cycles[buffer.life_cycle].recurrent
        whole = ((buffer.layer, buffer.role, 0, buffer.page),)
        parts = tuple([(part.layer, part.role, part.offset_bytes, part.page) for part in buffer.parts])
        for index, role, inside, page in parts or whole:
            layer = layers[index]
            key = (layer, role, page)
            steps = known.get(key)
            if steps is None:
                steps = known[key] = (_state_steps if recurrent else _page_steps)(spec, layer, role, page)
            name = (-1 if once_per_rank(layer, role) else index, role)
            positions = 1 if recurrent else spec.tokens_per_block
            planes.append(_plane(name, buffer, inside, page, positions, steps))
    return planes


def _plane(name: Name, buffer: Buffer, inside: int, page: Page, positions: int, how: _Steps) -> Plane:
    heads, head_bytes, first, steps = how
    offset = buffer.offset_bytes + inside
    stride = buffer.slot_stride_bytes
    return Plane(name, buffer.pool, buffer.life_cycle, offset, stride, page, heads, head_bytes, positions, first, steps)


def _page_steps(spec: CacheSpec, layer: Layer, role: str, page: Page) -> _Steps:
    """Return heads, bytes of a head's row, the first logical byte and the steps of a page of tokens."""
    sizes = dict(zip(page.axes, page.shape, strict=True))
    head_bytes = page.shape[-1] * page.format.container_bytes
    heads, first_head = sizes["head"], 0
    paged = paged_part(layer)
    if role in (KEY, VALUE, KEY_SCALE, VALUE_SCALE) and isinstance(paged, AttentionLayer):
        heads = paged.kv_heads
        ranks = spec.parallel.attention_tp
        tp_rank = spec.parallel.coordinates(spec.rank).tp_rank if ranks > 1 else 0
        first_head = rank_head_range(heads, ranks, tp_rank).start
    position = heads * head_bytes
    step_of = {"page": sizes["token"] * position, "token": position, "head": head_bytes}
    steps = tuple([_even(size, step_of[axis]) for axis, size in zip(page.axes[:-1], page.shape[:-1], strict=True)])
    return heads, head_bytes, first_head * head_bytes, steps


def _state_steps(spec: CacheSpec, layer: Layer, role: str, page: Page) -> _Steps:
    """Return the same of a state: heads are recurrent heads or channels, and a head's row is all that it keeps."""
    state = recurrent_part(layer)
    ranks = spec.parallel.state_tp
    rank = spec.parallel.coordinates(spec.rank).tp_rank if ranks > 1 else 0
    strides = page.stride_bytes[:-1]
    whole = math.prod(page.shape) * page.format.container_bytes
    if state is not None and role == SSM_STATE:
        held = page.shape[0]
        steps = tuple([_even(size, step) for size, step in zip(page.shape[:-1], strides, strict=True)])
        return state.heads, strides[0], rank * held * strides[0], steps
    if state is not None and role == CONV_STATE:
        channels = _channels(state, ranks, rank)
        return state.conv_channels, strides[0], 0, (tuple([channel * strides[0] for channel in channels]),)
    return 1, whole, 0, tuple([_even(size, step) for size, step in zip(page.shape[:-1], strides, strict=True)])


def _channels(layer: RecurrentLayer, ranks: int, rank: int) -> list[int]:
    """Return the model's channels that one rank keeps, in the order in which it keeps them."""
    channels: list[int] = []
    start = 0
    for _, size in conv_sections(layer):
        each = size // ranks  # floor: sections that do not divide are refused before
        channels += range(start + rank * each, start + (rank + 1) * each)
        start += size
    return channels


def _even(count: int, step: int) -> tuple[int, ...]:
    return tuple([index * step for index in range(count)])


class Addresses:
    """The logical address space that both sides share: where each (layer, role) starts.

    ``positions`` tokens and ``requests`` states of every plane have addresses, all of them below ``end``.
    """

    def __init__(self, planes: Sequence[Plane], positions: int, requests: int, recurrent: set[Name]) -> None:
        sizes: dict[Name, int] = {}
        self.shapes: dict[Name, tuple[int, int]] = {}
        for plane in planes:
            count = requests if plane.name in recurrent else positions
            sizes[plane.name] = max(sizes.get(plane.name, 0), count * plane.position_bytes)
            self.shapes.setdefault(plane.name, (plane.heads, plane.head_bytes))
        self.names = list(sizes)
        self.starts: list[int] = []
        start = 1 << 20  # far from NOTHING, and a multiple of every granule that is a power of two
        for name in self.names:
            self.starts.append(start)
            start += sizes[name]
        self.end = start
        self.start_of = dict(zip(self.names, self.starts, strict=True))

    def decode(self, address: int) -> tuple[Name, int, int, int]:
        """Return the (layer, role), position, head and byte of the head's row that an address stands for."""
        number = bisect.bisect_right(self.starts, address) - 1
        name = self.names[number]
        heads, head_bytes = self.shapes[name]
        row, byte = divmod(address - self.starts[number], head_bytes)
        position, head = divmod(row, heads)
        return name, position, head, byte


def tags_of(plane: Plane, addresses: Addresses, granule: int) -> Tags:
    """Return the logical address of every ``granule`` bytes of block 0's page."""
    start = addresses.start_of[plane.name] + plane.first_byte
    tags: Tags = np.arange(start, start + plane.row_bytes, granule, dtype=np.uint64)
    for steps in reversed(plane.steps):
        tags = np.asarray(steps, dtype=np.uint64).reshape(-1, *[1] * tags.ndim) + tags
    return tags


def sizes_of(plane: Plane) -> Iterator[int]:
    """Yield the numbers that a granule must divide, so that its bytes stay together."""
    yield plane.offset_bytes
    yield plane.slot_stride_bytes
    yield plane.row_bytes
    yield from plane.page.stride_bytes[:-1]
