"""The report of all ranks: a line for each group of ranks that hold the same, and the details of what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..model.rank import stage_layers
from .check_run import StageExamination
from .examination import worst
from .report import VERDICTS, heading, print_header, print_notes, print_verdict
from .wording import compress, counted

LINES_SHOWN = 20
"""Lines of the table that the report prints."""
DETAILS_SHOWN = 3
"""Groups of ranks whose findings or refusal are printed in full."""


def report_ranks(console: Console, stages: Sequence[StageExamination]) -> None:
    """Print the report of all ranks."""
    decisive = worst([stage.examination for stage in stages])
    parallel = decisive.spec.parallel
    print_header(console, decisive, f"{parallel.name}, all {parallel.world_size} ranks")
    heading(console, "Ranks")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("ranks", "stage", "layers"):
        table.add_column(name)
    for name in ("pools", "bytes per slot", "side planes"):
        table.add_column(name, justify="right")
    table.add_column("verdict", no_wrap=True)
    lines = _alike(stages)
    for line in lines[:LINES_SHOWN]:
        table.add_row(*_row(line))
    console.print(Padding(table, (0, 0, 0, 2)))
    if len(lines) > LINES_SHOWN:
        console.print(Text(f"  and {counted(len(lines) - LINES_SHOWN, 'more line')} (--json has all ranks)", "dim"))
    print_notes(console, [note for stage in stages for note in stage.examination.notes])
    _print_details(console, stages)


def _alike(stages: Sequence[StageExamination]) -> list[list[StageExamination]]:
    """Return neighbours of which the table says the same as one line."""
    lines: list[list[StageExamination]] = []
    for stage in stages:
        if lines and _figures(lines[-1][0]) == _figures(stage):
            lines[-1].append(stage)
        else:
            lines.append([stage])
    return lines


def _figures(stage: StageExamination) -> tuple[str, str, str, str, str | None]:
    """Return pools, bytes per slot and side planes as the table shows them, and the verdict."""
    examination = stage.examination
    layout = examination.layout
    if layout is None:
        return "", "", "", examination.status, examination.message
    slot_bytes = sum(pool.slot_bytes for pool in layout.pools)
    planes_bytes = layout.side_planes_bytes
    return str(len(layout.pools)), str(slot_bytes), str(planes_bytes), examination.status, examination.message


def _row(line: Sequence[StageExamination]) -> list[str | Text]:
    spec = line[0].examination.spec
    ranks = [rank for stage in line for rank in stage.ranks]
    pp_ranks = sorted({spec.parallel.coordinates(stage.ranks[0]).pp_rank for stage in line})
    stages = stage_layers(spec)
    layers = [layer for pp_rank in pp_ranks for layer in stages[pp_rank]]
    verdict, style = VERDICTS[line[0].examination.status]
    return [compress(ranks), compress(pp_ranks), compress(layers), *_figures(line[0])[:3], Text(verdict, style)]


def _print_details(console: Console, stages: Sequence[StageExamination]) -> None:
    """Print what is wrong, each text once with the ranks that it holds for."""
    wrong: dict[str | None, list[StageExamination]] = {}
    for stage in stages:
        if stage.examination.status != "clean":
            wrong.setdefault(stage.examination.message, []).append(stage)
    if not wrong:
        print_verdict(console, stages[0].examination)
    for number, alike in enumerate(wrong.values()):
        if number == DETAILS_SHOWN:
            console.print(f"\nand {counted(len(wrong) - number, 'more problem')} (--json has them, or --rank N)")
            break
        ranks = sorted(rank for stage in alike for rank in stage.ranks)
        heading(console, f"{'Rank' if len(ranks) == 1 else 'Ranks'} {compress(ranks)}")
        print_verdict(console, alike[0].examination)
