"""Running caches that are wrong on purpose: each overrides one decision of a sound one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from ..cache import RunningCache

_HERE: Final = "kvsan.sim.cache.faulty"
_V1: Final = "trtllm-v1"
_V2: Final = "trtllm-v2"


class FaultyCache(NamedTuple):
    """A row of the table: ``base`` is the sound allocator whose layout and rules it runs, ``target`` is
    ``module:class``."""

    name: str
    base: str
    target: str
    summary: str


FAULTY_CACHES: Final[tuple[FaultyCache, ...]] = (
    FaultyCache(
        "fault:clear-pitch-is-span",
        _V2,
        f"{_HERE}.memory:ClearPitchIsSpan",
        "a fresh page is cleared at its slot number times its own size, although layers share the slot",
    ),
    FaultyCache(
        "fault:clear-span-is-slab",
        _V2,
        f"{_HERE}.memory:ClearSpanIsSlab",
        "a fresh page is cleared from its own start over a whole slot",
    ),
    FaultyCache(
        "fault:block-id-is-slot",
        _V1,
        f"{_HERE}.names:BlockIdIsSlot",
        "the page table is filled with block ids, which swaps with the host leave behind",
    ),
    FaultyCache(
        "fault:copy-two-planes",
        _V2,
        f"{_HERE}.memory:CopyTwoPlanes",
        "a partial block of a K-only cache is copied as if it had V too",
    ),
    FaultyCache(
        "fault:free-at-output",
        _V2,
        f"{_HERE}.lifetimes:FreeAtOutput",
        "pages are free at once although a dispatched step still uses them",
    ),
    FaultyCache(
        "fault:window-map-not-cleared",
        _V2,
        f"{_HERE}.names:WindowMapNotCleared",
        "window pages are freed through a map that recycled full pages leave behind",
    ),
    FaultyCache(
        "fault:short-chunk-writes-source",
        _V2,
        f"{_HERE}.states:ShortChunkWritesSource",
        "a chunk shorter than the convolution window stores its state in the snapshot it read",
    ),
    FaultyCache(
        "fault:one-host-table",
        _V2,
        f"{_HERE}.lifetimes:OneHostTable",
        "all steps in flight share one page table",
    ),
    FaultyCache(
        "fault:window-end-off-by-one",
        _V2,
        f"{_HERE}.lifetimes:WindowEndOffByOne",
        "a window's blocks are dropped one token too early",
    ),
    FaultyCache(
        "fault:partial-copy-forgets-scales",
        _V2,
        f"{_HERE}.memory:PartialCopyForgetsScales",
        "a partial block is copied without its block scales",
    ),
    FaultyCache(
        "fault:key-without-lora",
        _V2,
        f"{_HERE}.names:KeyWithoutLora",
        "the key of a published block leaves the reuse scope out",
    ),
    FaultyCache(
        "fault:hit-not-held",
        _V2,
        f"{_HERE}.lifetimes:HitNotHeld",
        "a prefix hit is held only after eviction made room",
    ),
    FaultyCache(
        "fault:padding-writes-slot-zero",
        _V2,
        f"{_HERE}.states:PaddingWritesSlotZero",
        "a padding row's state goes to slot 0",
    ),
    FaultyCache(
        "fault:partial-allocation-kept",
        _V2,
        f"{_HERE}.lifetimes:PartialAllocationKept",
        "an allocation that fails half way keeps the slots that it took",
    ),
    FaultyCache(
        "fault:published-before-written",
        _V2,
        f"{_HERE}.lifetimes:PublishedBeforeWritten",
        "blocks are published before the step that fills them has run",
    ),
    FaultyCache(
        "fault:snapshot-is-live-state",
        _V2,
        f"{_HERE}.states:SnapshotIsLiveState",
        "a recurrent state is published without a copy",
    ),
    FaultyCache(
        "fault:store-before-compute",
        _V2,
        f"{_HERE}.lifetimes:StoreBeforeCompute",
        "a suspended request goes to the host while its step is in flight",
    ),
    FaultyCache(
        "fault:stale-key-after-eviction",
        _V2,
        f"{_HERE}.lifetimes:StaleKeyAfterEviction",
        "an evicted page can still be found by its key",
    ),
    FaultyCache(
        "fault:rewind-leaves-table",
        _V2,
        f"{_HERE}.names:RewindLeavesTable",
        "rows of the page table are never shortened",
    ),
)
"""All faulty caches."""


def faulty_entry(name: str) -> FaultyCache | None:
    """Return the row of the faulty cache called ``name``, None where it is something else."""
    return next((entry for entry in FAULTY_CACHES if entry.name == name), None)


def faulty_cache(entry: FaultyCache) -> type[RunningCache]:
    """Return the class of a faulty cache."""
    module, _, name = entry.target.partition(":")
    found: type[RunningCache] = getattr(importlib.import_module(module), name)
    return found
