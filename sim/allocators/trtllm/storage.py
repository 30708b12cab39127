"""TensorRT-LLM V2 storage: buffers of equal size coalesce into pools, pools of equal slot sizes share slots.

The rule that everything follows from: within one life cycle the only grouping key is the *expanded byte size* of a
buffer.
Role, dtype and layer are not part of it, so any two buffers of one size share a pool, interleaved in the order in
which the
layers register them. Pools are ordered by slot bytes, largest first; equal slot bytes keep the order of first
registration.

Life cycles whose tuples of slot sizes are equal share one pool group: the same memory, read by each in its own way.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ....model.rank import RankLayer
from .registration import Registration

LifeCycleKey: TypeAlias = tuple[bool, int | None, int]
"""(recurrent, window in tokens, sink blocks): layers with different keys never share a slot."""

RECURRENT_KEY: LifeCycleKey = (True, None, 0)


class StorageLayer(msgspec.Struct, frozen=True):
    """What one layer registers with one life cycle."""

    layer: RankLayer
    key: LifeCycleKey
    registrations: tuple[Registration, ...]


class Placement(msgspec.Struct, frozen=True):
    """Where a registration landed: ``offset_bytes`` into the slot of pool ``pool`` of life cycle ``life_cycle``."""

    layer: RankLayer
    registration: Registration
    life_cycle: int
    pool: int
    offset_bytes: int


class StoredLifeCycle(msgspec.Struct, frozen=True):
    """A life cycle's pools, largest slot first: each (page bytes, pages per slot). ``group`` is its pool group."""

    key: LifeCycleKey
    group: int
    pools: tuple[tuple[int, int], ...]

    @property
    def slot_sizes(self) -> tuple[int, ...]:
        """Slot bytes of each pool."""
        return tuple([size * count for size, count in self.pools])


class Storage(msgspec.Struct, frozen=True):
    """All life cycles and placements of one manager; ``groups`` are the slot bytes of each pool group's pools."""

    life_cycles: tuple[StoredLifeCycle, ...]
    groups: tuple[tuple[int, ...], ...]
    placements: tuple[Placement, ...]


def coalesce(layers: list[StorageLayer]) -> Storage:
    """Place every registration of ``layers``, in the order given."""
    counts: dict[LifeCycleKey, dict[int, int]] = {}
    walked = []
    for storage_layer in layers:
        pools = counts.setdefault(storage_layer.key, {})
        for registration in storage_layer.registrations:
            size = registration.size_bytes
            ordinal = pools.get(size, 0)
            pools[size] = ordinal + 1
            walked.append((storage_layer.layer, registration, storage_layer.key, ordinal * size))
    groups: dict[tuple[int, ...], int] = {}
    life_cycles = []
    places: dict[LifeCycleKey, tuple[int, dict[int, int]]] = {}
    for cycle, (key, pools) in enumerate(counts.items()):
        # sorted() is stable with reverse=True: equal slot bytes keep the order of registration
        ordered = tuple(sorted(pools.items(), key=lambda pool: pool[0] * pool[1], reverse=True))
        slot_sizes = tuple([size * count for size, count in ordered])
        group = groups.setdefault(slot_sizes, len(groups))
        life_cycles.append(StoredLifeCycle(key, group, ordered))
        places[key] = cycle, {size: index for index, (size, _) in enumerate(ordered)}
    placements = []
    for layer, registration, key, offset_bytes in walked:
        cycle, pool_of_size = places[key]
        placements.append(Placement(layer, registration, cycle, pool_of_size[registration.size_bytes], offset_bytes))
    return Storage(tuple(life_cycles), tuple(groups), tuple(placements))
