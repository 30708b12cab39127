"""Which values a number of a spec may be lowered to, simplest first.

Besides the usual ones (the lowest, halves, one less, divisors) there are the values seen elsewhere in the spec and the
*solved* ones: a dim that makes one page as large as another, since faults of size live where two sizes meet.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...model.formats import SCALE_BLOCK_ELEMENTS
from ...model.layers import AttentionLayer, LatentLayer, Layer, SidePlane, paged_part
from ...model.parallel import rank_heads
from ...model.spec import CacheSpec
from ..simplicity import dim_rank

_NEAR_DIMS = (128, 64, 256, 32, 512, 16, 1024)
_MAX_SEEN = 24


def counts_near(value: int, low: int, seen: Iterable[int] = ()) -> list[int]:
    """Return other values for a count, ascending: below it on many scales, and a few above it."""
    found = {low, low + 1, low + 2, value - 1, value + 1, 2 * value, *seen}
    found.update(value // divisor for divisor in (2, 3, 4, 8))  # floor: candidates, not sizes
    found.update(value - (value >> shift) for shift in range(1, value.bit_length()))
    return sorted(number for number in found if number >= low and number != value)


def dims_near(value: int, seen: Iterable[int] = ()) -> list[int]:
    """Return other values for a dim, simplest first."""
    found = {1, value - 1, value + 1, 2 * value, *_NEAR_DIMS, *seen}
    found.update(value // divisor for divisor in (2, 3, 4, 8))  # floor: candidates, not sizes
    return sorted((number for number in found if number >= 1 and number != value), key=dim_rank)


def distinct_layers(spec: CacheSpec) -> list[Layer]:
    """Return the different layers, draft layers included, in order of first use."""
    return list(dict.fromkeys(spec.layers + spec.draft.layers))


def seen_dims(layers: list[Layer]) -> list[int]:
    """Return the head counts and dims that occur in ``layers``, at most a few dozen."""
    found: dict[int, None] = {}
    for layer in layers[:_MAX_SEEN]:
        paged = paged_part(layer)
        if isinstance(paged, AttentionLayer):
            found.update(dict.fromkeys((paged.kv_heads, paged.head_dim)))
        elif isinstance(paged, LatentLayer):
            found[paged.latent_dim] = None
        for plane in paged.side_planes if paged else ():
            found.update(dict.fromkeys((plane.dim, plane.heads)))
    return list(found)[:_MAX_SEEN]


def solved_plane_dims(plane: SidePlane, layers: list[Layer], spec: CacheSpec) -> list[int]:
    """Return the dims with which a side plane is as large as a K page or K scale page of some layer."""
    found = set()
    for layer in layers[:_MAX_SEEN]:
        paged = paged_part(layer)
        if isinstance(paged, AttentionLayer):
            kv_format = paged.kv_format or spec.kv_format
            elements = rank_heads(paged.kv_heads, spec.parallel.attention_tp) * paged.head_dim
            row_bits = plane.heads * plane.format.bits
            for bits in (elements * kv_format.bits, _scale_bits(elements) if kv_format.block_scaled else 0):
                if bits and bits % row_bits == 0:
                    found.add(bits // row_bits)  # floor: exact, as just asked
    return sorted(found)


def solved_head_dims(layer: AttentionLayer, layers: list[Layer], spec: CacheSpec) -> list[int]:
    """Return the head dims with which a layer's K page, or its scales, is as large as some side plane."""
    found = set()
    kv_format = layer.kv_format or spec.kv_format
    heads = rank_heads(layer.kv_heads, spec.parallel.attention_tp)
    for other in layers[:_MAX_SEEN]:
        paged = paged_part(other)
        for plane in paged.side_planes if paged else ():
            bits = 8 * plane.token_bytes
            if bits % (heads * kv_format.bits) == 0:
                found.add(bits // (heads * kv_format.bits))  # floor: exact, as just asked
            elements = SCALE_BLOCK_ELEMENTS * plane.token_bytes
            if kv_format.block_scaled and elements % heads == 0:
                found.add(elements // heads)  # floor: exact, as just asked
    return sorted(found)


def _scale_bits(elements: int) -> int:
    return 8 * elements // SCALE_BLOCK_ELEMENTS  # floor: a remainder is refused elsewhere
