"""``kvsan allocators``: the allocators that ``--allocator`` knows by name."""

from __future__ import annotations

from .options import Json

_KINDS = {
    "engine": "Allocators of inference engines",
    "installed": "Engines themselves, where they are installed (docs/engines.md)",
    "fault": "Faults, broken on purpose",
    "cache-fault": "Faults of running caches, for fuzz --traces",
    "plugin": "Plugins of other packages",
}


def allocators(json: Json = False) -> int:
    """List the allocators, plugins included; none of them is imported."""
    from .output import print_report, terminal, write_json

    rows = known_allocators()
    if json:
        write_json({"allocators": [{"name": name, "summary": summary, "kind": kind} for name, summary, kind in rows]})
        return 0
    from .report import heading, two_columns

    console = terminal()
    for kind in dict.fromkeys(kind for _, _, kind in rows):
        heading(console, _KINDS.get(kind, kind))
        console.print(two_columns((name, summary) for name, summary, of_kind in rows if of_kind == kind))
    console.print(
        "\n--allocator module:function takes a function of yours, found from the current folder.", style="dim"
    )
    print_report(console)
    return 0


def known_allocators() -> list[tuple[str, str, str]]:
    """Return name, summary and kind of every allocator: the shipped ones, then the plugins of other packages."""
    import importlib.metadata

    from ..sim.cache.faulty import FAULTY_CACHES
    from ..sim.registry import ALLOCATORS, ENTRY_POINT_GROUP

    rows = [(entry.name, entry.summary, entry.kind) for entry in ALLOCATORS]
    rows += [(entry.name, entry.summary, "cache-fault") for entry in FAULTY_CACHES]
    taken = {name for name, _, _ in rows}
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        if point.name not in taken:  # a shipped name cannot be taken over
            taken.add(point.name)
            package = f"{point.dist.name} {point.dist.version}: " if point.dist is not None else ""
            rows.append((point.name, f"{package}{point.value}", "plugin"))
    return rows
