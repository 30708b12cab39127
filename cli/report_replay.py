"""The report of ``kvsan replay`` for a person: every case that is not clean, then the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..ci.replay.messages import Outcome
from .replay_run import Entry, ReplayRun
from .wording import counted, human_bytes, printable_line

if TYPE_CHECKING:
    from rich.console import Console

CASES_SHOWN: Final = 20
"""Cases with something to say that the report prints; JSON has all."""
CLEAN_SHOWN: Final = 10
"""Clean cases are named up to this many."""
FINDINGS_SHOWN: Final = 2
"""Findings of one rule that the report prints of a case."""

MARKS: Final = {
    "clean": ("✓ clean", "green"),
    "findings": ("! findings", "bold yellow"),
    "rejected": ("✗ refused by its allocator", "bold red"),
    "refused": ("✗ not replayed", "bold red"),
    "crashed": ("✗ crashed", "bold red"),
    "bad-input": ("✗ no case", "bold red"),
}


def report_replay(console: Console, run: ReplayRun) -> None:
    """Print the report of a run."""
    talking = [entry for entry in run.entries if entry.outcome.status != "clean"]
    quiet = [entry for entry in run.entries if entry.outcome.status == "clean"]
    for entry in [*quiet[: CLEAN_SHOWN if len(quiet) <= CLEAN_SHOWN else 0], *talking[:CASES_SHOWN]]:
        _print_entry(console, entry)
    if len(talking) > CASES_SHOWN:
        console.print(f"and {counted(len(talking) - CASES_SHOWN, 'more case')} with something to say (--json has them)")
    for note in run.notes:
        console.print(f"! {printable_line(note)}", markup=False, style="bold yellow")
    _print_sum(console, run)


def _print_entry(console: Console, entry: Entry) -> None:
    outcome = entry.outcome
    mark, style = MARKS[outcome.status]
    by = "" if entry.allocator is None else f" ({printable_line(entry.allocator)})"
    console.print(f"{mark}", style=style, markup=False, end="  ")
    console.print(f"{printable_line(entry.case)}{by}", markup=False, soft_wrap=True)
    for line in _lines(outcome):
        console.print(f"    {printable_line(line)}", markup=False)


def _lines(outcome: Outcome) -> list[str]:
    """Return what there is to say about one case."""
    lines = [] if outcome.status != "clean" else [f"digest {outcome.digest}"]
    if outcome.rejection is not None:
        lines += [f"{outcome.rejection.rule}: {outcome.rejection.message}", f"remedy: {outcome.rejection.remedy}"]
    if outcome.message is not None and not outcome.findings:
        lines.append(outcome.message)
    shown: dict[str, int] = {}
    for finding in outcome.findings:
        shown[finding.rule] = shown.get(finding.rule, 0) + 1
        if shown[finding.rule] <= FINDINGS_SHOWN:
            lines.append(f"{finding.rule}: {finding.message}")
    more = sum([max(0, count - FINDINGS_SHOWN) for count in shown.values()])
    if more:
        lines.append(f"and {counted(more, 'more finding')} (--json has them)")
    return [*lines, *outcome.notes]


def _print_sum(console: Console, run: ReplayRun) -> None:
    counts = run.counts
    replayed = counts["clean"] + counts["findings"]
    size = sum([entry.outcome.size_bytes for entry in run.entries])
    kinds = ", ".join([f"{count:,} {status}" for status, count in counts.items() if count]) or "none"
    rate = f", {replayed / run.seconds:,.1f} per second" if run.seconds > 0 and replayed else ""
    versions = ", ".join([f"{name} {version}" for name, version in run.versions.items()])
    if run.interrupted:
        console.print(f"interrupted after {len(run.entries):,} of {run.total:,} cases", style="bold yellow")
    console.print(
        f"{counted(len(run.entries), 'case')} on {run.device}: {kinds}; "
        f"{human_bytes(size) or f'{size} B'} of pools in {run.seconds:.1f} s{rate}",
        markup=False,
    )
    if run.device_name is not None:
        console.print(f"{printable_line(run.device_name)}; {versions}", markup=False, style="dim")
