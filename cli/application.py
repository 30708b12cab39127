"""The typer application: which commands there are. A new command is a module here and a line in ``application``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .allocators import allocators
from .bench import bench
from .check import check
from .fuzz import fuzz
from .matrix import matrix
from .peers import peers
from .replay import replay
from .rules import rules
from .select import select
from .shrink import shrink
from .sweep import sweep

HELP = "A sanitizer for the cache layouts of LLM inference."
EPILOG = "Exit status: 0 nothing wrong, 1 findings or a refused spec, 2 bad input or usage, 130 interrupted."


def command() -> Any:
    """Return the whole command line as a command that can be run."""
    application = typer.Typer(
        help=HELP,
        epilog=EPILOG,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback(invoke_without_command=True)(_root)
    for function in (check, matrix, peers, fuzz, sweep, shrink, replay, select, rules, allocators, bench):
        application.command(epilog=EPILOG)(function)
    return typer.main.get_command(application)


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> int:
    """A sanitizer for the cache layouts of LLM inference."""
    if version:
        from .. import __version__
        from .output import write_text

        write_text(f"kvsan {__version__}\n")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        from .output import write_text

        write_text(context.get_help() + "\n")
    return 0
