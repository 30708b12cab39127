"""The same seed, the same examples: in a checkout, in an installed wheel, with any number of workers.

Hypothesis mixes constants that it finds in the *local* modules of the running program into its draws, and what is
local differs between a checkout and a wheel. Campaigns run with that source of constants emptied. The hook is a private
name of Hypothesis: where it has moved, ``without_local_constants`` raises rather than let results differ silently (a
test guards it).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK_EXAMPLES = 500
"""Examples of one chunk: the unit that has a seed of its own, runs on one worker and is never cut short."""


def chunk_seed(seed: int, chunk: int) -> int:
    """Return the seed of one chunk: 64 bits that depend on both numbers alone."""
    return int.from_bytes(hashlib.blake2b(f"kvsan {seed} {chunk}".encode(), digest_size=8).digest(), "big")


def chunk_sizes(examples: int) -> list[int]:
    """Return the examples of each chunk of a campaign of ``examples``: full chunks, then what is left."""
    full, rest = divmod(examples, CHUNK_EXAMPLES)
    return [CHUNK_EXAMPLES] * full + ([rest] if rest else [])


@contextlib.contextmanager
def without_local_constants() -> Iterator[None]:
    """Run the body with Hypothesis's pool of local constants empty; raise ``RuntimeError`` if it cannot be.

    The cache of constants is another for as long: it remembers local ones from whatever was drawn in this process.
    """
    from hypothesis.internal.conjecture import providers

    for name in ("_get_local_constants", "Constants", "CONSTANTS_CACHE"):
        if not hasattr(providers, name):
            raise RuntimeError(
                f"this Hypothesis has no hypothesis.internal.conjecture.providers.{name}: campaigns would depend on "
                "how kvsan is installed; use another version of Hypothesis"
            )
    empty: Any = providers.Constants()  # type: ignore[attr-defined]
    original, cache = providers._get_local_constants, providers.CONSTANTS_CACHE
    providers._get_local_constants = lambda: empty
    providers.CONSTANTS_CACHE = type(cache)(getattr(cache, "max_size", 1024))
    try:
        yield
    finally:
        providers._get_local_constants, providers.CONSTANTS_CACHE = original, cache


@contextlib.contextmanager
def without_folder() -> Iterator[None]:
    """Run the body without a ``.hypothesis`` in the working directory: whatever Hypothesis writes is thrown away."""
    from hypothesis.configuration import set_hypothesis_home_dir, storage_directory

    before = storage_directory(intent_to_write=False).home_directory
    elsewhere = Path(tempfile.gettempdir()) / f"kvsan-hypothesis-{os.getpid()}-{secrets.token_hex(8)}"
    set_hypothesis_home_dir(elsewhere)  # made by Hypothesis, if ever it writes
    try:
        yield
    finally:
        set_hypothesis_home_dir(before)
        shutil.rmtree(elsewhere, ignore_errors=True)
