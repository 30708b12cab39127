"""The text report of ``kvsan replay``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .replay_run import Replay, summary
from .wording import printable_line

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_FINDINGS = 4
"""Findings that are shown of each case; the JSON has them all."""


def report_replays(console: Console, replays: list[Replay], document: dict[str, Any]) -> None:
    """Print each case that is not clean, each clean one on a line where they are few, and a summary."""
    few = len(replays) <= 40
    for replay in replays:
        if replay.status == "clean" and not few:
            continue
        sign = "✓" if replay.status == "clean" else "✗"
        words = [f"{sign} {printable_line(replay.case)}: {replay.status}"]
        if replay.digest is not None:
            words.append(f"{replay.bytes:,} B, digest {replay.digest}")
        console.print(", ".join(words), markup=False, soft_wrap=True)
        if replay.message is not None:
            console.print(f"    {printable_line(replay.message)}", markup=False)
        shown = replay.findings[:SHOWN_FINDINGS] if replay.status == "findings" else ()
        for finding in shown:
            console.print(f"    {finding.rule}: {printable_line(finding.message)}", markup=False)
        if replay.status == "findings" and len(replay.findings) > len(shown):
            console.print(f"    and {len(replay.findings) - len(shown)} more", markup=False)
        for note in replay.notes:
            if "fewer slots" in note or "operations" in note:
                console.print(f"    {printable_line(note)}", markup=False)
    counts = summary(replays)
    parts = [f"{count:,} {status}" for status, count in sorted(counts.items())]
    total = sum(replay.bytes for replay in replays)
    console.print(
        f"\n{len(replays):,} cases on {document['device']} ({document['device_name']}) in {document['seconds']:.1f} s: "
        f"{', '.join(parts)}; {total:,} B laid out",
        markup=False,
    )
    if document["interrupted"]:
        console.print("interrupted: cases that are missing here were not replayed", markup=False)
