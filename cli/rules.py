"""``kvsan rules``: the rules that every layout is checked against, and what each is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .options import Json

if TYPE_CHECKING:
    from ..sim.rules.rule import Rule


def rules(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Explain this rule.", show_default=False)] = None,
    json: Json = False,
) -> int:
    """List the rules, or explain one."""
    from ..sim.rules import RULES
    from .output import print_report, terminal, write_json

    if name is not None:
        rule = _find(name)
        explained = {"name": rule.name, "summary": rule.summary, "explanation": rule.explanation}
        if json:
            write_json({"rules": [explained]})
            return 0
        console = terminal()
        console.print(rule.name, style="bold", end="")
        console.print(f": {rule.summary}", markup=False)
        console.print()
        console.print(rule.explanation, markup=False)
        print_report(console)
        return 0
    if json:
        write_json({"rules": [{"name": rule.name, "summary": rule.summary} for rule in RULES]})
        return 0
    from .report import two_columns

    console = terminal()
    console.print(two_columns((rule.name, rule.summary) for rule in RULES))
    console.print("\nkvsan rules NAME explains one of them.", style="dim")
    print_report(console)
    return 0


def _find(name: str) -> Rule:
    """Return the rule called ``name``; raise ``SpecError`` with the names nearest to it."""
    import difflib

    from ..model.errors import SpecError, shown
    from ..sim.rules import RULES

    by_name = {rule.name: rule for rule in RULES}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name.lower(), by_name, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"needs one of {', '.join(by_name)}"
    raise SpecError("NAME", f"unknown rule {shown(name)}, {hint}")
