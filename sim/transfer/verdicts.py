"""From bytes that are wrong after a transfer to findings: which rule is broken, and one sentence for all alike."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ..finding import Finding, Where
from ..layout import CONV_STATE, Layout

Logical: TypeAlias = tuple[tuple[int, str], int, int, int]
"""A (layer, role), position, head and byte of the head's row."""

FINDINGS_PER_RULE = 20


class Wrong(msgspec.Struct, frozen=True):
    """Bytes of the destination that do not hold what they should: ``needed`` and ``found`` are None for nothing.

    ``times`` is how often they were written.
    """

    kind: Literal["past", "differs", "written"]
    layout: Layout
    pool: int
    first_byte: int
    size_bytes: int
    needed: Logical | None
    found: Logical | None
    times: int = 0


_REMEDIES = {
    "peer": "let both sides agree on what is moved: each byte once, from one sender, and nothing else",
    "layer-map": "match layers by their number in the model, and ask each stage for the layers that it holds",
    "head-map": "cut by the heads of the whole model, and find each rank's share in them",
    "record-layout": "declare the order of the axes and the sections, and cut along them",
}


def findings_of(wrong: list[Wrong]) -> list[Finding]:
    """Return one finding for each way in which a role is wrong on a rank, at most 20 of each rule."""
    alike: dict[tuple[str, str, str, int, int], list[Wrong]] = {}
    for each in wrong:
        rule, problem = _judged(each)
        named = each.needed or each.found
        role = "" if named is None else named[0][1]
        rank = 0 if each.layout.spec is None else each.layout.spec.rank
        alike.setdefault((rule, problem, role, rank, each.pool), []).append(each)
    counts: dict[str, int] = {}
    findings = []
    for key, group in alike.items():
        rule = key[0]
        counts[rule] = counts.get(rule, 0) + 1
        if counts[rule] <= FINDINGS_PER_RULE:
            findings.append(_finding(rule, group))
    return findings


def _judged(wrong: Wrong) -> tuple[str, str]:
    """Return the rule that wrong bytes break, and in which way."""
    needed, found = wrong.needed, wrong.found
    if wrong.kind == "past":
        return "peer", "past"
    if wrong.kind == "written":
        return "peer", "twice"
    if needed is None:
        return "peer", "touched"
    if found is None:
        return "peer", "missing"
    if needed[0][1] != found[0][1]:
        return "peer", "role"
    if needed[0][0] != found[0][0]:
        return "layer-map", "layer"
    if needed[2] != found[2] and needed[0][1] != CONV_STATE:
        return "head-map", "head"
    return "record-layout", "order"


def _finding(rule: str, group: list[Wrong]) -> Finding:
    first = group[0]
    spec = first.layout.spec
    rank = 0 if spec is None else spec.rank
    pool = first.layout.pools[first.pool]
    _, problem = _judged(first)
    place = f"byte {first.first_byte} of pool {pool.index} of group {pool.group} on the destination's rank {rank}"
    named = first.needed or first.found
    message = {
        "past": f"a copy of {first.size_bytes} B reaches past a pool: to {place}",
        "twice": f"{place} is written {first.times} times, with {_said(first.needed)}",
        "touched": f"{place} is to be left alone, and is given {_said(first.found)}",
        "missing": f"{place} is to hold {_said(first.needed)}, and nothing arrives",
    }.get(problem, f"{place} is to hold {_said(first.needed)}, and is given {_said(first.found)}")
    if len(group) > 1:
        message += f" (and {len(group) - 1} more places alike)"
    layer = None if named is None or named[0][0] < 0 else named[0][0]
    role = None if named is None else named[0][1]
    where = Where(
        manager=pool.manager,
        layer=layer,
        role=role,
        group=pool.group,
        pool=pool.index,
        first_byte=first.first_byte,
        last_byte=first.first_byte + first.size_bytes - 1,
    )
    return Finding(rule=rule, message=message, remedy=_REMEDIES[rule], where=(where,))


def _said(logical: Logical | None) -> str:
    if logical is None:
        return "nothing"
    (layer, role), position, head, byte = logical
    owner = "the rank's" if layer < 0 else f"layer {layer}'s"
    what = "channel" if role == CONV_STATE else "head"
    return f"{owner} {role} (position {position}, {what} {head}, byte {byte})"
