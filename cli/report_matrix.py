"""The report of a matrix: a grid of verdicts, and below it each refusal and finding once, with cause and remedy."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .matrix_run import JudgedCell
from .report import VERDICTS, heading, print_notes, print_rejection, print_verdict
from .wording import counted, printable_line

MIN_COLUMN_CHARACTERS = 11
"""Width of a verdict with the space around it."""


def report_matrix(console: Console, cells: Sequence[JudgedCell]) -> None:
    """Print the grid and what it stands for."""
    spec = cells[0].decisive.spec
    name = printable_line(spec.model) or "unnamed"
    console.print(Text.assemble((name, "bold"), f", {counted(len(spec.layers), 'layer')}, {_tally(cells)}"))
    layouts = list(dict.fromkeys(judged.cell.layout for judged in cells))
    rows: dict[tuple[str, str], dict[str, JudgedCell]] = {}
    for judged in cells:
        rows.setdefault((judged.cell.allocator, judged.cell.kv_dtype), {})[judged.cell.layout] = judged
    head = max(len(dtype) for _, dtype in rows) + 4
    widest = max(MIN_COLUMN_CHARACTERS, 2 + max(map(len, layouts)))
    columns = max(1, (console.width - head) // widest)
    for allocator in dict.fromkeys(allocator for allocator, _ in rows):
        heading(console, printable_line(allocator))
        by_dtype = {dtype: row for (name, dtype), row in rows.items() if name == allocator}
        for first in range(0, len(layouts), columns):
            console.print(_grid(by_dtype, layouts[first : first + columns], widest - 2))
    print_notes(console, [note for judged in cells for note in judged.decisive.inferred])
    _print_causes(console, cells)


def _tally(cells: Sequence[JudgedCell]) -> str:
    counts = {status: sum(judged.cell.status == status for judged in cells) for status in VERDICTS}
    words = {"clean": "clean", "findings": "with findings", "rejected": "refused"}
    return f"{counted(len(cells), 'cell')}: " + ", ".join(f"{counts[key]} {words[key]}" for key in words if counts[key])


def _grid(by_dtype: dict[str, dict[str, JudgedCell]], layouts: list[str], column_characters: int) -> Padding:
    """Return the verdicts of one allocator: a row for each KV dtype, a column for each layout."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("KV", no_wrap=True)
    for layout in layouts:
        table.add_column(layout, no_wrap=True, min_width=column_characters)
    for dtype, by_layout in by_dtype.items():
        marks = []
        for layout in layouts:
            verdict, style = VERDICTS[by_layout[layout].cell.status]
            marks.append(Text(verdict, style))
        table.add_row(dtype, *marks)
    return Padding(table, (0, 0, 0, 2))


def _print_causes(console: Console, cells: Sequence[JudgedCell]) -> None:
    """Print each refusal and each first finding once, with the cells that it holds for."""
    causes: dict[tuple[str, str | None], list[JudgedCell]] = {}
    for judged in cells:
        if judged.cell.status != "clean":
            causes.setdefault((judged.cell.allocator, judged.cell.message), []).append(judged)
    for (allocator, _), alike in causes.items():
        dtypes: dict[str, list[str]] = {}
        for judged in alike:
            dtypes.setdefault(judged.cell.kv_dtype, []).append(judged.cell.layout)
        where = "; ".join(f"{dtype} {', '.join(layouts)}" for dtype, layouts in dtypes.items())
        heading(console, f"{VERDICTS[alike[0].cell.status][0]}: {printable_line(allocator)}, {where}")
        decisive = alike[0].decisive
        if decisive.rejection is not None:
            print_rejection(console, decisive.rejection)
        else:
            print_verdict(console, decisive)
