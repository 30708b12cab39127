"""Rule ``peer``: two sides of a transfer agree on what is moved, and every byte of it arrives exactly once."""

from __future__ import annotations

from .rule import Rule

RULE = Rule(
    "peer",
    "both sides of a transfer agree on what is moved, and each byte arrives once",
    "Ranks that have read a prompt hand its cache to ranks that go on with it. What both register must be made of the "
    "same roles and bytes, decided from facts of the whole model; a mismatch is refused, never copied in part. Each "
    "byte of the destination's slots then comes from one sender, and no other byte is touched. The rule is asked of "
    "pairs (`kvsan peers`), not of a layout.",
    None,
)
