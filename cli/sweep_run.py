"""What ``kvsan sweep`` does once its options are known."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from ..ci.sweep import BY_SIZE, GRIDS, BrokenClass, Grid, Sweep
from ..ci.sweep import sweep as run_sweep
from ..model.errors import SpecError, shown, shown_path, without_byte_order_mark
from ..model.spec import one_line
from .allocator_choice import import_from_here
from .output import PATIENCE_SECONDS, print_report, stdout_kept, terminal, write_json
from .status import CLEAN, WRONG

MAX_GRID_BYTES: Final = 1 << 20
LISTED: Final = 40
"""Classes that the report lists; JSON has all."""

_OPTION_OF_FIELD: Final = {"allocator": "--allocator", "grid": "--grid"}


def sweep_allocator(allocator: str, grid_name: str | None, json: bool) -> int:
    """Run the sweep and report it; return 1 when a class breaks a rule."""
    default = "ci" if allocator in BY_SIZE else "dev"
    grid = read_grid(default if grid_name is None else grid_name)
    import_from_here()
    with stdout_kept(), _live() as show:
        try:
            result = run_sweep(allocator, grid, show)
        except SpecError as error:
            raise SpecError(_OPTION_OF_FIELD.get(error.field, error.field), error.problem) from None
    if json:
        write_json(result)
    else:
        _report(result)
    return WRONG if result.classes or result.refused == result.judged else CLEAN


def read_grid(name: str) -> Grid:
    """Return a named grid, or the one in a JSON file; raise ``SpecError`` for anything else."""
    if name in GRIDS:
        return GRIDS[name]
    path = Path(name)
    try:
        if not path.is_file():
            raise SpecError("--grid", f"found {shown(name)}, needs one of {', '.join(GRIDS)}, or a JSON file")
        if path.stat().st_size > MAX_GRID_BYTES:
            raise SpecError(shown_path(path), f"a file of {path.stat().st_size} B, needs at most {MAX_GRID_BYTES} B")
        return msgspec.json.decode(without_byte_order_mark(path.read_bytes()), type=Grid)
    except OSError as error:
        raise SpecError(shown_path(path), error.strerror or type(error).__name__) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(shown_path(path), one_line(str(error))) from None


@contextlib.contextmanager
def _live() -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how far a sweep is, once it takes long and if there is a terminal to show it on."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    started = time.monotonic()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("classes", visible=False)

        def show(done: int, total: int) -> None:
            late = time.monotonic() - started > PATIENCE_SECONDS
            progress.update(task, completed=done, total=total, visible=late)

        yield show


def _report(result: Sweep) -> None:
    from rich.table import Table

    console = terminal()
    console.print(
        f"{result.allocator}: {result.points:,} points in {result.seconds:.1f} s, {result.signatures:,} classes of "
        f"geometry compared, allocator run {result.judged:,} times, {result.refused:,} of them refused",
        markup=False,
    )
    if result.refused == result.judged and not result.classes:
        console.print("! nothing was checked: the allocator refused every point", style="bold yellow")
        print_report(console)
        return
    if not result.classes:
        console.print("✓ no point breaks a rule outside known limits", style="green")
        print_report(console)
        return
    rows = _by_geometry(result)
    table = Table(box=None, pad_edge=False)
    for heading in ("KV", "heads on the rank", "head dim", "index dim", "sparse layers", "points", "rules"):
        table.add_column(heading, justify="left" if heading in ("KV", "rules") else "right")
    for row, rules in rows[:LISTED]:
        layers = "2 or more" if row.several_layers else "1"
        cells = (row.kv_dtype, row.heads, row.head_dim, row.index_dim, layers, f"{row.count:,}", ", ".join(rules))
        table.add_row(*map(str, cells))
    console.print(table)
    if len(rows) > LISTED:
        console.print(f"and {len(rows) - LISTED:,} more geometries (--json has them, rule by rule)")
    print_report(console)


def _by_geometry(result: Sweep) -> list[tuple[BrokenClass, list[str]]]:
    """Return each broken geometry once, with the rules that it breaks, the most points first."""
    geometries: dict[tuple[str, int, int, int, bool], tuple[BrokenClass, list[str]]] = {}
    for row in result.classes:
        key = (row.kv_dtype, row.head_dim, row.heads, row.index_dim, row.several_layers)
        held, rules = geometries.get(key, (row, []))
        geometries[key] = (row if row.count > held.count else held, [*rules, row.rule])
    return sorted(geometries.values(), key=lambda entry: -entry[0].count)
