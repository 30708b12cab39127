"""A pair in a few words: the model once, then each side."""

from __future__ import annotations

from ..spec_words import describe_spec
from .pair import Pair


def describe_pair(pair: Pair) -> list[str]:
    """Return the lines that describe ``pair``; what both sides have in common is told once."""
    sides = []
    for spec, dp, allocator in (
        (pair.source, pair.source_dp, pair.source_allocator),
        (pair.destination, pair.destination_dp, pair.destination_allocator),
    ):
        head, *layers = describe_spec(spec)
        if dp:
            head += f", attention-DP rank {dp}"
        if allocator is not None:
            head += f", {allocator}"
        sides.append((head, layers))
    (head, layers), (other, others) = sides
    lines = [f"source: {head}", f"destination: {other}"]
    return [*lines, *layers] if layers == others else [lines[0], *layers, lines[1], *others]
