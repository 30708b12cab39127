"""``kvsan sweep``: every geometry of a grid, and the classes that break a rule."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Json


def sweep(
    allocator: Annotated[
        str, typer.Option("--allocator", metavar="NAME", help="A name from `kvsan allocators`, or module:function.")
    ],
    grid: Annotated[
        str | None,
        typer.Option(
            "--grid",
            metavar="NAME|FILE",
            help="dev, ci, nightly, or a JSON file with the axes; else ci, or dev where every point is run.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Enumerate a grid of geometries and list the complete classes that break a rule."""
    from .sweep_run import sweep_allocator

    return sweep_allocator(allocator, grid, json)
