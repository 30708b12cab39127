"""``kvsan shrink``: make a saved case as small as it can be, by rule."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Json


def shrink(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A saved case.", show_default=False)],
    allocator: Annotated[
        str | None,
        typer.Option("--allocator", metavar="NAME", help="Run it with this one; needed for module:function."),
    ] = None,
    rule: Annotated[
        str | None, typer.Option("--rule", metavar="NAME", help="Keep this rule broken; else the case's own first.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", metavar="DIR", help="Save the result here; else beside the case.")
    ] = None,
    json: Json = False,
) -> int:
    """Reduce a case to the simplest spec that still breaks the same rule, and save that."""
    from .shrink_run import shrink_case

    return shrink_case(case, allocator, rule, output, json)
