"""``kvsan replay``: layouts on real memory."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import Json


def replay(
    cases: Annotated[
        list[str],
        typer.Argument(
            metavar="CASE_OR_DIR…",
            help="Saved cases, saved specs, models' config.json, or folders of cases.",
            show_default=False,
        ),
    ],
    device: Annotated[
        str, typer.Option("--device", metavar="cpu|cuda", help="cpu runs the same kernels through an interpreter.")
    ] = "cpu",
    allocator: Annotated[
        str | None,
        typer.Option("--allocator", metavar="NAME", help="Lay out with this one; needed for module:function."),
    ] = None,
    workers: Annotated[str, typer.Option("--workers", metavar="N", help="Processes that replay at a time.")] = "1",
    max_memory: Annotated[
        str,
        typer.Option(
            "--max-memory", metavar="BYTES", help="Memory of one layout; larger ones lose slots. 64GiB works."
        ),
    ] = "256MiB",
    static: Annotated[
        bool, typer.Option("--static/--no-static", help="Compare with the verdict of the static rules.")
    ] = True,
    sanitizer: Annotated[
        bool, typer.Option("--sanitizer", help="Run under NVIDIA's compute-sanitizer, where it is installed.")
    ] = False,
    json: Json = False,
) -> int:
    """Lay cases out in real memory, write every view, and compare every byte with the simulator."""
    from .replay_run import replay_cases

    return replay_cases(cases, device, allocator, workers, max_memory, static, sanitizer, json)
