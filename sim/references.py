"""A layout's references: every number that names another member must name one, and both must agree on who they are.

A layout that breaks this is bad input, not a layout with findings: nothing can be said about it. So rules may follow
references without looking.
"""

from __future__ import annotations

from ..model.errors import SpecError, require_int, shown
from .layout import KEY, Access, Buffer, Layout, LifeCycle, PageTable, Pool


def check_references(layout: Layout) -> None:
    """Raise ``SpecError``, naming the member and the field, for the first reference that is wrong."""
    for field, kind in (
        ("pools", Pool),
        ("life_cycles", LifeCycle),
        ("buffers", Buffer),
        ("tables", PageTable),
        ("accesses", Access),
    ):
        members = getattr(layout, field)
        if {member.__class__ for member in members} <= {kind}:
            continue
        for index, member in enumerate(members):
            if member.__class__ is not kind:
                raise SpecError(f"layout.{field}[{index}]", f"found {shown(member)}, needs a {kind.__name__}")
    _check_buffers(layout)
    _check_accesses(layout)
    for number, table in enumerate(layout.tables):
        _check_table(layout, table, f"layout.tables[{number}]")


def _check_buffers(layout: Layout) -> None:
    pools, cycles = len(layout.pools), len(layout.life_cycles)
    seen: set[tuple[str, int, str]] = set()
    count = 0
    for index, buffer in enumerate(layout.buffers):
        if not (0 <= buffer.pool < pools and 0 <= buffer.life_cycle < cycles):
            require_int(f"layout.buffers[{index}].pool", buffer.pool, 0, pools - 1)
            require_int(f"layout.buffers[{index}].life_cycle", buffer.life_cycle, 0, cycles - 1)
        manager = buffer.manager
        if not manager == layout.pools[buffer.pool].manager == layout.life_cycles[buffer.life_cycle].manager:
            pool, cycle = layout.pools[buffer.pool].manager, layout.life_cycles[buffer.life_cycle].manager
            raise SpecError(
                f"layout.buffers[{index}].manager",
                f"found {shown(manager)}, a pool of {shown(pool)}, a life cycle of {shown(cycle)}, needs one manager",
            )
        seen.add((manager, buffer.layer, buffer.role))
        count += 1
        if buffer.parts:
            seen.update([(manager, part.layer, part.role) for part in buffer.parts])
            count += len(buffer.parts)
        if len(seen) != count:
            raise SpecError(
                f"layout.buffers[{index}]", f"layer {buffer.layer}'s {buffer.role}, or a part of it, is there twice"
            )


def _check_accesses(layout: Layout) -> None:
    pools, buffers = len(layout.pools), len(layout.buffers)
    for index, access in enumerate(layout.accesses):
        if not (0 <= access.pool < pools and 0 <= access.buffer < buffers):
            require_int(f"layout.accesses[{index}].pool", access.pool, 0, pools - 1)
            require_int(f"layout.accesses[{index}].buffer", access.buffer, 0, buffers - 1)
        if access.part != -1 and not 0 <= access.part < len(layout.buffers[access.buffer].parts):
            parts = len(layout.buffers[access.buffer].parts)
            require_int(f"layout.accesses[{index}].part", access.part, -1, parts - 1)


def _check_table(layout: Layout, table: PageTable, name: str) -> None:
    require_int(f"{name}.life_cycle", table.life_cycle, 0, len(layout.life_cycles) - 1)
    require_int(f"{name}.pool", table.pool, 0, len(layout.pools) - 1)
    if table.scale_pool is not None:
        require_int(f"{name}.scale_pool", table.scale_pool, 0, len(layout.pools) - 1)
    layers = len(table.layers)
    for field in ("key_buffers", "mapping_offsets"):
        if len(getattr(table, field)) != layers:
            found = len(getattr(table, field))
            raise SpecError(f"{name}.{field}", f"found {found} entries, needs one for each of {layers} layers")
    for layer, key in zip(table.layers, table.key_buffers, strict=True):
        require_int(f"{name}.key_buffers", key, 0, len(layout.buffers) - 1)
        buffer = layout.buffers[key]
        named = (table.manager, table.life_cycle, layer, KEY)
        found_there = (buffer.manager, buffer.life_cycle, buffer.layer, buffer.role)
        if named != found_there:
            raise SpecError(
                f"{name}.key_buffers",
                f"buffer {key} is {_identity(found_there)}, needs to be {_identity(named)}",
            )


def _identity(named: tuple[str, int, int, str]) -> str:
    manager, life_cycle, layer, role = named
    return f"layer {layer}'s {role} in life cycle {life_cycle} of the {manager} manager"
