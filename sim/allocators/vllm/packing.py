"""Era 3's groups where blocks are outermost and pages have several sizes: pages lie side by side in a block.

Layers that always need the same blocks are a bucket. A bucket that has every page size equally often is balanced: a
pattern of one layer of each size, repeated. Buckets are split into groups so that blocks become narrow.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....model.arithmetic import div_up
from ...rejection import Rejected
from .layer_specs import CachedLayer, LayerSpec

Bucket = list[CachedLayer]


def uniform(specs: Sequence[LayerSpec], *, one_state_size: bool = True) -> bool:
    """Whether layers of ``specs`` always need the same blocks, whatever their pages: then they are one group.

    Those are states (of one page size, if ``one_state_size``, as era 3 asks), full attention (latent rows and index
    keys too), and layers of one window; but only latent ones where a latent one comes first.
    """
    first = specs[0]
    if any(spec.block_tokens != first.block_tokens for spec in specs):
        return False
    if first.kind == "recurrent":
        equal = len({spec.page_bytes for spec in specs}) == 1 or not one_state_size
        return equal and all(spec.kind == "recurrent" for spec in specs)
    kinds = ("latent",) if first.kind == "latent" and first.window is not None else ("attention", "latent", "index")
    return all(spec.kind in kinds and spec.window == first.window for spec in specs)


def pack_layers(layers: Sequence[CachedLayer]) -> list[Bucket]:
    """Return the groups of ``layers``; raise ``Rejected`` where the engine's split would leave layers out."""
    buckets = [_by_page(bucket) for bucket in _buckets(layers)]
    repeats = _repeats_per_group(buckets)
    widest = max(_narrowest_bytes(pages, repeats) for pages in buckets)
    groups: list[Bucket] = []
    for pages in buckets:
        count = _groups_for(pages, repeats)
        bucket = [layer for members in pages.values() for layer in members]
        if _splits_freely(pages, repeats):
            held = max(1, widest // _first(pages).page_bytes)  # floor: states that a block has room for
            count = max(count, div_up(len(bucket), held))
        if count == 1:
            groups.append(_in_order(bucket, layers))
            continue
        if not _balanced(pages):
            sizes = ", ".join(f"{len(members)} of {page} B" for page, members in pages.items())
            raise Rejected(
                f"a bucket of layers with pages of several sizes ({sizes}) is split by its least frequent size, and "
                "the other layers would be in no group",
                "use --allocator vllm-e3, with layers outermost, or pages of one size",
                supported=False,
            )
        patterns = list(zip(*pages.values(), strict=True))
        for number in range(count):
            groups.append([layer for pattern in patterns[number::count] for layer in pattern])
    return groups


def _buckets(layers: Sequence[CachedLayer]) -> list[Bucket]:
    """Return the layers by what they need, each in the first bucket that takes it."""
    buckets: list[Bucket] = []
    for layer in layers:
        for bucket in buckets:
            if uniform([*[member.spec for member in bucket], layer.spec]):
                bucket.append(layer)
                break
        else:
            buckets.append([layer])
    return buckets


def _by_page(bucket: Bucket) -> dict[int, Bucket]:
    pages: dict[int, Bucket] = {}
    for layer in bucket:
        pages.setdefault(layer.spec.page_bytes, []).append(layer)
    return pages


def _in_order(bucket: Bucket, layers: Sequence[CachedLayer]) -> Bucket:
    held = set(map(id, bucket))
    return [layer for layer in layers if id(layer) in held]


def _first(pages: dict[int, Bucket]) -> LayerSpec:
    return next(iter(pages.values()))[0].spec


def _balanced(pages: dict[int, Bucket]) -> bool:
    return len({len(members) for members in pages.values()}) == 1


def _most(pages: dict[int, Bucket]) -> int:
    return max(map(len, pages.values()))


def _repeats_per_group(buckets: Sequence[dict[int, Bucket]]) -> int | None:
    """Return how often a group repeats its pattern, None where no balanced bucket mixes page sizes.

    It is at least what the largest such bucket needs, and pads as little as may be; of equals, the most.
    """
    floor = max((_most(pages) for pages in buckets if _balanced(pages) and len(pages) > 1), default=0)
    if not floor:
        return None
    counts = [_most(pages) for pages in buckets if _balanced(pages)]
    return min(range(floor, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size))


def _groups_for(pages: dict[int, Bucket], repeats: int | None) -> int:
    return div_up(_most(pages), repeats) if repeats is not None and _balanced(pages) else 1


def _splits_freely(pages: dict[int, Bucket], repeats: int | None) -> bool:
    """Whether a bucket may be split down to one layer a group: states, and windows where nothing sets a pattern."""
    spec = _first(pages)
    return spec.kind == "recurrent" or (repeats is None and spec.window is not None)


def _narrowest_bytes(pages: dict[int, Bucket], repeats: int | None) -> int:
    """Return the bytes of a block that a bucket needs however it is split."""
    everything = sum(map(len, pages.values()))
    count = everything if _splits_freely(pages, repeats) else _groups_for(pages, repeats)
    return sum(div_up(len(members), count) * page for page, members in pages.items())
