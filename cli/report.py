"""The report of one rank for a person: who is asked, where everything lies, and the verdict with cause and remedy."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..model.spec import CacheSpec
from ..sim.checking import FINDINGS_PER_RULE
from ..sim.finding import Finding
from ..sim.layout import Layout, PageTable
from ..sim.rejection import Rejected
from .document import page_bytes_of_pools, whole_pages
from .examination import Examination
from .wording import compress, compress_layers, counted, human_bytes, printable_line

FINDINGS_SHOWN = 3
"""Findings of one rule that the report prints in full."""
TABLES_SHOWN = 8
"""Kinds of page tables that the report prints."""

VERDICTS = {
    "clean": ("✓ clean", "bold green"),
    "findings": ("! findings", "bold yellow"),
    "rejected": ("✗ refused", "bold red"),
}


def report_rank(console: Console, examination: Examination) -> None:
    """Print the report of one rank."""
    print_header(console, examination, _rank_words(examination.spec))
    layout = examination.layout
    if layout is not None:
        _print_pools(console, layout)
        _print_tables(console, layout)
    print_notes(console, examination.notes)
    print_verdict(console, examination)


def two_columns(rows: Iterable[tuple[str, str]]) -> Table:
    """Return names with what they mean."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, meaning in rows:
        table.add_row(Text(printable_line(name)), Text(printable_line(meaning)))
    return table


def print_header(console: Console, examination: Examination, place: str) -> None:
    """Print what is looked at: the model, its deployment, the allocator and the verdict."""
    spec = examination.spec
    cached = f"KV {spec.kv_format.value}"
    if spec.has_recurrent:
        cached += f", states {spec.state_format.value}"
    cached += f", {counted(spec.tokens_per_block, 'token')} per block"
    quota = spec.quota_bytes or 0
    cached += f", quota {human_bytes(quota) or f'{quota} B'}" if quota else f", {counted(spec.slots or 0, 'slot')}"
    if spec.draft.mode != "none":
        cached += f", {counted(len(spec.draft.layers), 'draft layer')} {spec.draft.mode}"
    default = "" if examination.allocator.asked_for else " (the default)"
    verdict, style = VERDICTS[examination.status]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    table.add_row(
        "model", Text(f"{printable_line(spec.model) or 'unnamed'}, {counted(len(spec.layers), 'layer')}", "bold")
    )
    table.add_row("layout", Text(place))
    table.add_row("cache", Text(cached))
    table.add_row("allocator", Text(f"{printable_line(examination.allocator.name)}{default}"))
    table.add_row("verdict", Text(verdict, style))
    console.print(table)


def _rank_words(spec: CacheSpec) -> str:
    parallel = spec.parallel
    words = f"{parallel.name}, rank {spec.rank} of {parallel.world_size}"
    if parallel.pp > 1:
        words += f", pipeline stage {parallel.coordinates(spec.rank).pp_rank} of {parallel.pp}"
    return words


def heading(console: Console, text: str) -> None:
    """Print the heading of a part of the report."""
    console.print()
    console.print(Text(text, "bold"))


def _print_pools(console: Console, layout: Layout) -> None:
    heading(console, "Pools" if layout.pools else "Pools: none, this rank keeps no cache")
    if not layout.pools:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, right in (("group", False), ("pool", False), ("slots", True), ("slot", True), ("page × count", True)):
        table.add_column(name, no_wrap=True, justify="right" if right else "left")
    table.add_column("shared by", ratio=1)
    users = _users_of_pools(layout)
    total_bytes = 0
    for pool, page_bytes, used_by in zip(layout.pools, page_bytes_of_pools(layout), users, strict=True):
        group = str(pool.group) if pool.manager == "target" else f"{printable_line(pool.manager)} {pool.group}"
        total_bytes += pool.size_bytes
        table.add_row(
            group,
            str(pool.index),
            str(pool.slot_count),
            _sized(pool.slot_bytes),
            _page_words(pool.slot_bytes, page_bytes),
            Text("\n".join(used_by)),
        )
    console.print(Padding(table, (0, 0, 0, 2)))
    human = human_bytes(total_bytes)
    together = f"  {total_bytes} B{f' ({human})' if human else ''} in all"
    if layout.side_planes_bytes:
        together += f"; {layout.side_planes_bytes} B of each slot are packed side planes"
    console.print(Text(together, "dim"))


def _sized(size_bytes: int) -> str:
    """Return a size in bytes, with the unit a person thinks in on the line below."""
    human = human_bytes(size_bytes)
    return f"{size_bytes} B\n{human}" if human else f"{size_bytes} B"


def _page_words(slot_bytes: int, page_bytes: int | None) -> str:
    if page_bytes is None:
        return "several sizes"
    pages = whole_pages(slot_bytes, page_bytes)
    return f"{page_bytes} B" + (f" × {pages}" if pages is not None else "")


def _users_of_pools(layout: Layout) -> list[list[str]]:
    """Return who shares each pool: the roles with the layers that have them, a line for each set of roles."""
    roles: list[dict[int, dict[str, None]]] = [{} for _ in layout.pools]
    for buffer in layout.buffers:
        roles[buffer.pool].setdefault(buffer.layer, {})[buffer.role] = None
    lines = []
    for by_layer in roles:
        layers: dict[str, list[int]] = {}
        for layer, names in by_layer.items():
            layers.setdefault(", ".join(map(printable_line, names)), []).append(layer)
        shared = [f"{names} of {compress_layers(found)}" for names, found in layers.items()]
        lines.append(shared if len(shared) <= 4 else [*shared[:3], f"and {len(shared) - 3} more kinds"])
    return lines


def _print_tables(console: Console, layout: Layout) -> None:
    """Print what the attention op is given; tables that differ in their layer alone are one line."""
    alike: dict[tuple[str, int, int, int, bool], list[PageTable]] = {}
    for table in layout.tables:
        of_one = len(table.layers) == 1
        alike.setdefault((table.manager, table.life_cycle, table.page_bytes, table.index_scale, of_one), []).append(
            table
        )
    if not alike:
        return
    heading(console, "Page tables of the attention op")
    lines = []
    for number, ((manager, _, page_bytes, index_scale, _), tables) in enumerate(alike.items()):
        if number == TABLES_SHOWN:
            lines.append(f"and {len(alike) - number} more like these")
            break
        layers = compress_layers([layer for table in tables for layer in table.layers])
        offsets = sorted({offset for table in tables for offset in table.mapping_offsets})
        owner = "" if manager == "target" else f"{printable_line(manager)} "
        each = ", a table for each layer" if len(tables) > 1 else ""
        mapped = f"mapping offset{'s' if len(offsets) > 1 else ''} {compress(offsets)}"
        lines.append(f"{owner}{layers}: pages of {page_bytes} B, index scale {index_scale}, {mapped}{each}")
    print_bullets(console, lines)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Print what was inferred, and what the allocator remarks."""
    sentences = list(dict.fromkeys(map(printable_line, notes)))
    if not sentences:
        return
    heading(console, "Notes")
    print_bullets(console, sentences)


def print_bullets(console: Console, lines: Iterable[str]) -> None:
    """Print ``lines``, each behind a dot."""
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row(Text("•", "dim"), Text(line))
    console.print(Padding(table, (0, 0, 0, 2)))


def print_verdict(console: Console, examination: Examination) -> None:
    """Print the verdict again, with what is wrong, why, and what to do."""
    console.print()
    if examination.rejection is not None:
        console.print(Text(f"✗ refused by {printable_line(examination.allocator.name)}", "bold red"))
        print_rejection(console, examination.rejection)
    elif examination.findings:
        count = counted(len(examination.findings), "finding")
        console.print(Text(f"! {count}", "bold yellow"))
        _print_findings(console, examination.findings)
    else:
        console.print(Text("✓ clean: no rule is broken", "bold green"))


def print_rejection(console: Console, rejection: Rejected) -> None:
    """Print what is refused, why, and the way out."""
    what, _, why = printable_line(rejection.message).partition(". ")
    rows = [("what", what), ("why", why), ("remedy", printable_line(rejection.remedy))]
    if not rejection.supported:
        rows.append(("rule", f"{rejection.rule}: the spec is outside what this allocator declares to support"))
    else:
        rows.append(("rule", f"{rejection.rule} (kvsan rules {rejection.rule})"))
    _print_rows(console, rows)


def _print_findings(console: Console, findings: tuple[Finding, ...]) -> None:
    """Print the first findings of each rule."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in findings:
        by_rule.setdefault(finding.rule, []).append(finding)
    for rule, found in by_rule.items():
        count = f"{len(found)} or more" if len(found) >= FINDINGS_PER_RULE else str(len(found))
        console.print()
        console.print(Text.assemble((f"  {rule}", "bold"), f" × {count}"))
        lines = [printable_line(finding.message) for finding in found[:FINDINGS_SHOWN]]
        if len(found) > FINDINGS_SHOWN:
            lines.append(f"and {counted(len(found) - FINDINGS_SHOWN, 'more finding')} (--json has them)")
        print_bullets(console, lines)
        remedies = dict.fromkeys(printable_line(finding.remedy) for finding in found[:FINDINGS_SHOWN])
        _print_rows(console, [("remedy", remedy) for remedy in remedies])


def _print_rows(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    for name, text in rows:
        if text:
            table.add_row(name, Text(text))
    console.print(Padding(table, (0, 0, 0, 2)))
