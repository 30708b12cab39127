"""Recurrent states of a layout: one step of the gated delta rule and of the convolution through the state views."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import torch

from ...sim.finding import Finding, Where
from ...sim.layout import CONV_STATE, SSM_STATE, Layout
from ..device import Device
from ..reference import state as reference
from ..reference.bounds import STATE_BOUNDS, compare
from ..state.steps import DeltaInputs, conv_step, delta_step
from .views import LayerViews, formula, slots_of

MAX_SLOTS: Final = 4
REMEDY: Final = "compare the formula with where the layout stores this state; kvsan check names the rule that it breaks"


class WrittenStates(msgspec.Struct, frozen=True):
    """One layer's states after writing: the slots of its requests, and what each role should hold."""

    given: LayerViews
    slots: Any
    held: dict[str, Any]


def write_states(device: Device, layout: Layout, given: LayerViews, generator: torch.Generator) -> WrittenStates:
    """Write the states of a few requests through the layer's state views."""
    slots = slots_of(layout, given.life_cycle)
    if len(slots) > MAX_SLOTS:
        slots = [*slots[: MAX_SLOTS - 1], slots[-1]]
    chosen = torch.tensor(slots, dtype=torch.int32, device=device.kind)
    held = {}
    for role in (SSM_STATE, CONV_STATE):
        if role in given.views:
            view = given.views[role]
            values = torch.randn((len(slots), *view.shape), generator=generator).to(view.storage.dtype)
            view.tensor()[chosen.to(torch.int64)] = values.to(device.kind)
            held[role] = values.to(torch.float64).to(device.kind)
    return WrittenStates(given, chosen, held)


def judge_states(device: Device, layout: Layout, written: WrittenStates, generator: torch.Generator) -> list[Finding]:
    """Return at most one finding for each of the layer's two states."""
    findings = []
    requests = len(written.slots)

    def draw(*sizes: int) -> Any:
        return torch.randn(sizes, generator=generator).to(device.kind)

    if not requests:
        return []
    if SSM_STATE in written.held:
        view = written.given.views[SSM_STATE]
        heads, dims, states = view.shape
        inputs = DeltaInputs(
            q=draw(requests, heads, states),
            k=draw(requests, heads, states),
            v=draw(requests, heads, dims),
            gate=draw(requests, heads),
            beta=draw(requests, heads),
            a=draw(heads),
            dt_bias=draw(heads),
        )
        out = torch.full((requests, heads, dims), float("nan"), dtype=torch.float32, device=device.kind)
        delta_step(view, written.slots, inputs, out)
        fields = [getattr(inputs, name).to(torch.float64) for name in inputs.__struct_fields__]
        wanted, _ = reference.delta_step(written.held[SSM_STATE], *fields)
        findings += _judged(device, written, SSM_STATE, "state update", out, wanted)
    if CONV_STATE in written.held:
        view = written.given.views[CONV_STATE]
        channels, taps = view.shape
        given = (draw(requests, channels), draw(channels, taps + 1), draw(channels))
        out = torch.full((requests, channels), float("nan"), dtype=torch.float32, device=device.kind)
        conv_step(view, written.slots, *given, out)
        wanted, _ = reference.conv_step(written.held[CONV_STATE], *[part.to(torch.float64) for part in given])
        findings += _judged(device, written, CONV_STATE, "convolution", out, wanted)
    return findings


def _judged(device: Device, written: WrittenStates, role: str, kernel: str, out: Any, wanted: Any) -> list[Finding]:
    device.synchronize()
    given = written.given
    found = compare(out, wanted, STATE_BOUNDS[given.views[role].format])
    if found.within:
        return []
    slot = int(written.slots[found.place[0]])
    place = f"request {found.place[0]} (slot {slot})"
    names = ("head", "element") if role == SSM_STATE else ("channel",)
    place += "".join([f", {name} {index}" for name, index in zip(names, found.place[1:], strict=False)])
    message = (
        f"layer {given.layer}'s {kernel}: {place} is {found.got:.4g}, the reference says {found.wanted:.4g} "
        f"(relative L2 {found.relative_l2:.1e}); {formula(given, role)}"
    )
    access = given.accesses[role]
    where = Where(
        manager=given.manager, layer=given.layer, role=role, slot=slot,
        consumer=access.consumer if access is not None else None,
    )  # fmt: skip
    return [Finding(rule="kernel-result", message=message, remedy=REMEDY, where=(where,))]
