"""What the bytes of pools are before and after a transfer, digit by digit of their logical addresses.

A byte has room for one digit (base 256) of its address, so a transfer is carried out once for each digit. Bytes of the
source that hold nothing are ``VOID``, those of the destination ``CANARY``; where something is to arrive, it holds the
complement of that before, so that a byte that was not written is never taken for one that was.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...model.arithmetic import div_up
from ...sim.transfer.plan import Copy
from ...sim.transfer.proof import StagedRank, Staging, predicted, source_tags
from ...sim.transfer.truth import NOTHING, Tags

Octets: TypeAlias = NDArray[np.uint8]

VOID: Final = 0x3C
CANARY: Final = 0xA5
_BLOCK_BYTES: Final = 1 << 20


class SourcePool(msgspec.Struct, frozen=True):
    """A pool of a source's rank: the address of every ``granule`` bytes."""

    rank: int
    pool: int
    size_bytes: int
    tags: Tags
    granule: int

    def filled(self, digit: int) -> Octets:
        """Return the pool's bytes for one digit."""
        octets = np.full(self.size_bytes, VOID, dtype=np.uint8)
        _put(octets, self.tags, self.granule, digit, self.tags != NOTHING)
        return octets


class TargetPool(msgspec.Struct, frozen=True):
    """A pool of a destination's rank: what every ``granule`` bytes should hold, and what they will by prediction.

    ``written`` says which are written at all; what is written and holds no address came from a byte of no meaning.
    """

    rank: int
    pool: int
    size_bytes: int
    wanted: Tags
    held: Tags
    written: NDArray[np.bool_]
    granule: int

    def before(self, digit: int) -> Octets:
        """Return the pool's bytes before the transfer."""
        octets = np.full(self.size_bytes, CANARY, dtype=np.uint8)
        _put(octets, self.wanted, self.granule, digit, self.wanted != NOTHING, flip=0xFF)
        return octets

    def after(self, digit: int) -> Octets:
        """Return the bytes that the simulator predicts."""
        if np.array_equal(self.held, self.wanted):
            octets = np.full(self.size_bytes, CANARY, dtype=np.uint8)
            _put(octets, self.held, self.granule, digit, self.held != NOTHING)
            return octets
        octets = self.before(digit)
        blank = np.repeat(self.written & (self.held == NOTHING), self.granule)[: self.size_bytes]
        octets[blank] = VOID
        _put(octets, self.held, self.granule, digit, self.held != NOTHING)
        return octets


def source_pools(staging: Staging, rank: StagedRank) -> list[SourcePool]:
    """Return the pools of one rank of the source."""
    pools = []
    for number, pool in enumerate(rank.layout.pools):
        tags, granule = source_tags(staging, rank, number)
        pools.append(SourcePool(rank.rank, number, pool.size_bytes, tags, granule))
    return pools


def target_pools(staging: Staging, rank: StagedRank, copies: tuple[Copy, ...]) -> list[TargetPool]:
    """Return the pools of one rank of the destination, with what ``copies`` leave in them."""
    pools = []
    for number, pool in enumerate(rank.layout.pools):
        writes, granule = predicted(staging, rank, number, copies)
        written = writes.count > 0
        pools.append(TargetPool(rank.rank, number, pool.size_bytes, writes.wanted, writes.held, written, granule))
    return pools


def digits_of(staging: Staging) -> int:
    """Return how many digits the largest address has."""
    return div_up(staging.addresses.end.bit_length(), 8)


def _put(octets: Octets, tags: Tags, granule: int, digit: int, chosen: NDArray[np.bool_], *, flip: int = 0) -> None:
    """Write one digit of the addresses of ``chosen`` granules, a block at a time, so that little memory is taken."""
    inside = np.arange(granule, dtype=np.uint64)
    places = np.flatnonzero(chosen)
    whole, rest = divmod(octets.size, granule)
    cells = octets[: whole * granule].reshape(whole, granule)
    step = max(1, _BLOCK_BYTES // granule)  # floor: granules of a block
    for first in range(0, len(places), step):
        part = places[first : first + step]
        values = ((tags[part][:, None] + inside) >> np.uint64(8 * digit)).astype(np.uint8) ^ np.uint8(flip)
        if rest and part[-1] == whole:
            octets[whole * granule :] = values[-1, :rest]
            part, values = part[:-1], values[:-1]
        cells[part] = values
