"""The report of ``kvsan bench fuzz`` for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ci.bench.fuzzing import FuzzBench

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def _transfers(found: FuzzBench) -> Table:
    """Return a row per faulty transfer (medians over seeds)."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("faulty transfer")
    for heading in ("found", "pairs", "seconds", "at minimum", "size"):
        table.add_column(heading, justify="right")
    for row in found.transfers:
        table.add_row(
            row.fault.removeprefix("fault:"),
            f"{row.found}/{row.seeds}",
            f"{row.examples:g}",
            f"{row.seconds:.2f}",
            f"{row.at_minimum}/{row.seeds}",
            f"{row.size} of {row.minimum_size}",
        )
    return table


def report_fuzz_bench(console: Console, found: FuzzBench) -> None:
    """Print a row per fault (medians over seeds, plain sampling in brackets) and a line per rate."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("fault")
    for heading in ("found", "examples", "seconds", "A12", "at minimum", "size"):
        table.add_column(heading, justify="right")
    for row in found.faults:
        table.add_row(
            row.fault.removeprefix("fault:"),
            f"{row.found}/{row.seeds} ({row.found_plain})",
            f"{row.examples:g} ({row.examples_plain:g})",
            f"{row.seconds:.2f} ({row.seconds_plain:.2f})",
            f"{row.a12:.2f}",
            f"{row.at_minimum}/{row.seeds}",
            f"{row.size} of {row.minimum_size}",
        )
    if found.faults:
        console.print(table)
    if found.transfers:
        console.print(_transfers(found))
    for rate in found.rates:
        console.print(
            f"{rate.allocator}: {rate.campaign_per_second:,.0f} examples per second, drawing alone "
            f"{rate.drawing_per_second:,.0f}: ratio {rate.ratio:.2f} (at least {found.ratio_limit:g})",
            markup=False,
        )
