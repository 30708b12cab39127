"""``fold``: a pool's bytes reduced to 64 bits in a way that any memory can do in parallel.

With the bytes as 4-byte words w(0), w(1), ... (little end first, the last one filled up with zeros), the fold is

    sum of (w(i) + 1) * (mix(i + 1) | 1)    modulo 2^64

where ``mix`` is the finalizer of SplitMix64. Every multiplier is odd, so a change of a single word always shows; it
depends on the place, so moved bytes show. It guards against faults, not against malice.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .views import Memory

_CHUNK_WORDS: Final = 1 << 12
"""Words folded at a time; the temporaries take some fifty bytes for each."""
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


def fold(memory: Memory, first_word: int = 0) -> int:
    """Return the fold of ``memory``, a part of a pool that begins with word ``first_word``.

    The folds of parts that begin at words and follow each other add up, modulo 2^64, to that of the whole.
    """
    total = 0
    for start in range(0, memory.size, 4 * _CHUNK_WORDS):
        chunk = memory[start : start + 4 * _CHUNK_WORDS]
        filled = np.zeros(-(-chunk.size // 4) * 4, dtype=np.uint8)  # floor: up, to whole words
        filled[: chunk.size] = chunk
        words = filled.view("<u4").astype(np.uint64)
        places = np.arange(words.size, dtype=np.uint64) + np.uint64(first_word + start // 4 + 1)  # floor: exact
        mixed = (places ^ (places >> np.uint64(30))) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
        mixed ^= mixed >> np.uint64(31)
        terms = (words + np.uint64(1)) * (mixed | np.uint64(1))
        total += int(terms.sum(dtype=np.uint64))
    return total % (1 << 64)
