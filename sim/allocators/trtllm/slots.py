"""TensorRT-LLM V2 slot counts: a byte quota is cut into physical chunks and split over the pool groups.

Chunks ("grains") are 2 to 32 MiB, by quota. All pools of a group have the same number of slots. The split starts from
the bytes of
a default batch (one request of 2049 tokens, 2048 of them in the past), gives every group at least one slot per life
cycle, and fills each group's last chunks. Proportions are exact fractions, rounded half to even as the engine rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from ....model.arithmetic import div_up
from ...rejection import Rejected
from .storage import Storage, StoredLifeCycle

MIN_GRAIN_BYTES: Final = 2 << 20
DEFAULT_CAPACITY_TOKENS: Final = 2049
DEFAULT_HISTORY_TOKENS: Final = 2048


def grain_bytes(quota_bytes: int) -> int:
    """Return the physical chunk size for a GPU quota: 2 MiB below 2 GiB, doubling with the quota up to 32 MiB."""
    times = quota_bytes // (MIN_GRAIN_BYTES * 512)  # floor: log2 is floored as well
    return MIN_GRAIN_BYTES << min(4, max(0, times.bit_length() - 1))


def slots_to_grains(slots: int, slot_sizes: Sequence[int], grain: int) -> int:
    """Return the chunks that ``slots`` slots of a group's pools need; each pool is a whole number of chunks."""
    return sum(div_up(slots * size, grain) for size in slot_sizes)


def grains_to_slots(grains: int, slot_sizes: Sequence[int], grain: int) -> tuple[int, int]:
    """Return the slots that a group gets out of ``grains`` chunks, and the chunks they use.

    Raises ``Rejected`` where the engine's own proportional split hands out more chunks than there are.
    """
    if grains < slots_to_grains(1, slot_sizes, grain):
        return 0, 0
    left, sizes_left = grains, sum(slot_sizes)
    slots: int | None = None
    for size in sorted(slot_sizes):
        share = max(div_up(size, grain), round(Fraction(left * size, sizes_left)))
        pool_slots = share * grain // size  # floor: only whole slots count
        slots = pool_slots if slots is None else min(slots, pool_slots)
        left -= share
        sizes_left -= size
    if left != 0:
        raise Rejected(
            f"splitting {grains} chunks of {grain} B over pools with slots of {', '.join(map(str, slot_sizes))} B "
            f"hands out {grains - left} chunks",
            "give a quota that leaves every pool more than one chunk per slot",
        )
    best = _largest_fitting(slots or 0, slot_sizes, grain, grains)
    return best, slots_to_grains(best, slot_sizes, grain)


def _largest_fitting(slots: int, slot_sizes: Sequence[int], grain: int, budget: int) -> int:
    """Return the largest slot count, from ``slots`` (which fits) up, whose chunks are at most ``budget``."""
    step = 1
    while slots_to_grains(slots + step, slot_sizes, grain) <= budget:
        slots += step
        step *= 2
    while step > 1:
        step >>= 1
        if slots_to_grains(slots + step, slot_sizes, grain) <= budget:
            slots += step
    return slots


def slots_for_quota(storage: Storage, quota_bytes: int, tokens_per_block: int) -> list[int]:
    """Return the slots of each pool group of ``storage`` under ``quota_bytes``; raise ``Rejected`` when it is too
    small."""
    grain = grain_bytes(quota_bytes)
    groups = storage.groups
    minimum = [0] * len(groups)
    weights = [0] * len(groups)
    for cycle in storage.life_cycles:
        minimum[cycle.group] += 1
        weights[cycle.group] += _default_batch_blocks(cycle, tokens_per_block) * sum(cycle.slot_sizes)
    needed = sum(slots_to_grains(minimum[group], groups[group], grain) for group in range(len(groups)))
    budget = quota_bytes // grain  # floor: a part of a chunk cannot be mapped
    if budget < needed:
        raise Rejected(
            f"a quota of {quota_bytes} B holds {budget} chunks of {grain} B, but one slot per life cycle needs "
            f"{needed}",
            f"give a quota of at least {needed * grain} B",
            supported=False,
        )
    counts = _split(groups, weights, minimum, budget, grain)
    return [
        _largest_fitting(count, sizes, grain, slots_to_grains(count, sizes, grain))
        for count, sizes in zip(counts, groups, strict=True)
    ]


def _split(
    groups: tuple[tuple[int, ...], ...], weights: list[int], minimum: list[int], budget: int, grain: int
) -> list[int]:
    """Split ``budget`` chunks over groups by weight; groups that would fall to their minimum are pinned there first."""
    pinned: dict[int, int] = {}
    while True:
        active = sorted(
            (group for group in range(len(groups)) if group not in pinned), key=lambda group: weights[group]
        )
        counts = dict(pinned)
        left, weight_left = budget, sum(weights[group] for group in active)
        for group in active:
            share = round(Fraction(left * weights[group], weight_left)) if weight_left else left
            counts[group], used = grains_to_slots(share, groups[group], grain)
            left -= used
            weight_left -= weights[group]
        starved = [group for group in active if counts[group] <= minimum[group]]
        if not starved:
            return [counts[group] for group in range(len(groups))]
        for group in starved:
            need = slots_to_grains(minimum[group], groups[group], grain)
            pinned[group], used = grains_to_slots(need, groups[group], grain)
            budget -= used
        if len(pinned) == len(groups):
            return [pinned[group] for group in range(len(groups))]
        if budget <= 0:
            raise Rejected(
                "no chunk is left for the remaining pool groups after the smallest groups got their minimum",
                "give a larger quota",
                supported=False,
            )


def _default_batch_blocks(cycle: StoredLifeCycle, tokens_per_block: int) -> int:
    """Return the slots that the default batch of one request holds in a life cycle."""
    recurrent, window, sink_blocks = cycle.key
    if recurrent:
        return 1
    blocks = div_up(DEFAULT_CAPACITY_TOKENS, tokens_per_block)
    if window is None:
        return blocks
    start = min(div_up(DEFAULT_HISTORY_TOKENS, tokens_per_block), sink_blocks)
    end = (DEFAULT_HISTORY_TOKENS + 1 - window) // tokens_per_block  # floor: only whole blocks go stale
    return max(1, blocks - max(0, end - start))
