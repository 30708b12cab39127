"""How the report words numbers: layers and offsets compressed, sizes with units, text on one printable line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

MAX_LINE_CHARACTERS: Final = 600
"""Longest error line; what is longer loses its middle, since the file stands first and the way out last."""

_UNITS: Final = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))


def printable_line(text: str) -> str:
    """Return ``text`` on one line without control characters, its middle left out when it is long."""
    flat = " ".join(filter(None, map(str.strip, text.splitlines())))
    clean = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in flat)
    if len(clean) <= MAX_LINE_CHARACTERS:
        return clean
    half = (MAX_LINE_CHARACTERS - 5) >> 1
    return f"{clean[:half]} ... {clean[-half:]}"


def printable_path(path: object) -> str:
    """Return a path whole, to be copied, with escapes in place of what does not print."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in str(path))


def human_bytes(size_bytes: int) -> str:
    """Return a size in the largest fitting unit, such as ``768 KiB`` or ``96.3 KiB``; empty below 1 KiB.

    >>> human_bytes(786432), human_bytes(98688), human_bytes(384)
    ('768 KiB', '96.3 KiB', '')
    """
    for unit, shift in _UNITS:
        whole, rest = divmod(size_bytes, 1 << shift)
        if whole:
            tenths = (rest * 10) >> shift
            return f"{whole} {unit}" if not rest else f"{whole}.{tenths} {unit}"
    return ""


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ``numbers``, ascending, as runs of consecutive ones: (first, last).

    >>> runs_of([0, 1, 2, 4, 5])
    [(0, 2), (4, 5)]
    """
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def compress(numbers: Sequence[int]) -> str:
    """Return ascending ``numbers`` in a few words, however many there are.

    >>> compress([3, 7, 11, 15]), compress(range(36)), compress([0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14])
    ('3, 7, …, 15', '0–35', '0–2, 4–6, …, 12–14')
    """
    words = [str(first) if first == last else f"{first}–{last}" for first, last in runs_of(numbers)]
    return ", ".join(words if len(words) <= 3 else [*words[:2], "…", words[-1]])


def compress_layers(layers: Sequence[int]) -> str:
    """Return layer numbers as the report names them; where not each is named, with their count.

    >>> compress_layers([3]), compress_layers([3, 7]), compress_layers(range(3, 48, 4))
    ('layer 3', 'layers 3, 7', 'layers 3, 7, …, 47 (12 layers)')
    """
    ordered = sorted(set(layers))
    if len(ordered) == 1:
        return f"layer {ordered[0]}"
    words = compress(ordered)
    return f"layers {words}" if len(words.split(", ")) == len(ordered) else f"layers {words} ({len(ordered)} layers)"


def counted(count: int, noun: str) -> str:
    """Return ``1 layer``, ``2 layers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
