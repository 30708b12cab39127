"""The report of ``kvsan select`` for a person: the decision and its path, or the table of disagreements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..model.selection import SelectionInputs
from ..model.selection.inputs import AXES
from .report import VERDICTS, heading, two_columns
from .wording import counted, human_bytes, printable_line

if TYPE_CHECKING:
    from ..ci.audit import Audit
    from .select_run import Selected


def report_selected(console: Console, selected: Selected) -> None:
    """Print one decision: inputs off the ordinary, manager, seats, verdict, and the rules that decided."""
    decision, kv = selected.decision, selected.kv
    verdict, style = VERDICTS[selected.status]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    if selected.model:
        table.add_row("model", Text(printable_line(selected.model), "bold"))
    table.add_row("rule set", Text(decision.ruleset))
    table.add_row("inputs", Text(_input_words(decision.inputs)))
    table.add_row("manager", Text(_manager_words(selected), "bold"))
    table.add_row("predicted", Text(decision.predicted))
    if decision.seats is not None:
        batch = f"for batches of {decision.inputs.max_batch}"
        table.add_row("seats", Text(f"{decision.seats}, index rows {decision.index_rows}, {batch}"))
    for number in decision.numbers:
        if number.value is not None and number.name not in ("seats", "index rows"):
            table.add_row(number.name, Text(_number_words(number.name, number.value)))
    table.add_row("KV format", Text(kv.refusal or _kv_words(selected)))
    table.add_row("verdict", Text(verdict, style))
    console.print(table)
    heading(console, "Path")
    for step in decision.consulted if selected.explained else decision.path:
        console.print(Text(f"  {step.words}", "" if step.applied else "dim"))
        if selected.explained and step.applied:
            console.print(Text(f"    {step.source}", "dim"))
    for title, message, remedy in _complaints(selected):
        heading(console, title)
        console.print(two_columns([("what", message), ("remedy", remedy)] if remedy else [("what", message)]))


def _complaints(selected: Selected) -> list[tuple[str, str, str]]:
    decision = selected.decision
    rows = []
    if decision.warning is not None:
        rows.append(("! warning", decision.warning, ""))
    if decision.refusal is not None:
        rows.append(("✗ refused", decision.refusal.message, decision.refusal.remedy))
    return rows + [(f"! {finding.rule}", finding.message, finding.remedy) for finding in selected.findings]


def _manager_words(selected: Selected) -> str:
    decision = selected.decision
    held = decision.held
    if held is None:
        return "none, the engine refuses to start"
    words = held.name if held.name == decision.asked else f"{held.name}, in the place of {decision.asked}"
    return f"{words} (--allocator {held.allocator})" if held.allocator else f"{words} (no allocator of kvsan)"


def _number_words(name: str, value: int) -> str:
    if name == "budget":
        return f"{value} tokens"
    human = human_bytes(value)
    return f"{value} B" + (f" ({human})" if human else "")


def _kv_words(selected: Selected) -> str:
    kv = selected.kv
    words = "" if kv.effective is None else kv.effective.value
    return words if kv.reference is None else f"{words}, compared with the reference {kv.reference.name}"


def _input_words(inputs: SelectionInputs) -> str:
    """Return the inputs off their ordinary value, the flag always."""
    given = [(name, getattr(inputs, name)) for name, values in AXES.items() if getattr(inputs, name) != values[0]]
    return _cause_words(dict([("v2", inputs.v2), *given]))


def _cause_words(inputs: dict[str, Any]) -> str:
    def one(name: str, value: Any) -> str:
        if isinstance(value, bool):
            return name if value else f"no {name}"
        return f"{name} {', '.join(value) if isinstance(value, list) else value}"

    return "; ".join(one(name, value) for name, value in inputs.items())


def report_audit(console: Console, result: Audit) -> None:
    """Print the table of disagreements, one cause a row, with the rules that led to it."""
    found = result.disagreements
    points = f"{result.points:,} points"
    console.print(Text(f"{result.ruleset}: {points}, {counted(len(found), 'disagreement')}", "bold"))
    if not found:
        console.print(Text("✓ selector and predictor agree everywhere", "green"))
        return
    for row in found:
        console.print()
        console.print(Text(f"{row.check}: {_cause_words(row.inputs)}", "bold yellow"))
        rows = [("selected", row.selected), ("predicted", row.predicted)]
        rows += [("path" if not place else "", step) for place, step in enumerate(row.path)]
        rows.append(("source", "derived from the rules" if row.derived else row.source))
        rows.append(("points", f"{row.points:,}"))
        console.print(two_columns(rows))
