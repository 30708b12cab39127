"""Side planes of a layout: index keys and positions are scored as sparse attention does, other planes are read back."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import torch

from ...model.formats import ElementFormat
from ...model.layers import INDEX_KEY, INDEX_POSITION
from ...sim.finding import Finding, Where
from ...sim.layout import Layout
from ..attention.sparse import ROTARY_BASE, IndexPlanes, select
from ..device import Device
from ..reference import sparse as reference
from ..reference.bounds import SCORE_BOUND, Bound, Difference, compare
from .views import LayerViews, formula, slots_of

MAX_SLOTS: Final = 4
INDEX_HEADS: Final = 2
REMEDY: Final = "compare the formula with where the layout stores this plane; kvsan check names the rule that it breaks"


class WrittenPlanes(msgspec.Struct, frozen=True):
    """One layer's planes after writing: the slots that were written, and what each role should hold there."""

    given: LayerViews
    slots: Any
    held: dict[str, Any]


def write_planes(device: Device, layout: Layout, given: LayerViews, generator: torch.Generator) -> WrittenPlanes:
    """Write whole pages of every plane of a layer through its views; integers are small, other numbers normal."""
    slots = slots_of(layout, given.life_cycle)
    if len(slots) > MAX_SLOTS:
        slots = [*slots[: MAX_SLOTS - 1], slots[-1]]
    chosen = torch.tensor(slots, dtype=torch.int32, device=device.kind)
    held = {}
    for role, view in given.views.items():
        shape = (len(slots), *view.shape)
        if view.format in (ElementFormat.BF16, ElementFormat.FP16, ElementFormat.FP32):
            values = torch.randn(shape, generator=generator).to(view.storage.dtype)
        else:
            values = torch.randint(0, 50, shape, generator=generator).to(view.storage.dtype)
        held[role] = values.to(device.kind)
        view.tensor()[chosen.to(torch.int64)] = held[role]
    return WrittenPlanes(given, chosen, held)


def judge_planes(device: Device, written: list[WrittenPlanes], generator: torch.Generator) -> list[Finding]:
    """Return at most one finding for each layer and plane.

    Positions are the rank's: those of one layer serve all of its life cycle.
    """
    findings = []
    places = {each.given.life_cycle: each for each in written if INDEX_POSITION in each.held}
    for each in written:
        for role, values in each.held.items():
            view = each.given.views[role]
            got = view.tensor()[each.slots.to(torch.int64)]
            found = compare(got, values.to(torch.float64), Bound(0.0, 0.0))
            if not found.within:
                findings.append(_finding(each, role, "plane read back", found))
        owner = places.get(each.given.life_cycle)
        key = each.given.views.get(INDEX_KEY)
        if owner is not None and key is not None and key.size("head") == 1 and key.format != ElementFormat.UINT8:
            found = _scores(device, each, owner, generator)
            if not found.within:
                findings.append(_finding(each, INDEX_KEY, "index scores", found))
    return findings


def _scores(device: Device, each: WrittenPlanes, owner: WrittenPlanes, generator: torch.Generator) -> Difference:
    """Score the written pages as one request's, against the scores of what was written."""
    planes = IndexPlanes(each.given.views[INDEX_KEY], owner.given.views[INDEX_POSITION])
    keys, places = each.held[INDEX_KEY].flatten(0, 2), owner.held[INDEX_POSITION].flatten(0, 2)
    queries = torch.randn((1, INDEX_HEADS, planes.keys.dim), generator=generator).to(device.kind)
    spot = torch.randint(0, 50, (1, 3), generator=generator).to(torch.int32).to(device.kind)
    lengths = torch.tensor([len(keys)], dtype=torch.int32, device=device.kind)
    chosen = select(planes, each.slots[None].contiguous(), lengths, queries, spot, 2)
    device.synchronize()
    scores = reference.token_scores(queries[0], spot[0], keys, places, ROTARY_BASE)
    return compare(chosen.scores[0], reference.block_scores(scores, planes.keys.size("token")), SCORE_BOUND)


def _finding(each: WrittenPlanes, role: str, kernel: str, found: Difference) -> Finding:
    given = each.given
    slot = int(each.slots[found.place[0]])
    axes = dict(zip(given.views[role].axes, found.place[1:], strict=False))
    page_tokens = given.views[role].size("token")
    place = f"request 0, position {found.place[0] * page_tokens + axes.pop('token', 0)} (slot {slot})"
    place += "".join([f", {axis} {index}" for axis, index in axes.items()])
    message = (
        f"layer {given.layer}'s {role}, {kernel}: {place} is {found.got:.4g}, "
        f"{found.wanted:.4g} follows from what was written; {formula(given, role)}"
    )
    access = given.accesses[role]
    where = Where(
        manager=given.manager, layer=given.layer, role=role, slot=slot,
        consumer=access.consumer if access is not None else None,
    )  # fmt: skip
    return Finding(rule="kernel-result", message=message, remedy=REMEDY, where=(where,))
