"""The report of a pair, and of a matrix of pairs, for a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..sim.finding import Finding
from ..sim.transfer.planning import bytes_moved
from .peers_replay import ReplayedPair
from .peers_run import JudgedPair, Side
from .report import heading, print_notes, print_rejection
from .wording import counted, human_bytes, printable_line

FINDINGS_SHOWN = 6
"""Findings that the report prints."""

_VERDICTS = {
    "clean": ("✓ clean", "bold green"),
    "findings": ("! findings", "bold yellow"),
    "refused": ("✗ refused", "bold red"),
    "rejected": ("✗ rejected", "bold red"),
}
_MEANINGS = {
    "clean": "every byte arrives once",
    "findings": "bytes arrive wrong",
    "refused": "the two sides do not fit",
    "rejected": "an allocator refuses one side",
}


def report_pair(console: Console, judged: JudgedPair, moved: ReplayedPair | None = None) -> None:
    """Print who sends to whom, what is moved, the verdict, and what memory said where it was asked."""
    verdict = judged.verdict
    word, style = _VERDICTS[verdict.status]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    table.add_row("model", Text(printable_line(judged.source.spec.model) or "unnamed", "bold"))
    table.add_row("source", Text(_side_words(judged.source)))
    table.add_row("destination", Text(_side_words(judged.destination)))
    table.add_row("verdict", Text(f"{word}: {_MEANINGS[verdict.status]}", style))
    console.print(table)
    if verdict.plan.copies:
        _print_plan(console, judged)
    print_notes(console, judged.source.inferred)
    if verdict.rejection is not None:
        heading(console, f"the {verdict.side} is rejected by its allocator")
        print_rejection(console, verdict.rejection)
    _print_findings(console, verdict.findings)
    if moved is not None:
        _print_replay(console, moved)


def _print_replay(console: Console, moved: ReplayedPair) -> None:
    count = "1 process" if moved.processes == 1 else f"{moved.processes} processes"
    where = f"{count}, {moved.device}" if moved.processes else printable_line(moved.device)
    heading(console, f"replayed on real memory: {where}")
    _print_findings(console, moved.findings, titled=False)
    if not moved.findings:
        probed = f", {moved.rows_probed:,} rows by probe kernels" if moved.rows_probed else ""
        text = f"every byte of {moved.memory_bytes:,} B is as the simulator says{probed}"
        console.print(f"  {text}", markup=False)
    if moved.seconds:
        text = f"{moved.bytes:,} B in {moved.seconds * 1000:.2f} ms, {moved.ratio:.2f} times the speed of a plain copy"
        console.print(f"  {text}", markup=False)


def _side_words(side: Side) -> str:
    spec = side.spec
    words = f"{spec.parallel.name}, KV {spec.kv_format.value} {spec.consumer.kv_layout}"
    words += f", {counted(spec.tokens_per_block, 'token')} per block, {printable_line(side.allocator.name)}"
    if spec.parallel.attention_dp:
        words += f", attention-DP rank {side.dp}"
    return words


def _print_plan(console: Console, judged: JudgedPair) -> None:
    """Print what moves between each two ranks, for one block of the longer side and one state."""
    copies = judged.verdict.plan.copies
    heading(console, "moved, for each block and each state")
    between: dict[tuple[int, int], list[int]] = {}
    for copy in copies:
        tally = between.setdefault((copy.source_rank, copy.destination_rank), [0, 0])
        tally[0] += 1
        tally[1] += copy.size_bytes
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("from rank", "to rank", "copies", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for (source, destination), (count, size) in sorted(between.items()):
        table.add_row(str(source), str(destination), str(count), str(size))
    console.print(Padding(table, (0, 0, 0, 2)))
    size = bytes_moved(judged.verdict.plan)
    short = f" ({human_bytes(size)})" if human_bytes(size) else ""
    console.print(f"  {len(copies)} {'copy' if len(copies) == 1 else 'copies'}, {size} B in all{short}", markup=False)


def report_pairs(console: Console, pairs: Sequence[JudgedPair]) -> None:
    """Print a grid for each KV dtype, sources down and destinations across, and below it each reason once."""
    spec = pairs[0].source.spec
    tally = {status: sum(each.verdict.status == status for each in pairs) for status in _VERDICTS}
    said = ", ".join(f"{count} {status}" for status, count in tally.items() if count)
    name = printable_line(spec.model) or "unnamed"
    console.print(Text.assemble((name, "bold"), f", {counted(len(pairs), 'pair')}: {said}"))
    for kv_dtype in dict.fromkeys(each.source.spec.kv_format.value for each in pairs):
        rows = [each for each in pairs if each.source.spec.kv_format.value == kv_dtype]
        heading(console, f"KV {kv_dtype}, {printable_line(rows[0].source.allocator.name)}")
        console.print(_grid(rows))
    reasons: dict[str, list[JudgedPair]] = {}
    for each in pairs:
        if each.message is not None:
            reasons.setdefault(each.message, []).append(each)
    for alike in reasons.values():
        first = alike[0]
        listed = [
            f"{each.source.spec.kv_format.value} {each.source.spec.parallel.name} -> "
            f"{each.destination.spec.parallel.name}"
            for each in alike[:4]
        ]
        more = f" and {len(alike) - 4} more" if len(alike) > 4 else ""
        heading(console, f"{_VERDICTS[first.verdict.status][0]}: {', '.join(listed)}{more}")
        if first.verdict.rejection is not None:
            print_rejection(console, first.verdict.rejection)
        _print_findings(console, first.verdict.findings[:1], titled=False)


def _grid(rows: Sequence[JudgedPair]) -> Padding:
    names = list(dict.fromkeys(each.destination.spec.parallel.name for each in rows))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("from", no_wrap=True)
    for name in names:
        table.add_column(f"to {name}", no_wrap=True)
    for source in dict.fromkeys(each.source.spec.parallel.name for each in rows):
        marks = [_VERDICTS[each.verdict.status] for each in rows if each.source.spec.parallel.name == source]
        table.add_row(source, *[Text(word, style) for word, style in marks])
    return Padding(table, (0, 0, 0, 2))


def _print_findings(console: Console, findings: Sequence[Finding], *, titled: bool = True) -> None:
    if findings and titled:
        heading(console, f"{counted(len(findings), 'reason')}")
    for finding in findings[:FINDINGS_SHOWN]:
        console.print(
            Padding(Text.assemble((finding.rule, "bold"), f": {printable_line(finding.message)}"), (0, 0, 0, 2))
        )
        console.print(Padding(Text(f"way out: {printable_line(finding.remedy)}", "dim"), (0, 0, 0, 4)))
    if len(findings) > FINDINGS_SHOWN:
        console.print(f"  and {len(findings) - FINDINGS_SHOWN} more (--json names them all)", markup=False)
