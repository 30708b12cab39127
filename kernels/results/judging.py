"""``judge_kernels``: findings under ``kernel-result`` for every layer of a layout.

All layers are filled first, each through the formula of the consumer that writes it, so that two layers whose bytes
collide spoil each other; then every layer is read. Requests are long enough to use all slots.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import torch

from ...model.errors import SpecError, require_choice
from ...model.layers import LatentLayer
from ...sim.finding import Finding, Where
from ...sim.layout import CONV_STATE, KEY, KEY_SCALE, SSM_STATE, VALUE, VALUE_SCALE, Layout
from ..attention.decode import decode
from ..attention.problem import QUERY_TYPES, PagedAttention
from ..attention.tiles import latent, skip_softmax
from ..device import Device
from ..paged.views import LayoutMemory, PagedPlane
from ..quantize.rows import append, fetch
from ..reference import attention as reference
from ..reference.bounds import ATTENTION_BOUNDS, STORED_BOUNDS, Difference, compare
from ..reference.numbers import as_stored
from .choice import KERNELS
from .planes import judge_planes, write_planes
from .states import judge_states, write_states
from .views import LayerViews, formula, layers_of, slots_of

QUERY_GROUP: Final = 2
MAX_SLOTS: Final = 8
REMEDY: Final = "compare the formula with where the layout stores this role; kvsan check names the rule that it breaks"


class KernelReport(msgspec.Struct, frozen=True):
    """What kernels saw of a layout, and in one line each the layers that none could be run on."""

    findings: tuple[Finding, ...]
    refused: tuple[str, ...]
    layers: int


class _Filled(msgspec.Struct, frozen=True):
    """One layer after writing: its planes, the page table of one request, and what the planes should hold."""

    given: LayerViews
    planes: dict[str, PagedPlane]
    table: Any
    length: int
    held: dict[str, Any]


def judge_kernels(device: Device, layout: Layout, kernels: str = "all", *, seed: int = 0) -> KernelReport:
    """Fill ``layout`` in memory and run the ``kernels`` asked for over every layer."""
    require_choice("--kernels", kernels, ("all", *KERNELS))
    chosen = KERNELS if kernels == "all" else (kernels,)
    memory = LayoutMemory(device, layout)
    refused: list[str] = []
    paged, states = [], []
    generator = torch.Generator().manual_seed(seed)
    for given in layers_of(memory, "attention-op", refused):
        if KEY in given.views and slots_of(layout, given.life_cycle):
            try:
                paged.append(_fill(device, layout, given, generator))
            except SpecError as error:
                refused.append(str(error))
    for given in layers_of(memory, "state-view", refused):
        if {SSM_STATE, CONV_STATE} & set(given.views):
            states.append(write_states(device, layout, given, generator))
    # planes last: what reaches into K and V spoils them
    planes = [write_planes(device, layout, given, generator) for given in layers_of(memory, "side-plane-view", refused)]
    findings: list[Finding] = []
    for filled in paged:
        try:
            findings += _judge_layer(device, layout, filled, chosen, generator)
        except SpecError as error:
            refused.append(str(error))
    if "quantize" in chosen:
        findings += _judge_readers(device, memory, paged, refused)
    if "sparse" in chosen:
        findings += judge_planes(device, planes, generator)
    if "state" in chosen:
        findings += [finding for written in states for finding in judge_states(device, layout, written, generator)]
    return KernelReport(tuple(findings), tuple(dict.fromkeys(refused)), len(paged) + len(states) + len(planes))


def _judge_readers(device: Device, memory: LayoutMemory, paged: list[_Filled], refused: list[str]) -> list[Finding]:
    """Read K and V back through the tensor views of other consumers, block scales as the attention op finds them."""
    findings = []
    by_layer = {(filled.given.manager, filled.given.layer): filled for filled in paged}
    for given in layers_of(memory, "kv-view", refused) if memory.layout.accesses else ():
        filled = by_layer.get((given.manager, given.layer))
        if filled is None:
            continue
        for role, view in given.views.items():
            if role in filled.planes:
                plane = PagedPlane(view, filled.planes[role].scales)
                other = _Filled(given, {role: plane}, filled.table, filled.length, filled.held)
                found = compare(_fetched(device, other, role), other.held[role], STORED_BOUNDS[view.format])
                if not found.within:
                    findings.append(_finding(other, f"{role} read back", _spot(role, found)))
    return findings


def _fill(device: Device, layout: Layout, given: LayerViews, generator: torch.Generator) -> _Filled:
    """Append a request's tokens to one layer."""
    where = torch.device(device.kind)
    slots = slots_of(layout, given.life_cycle)
    if len(slots) > MAX_SLOTS:
        slots = [*slots[: MAX_SLOTS - 1], slots[-1]]  # the last slot is where offsets are largest
    key = given.views[KEY]
    length = max(1, len(slots) * key.size("token") - 1)
    order = torch.randperm(len(slots), generator=generator).tolist()
    table = torch.tensor([[slots[index] for index in order]], dtype=torch.int32, device=where)
    planes = {KEY: PagedPlane(key, given.views.get(KEY_SCALE))}
    if VALUE in given.views:
        planes[VALUE] = PagedPlane(given.views[VALUE], given.views.get(VALUE_SCALE))
    positions = torch.arange(length, dtype=torch.int32, device=where)
    held = {}
    for role, plane in planes.items():
        drawn = torch.randn((length, plane.data.size("head"), plane.data.dim), generator=generator)
        values = drawn.to(torch.bfloat16).to(torch.float32).to(where)
        append(plane, values, torch.zeros_like(positions), positions, table)
        held[role] = as_stored(values, plane.data.format)
    return _Filled(given, planes, table, length, held)


def _judge_layer(
    device: Device, layout: Layout, filled: _Filled, chosen: tuple[str, ...], generator: torch.Generator
) -> list[Finding]:
    """Run the kernels over one layer; at most one finding for each."""
    findings = []
    bound = ATTENTION_BOUNDS[filled.planes[KEY].data.format]
    if "quantize" in chosen:
        for role in filled.planes:
            found = compare(_fetched(device, filled, role), filled.held[role], STORED_BOUNDS[_format(filled, role)])
            if not found.within:
                findings.append(_finding(filled, f"{role} read back", _spot(role, found)))
    if {"attention", "skip-softmax"} & set(chosen):
        queries, scale = _queries(device, filled, generator), _scale(filled)
        latent_dim = _latent_dim(layout, filled)
        if latent_dim is not None or VALUE not in filled.planes:
            if latent_dim is not None and "attention" in chosen:
                out, wanted = _latent(device, filled, queries, scale, latent_dim)
                findings += _answer(device, filled, "latent attention", compare(out, wanted, bound))
            return findings
        wanted = reference.attention(queries, filled.held[KEY], filled.held[VALUE], _all_seen(filled), scale)
        lengths = torch.full((1,), filled.length, dtype=torch.int32, device=queries.device)
        problem = PagedAttention(filled.planes[KEY], filled.planes[VALUE], filled.table, lengths)
        out = torch.full(wanted.shape, float("nan"), dtype=torch.float32, device=queries.device)
        if "attention" in chosen:
            decode(problem, queries, out)
            findings += _answer(device, filled, "decode attention", compare(out, wanted, bound))
        if "skip-softmax" in chosen:
            out.fill_(float("nan"))
            skip_softmax(problem, queries[None], out[None], 0.0)
            findings += _answer(device, filled, "skip-softmax at threshold 0", compare(out, wanted, bound))
    return findings


def _format(filled: _Filled, role: str) -> Any:
    return filled.planes[role].data.format


def _scale(filled: _Filled) -> float:
    return float(np.divide(1.0, np.sqrt(filled.planes[KEY].data.dim)))


def _queries(device: Device, filled: _Filled, generator: torch.Generator) -> Any:
    """Return the last token's queries, (1, query heads, dim)."""
    data = filled.planes[KEY].data
    drawn = 2 * torch.randn((1, data.size("head") * QUERY_GROUP, data.dim), generator=generator)
    return drawn.to(QUERY_TYPES[data.format]).to(device.kind)


def _all_seen(filled: _Filled) -> Any:
    return torch.ones((1, filled.length), dtype=torch.bool, device=filled.table.device)


def _latent_dim(layout: Layout, filled: _Filled) -> int | None:
    """Return the latent part of a latent layer's row, None for other layers and layouts without a spec."""
    spec, layer = layout.spec, filled.given.layer
    if spec is None:
        return None
    layers = (*spec.layers, *spec.draft.layers)
    kind = layers[layer] if 0 <= layer < len(layers) else None
    return kind.latent_dim if isinstance(kind, LatentLayer) else None


def _latent(device: Device, filled: _Filled, queries: Any, scale: float, latent_dim: int) -> tuple[Any, Any]:
    wanted = reference.latent_attention(queries, filled.held[KEY][:, 0], _all_seen(filled), scale, latent_dim)
    out = torch.full(wanted.shape, float("nan"), dtype=torch.float32, device=queries.device)
    lengths = torch.full((1,), filled.length, dtype=torch.int32, device=queries.device)
    rows = filled.planes[KEY]
    latent(rows, filled.table, lengths, queries[None], out[None], latent_dim=latent_dim, scale=scale)
    device.synchronize()
    return out, wanted


def _fetched(device: Device, filled: _Filled, role: str) -> Any:
    """Return what a plane gives back for the request's tokens, (tokens, heads, dim)."""
    out = torch.full(filled.held[role].shape, float("nan"), dtype=torch.float32, device=filled.table.device)
    positions = torch.arange(filled.length, dtype=torch.int32, device=filled.table.device)
    fetch(filled.planes[role], out, torch.zeros_like(positions), positions, filled.table)
    device.synchronize()
    return out


def _spot(role: str, found: Difference) -> str:
    position, head, element = found.place
    place = f"request 0, position {position}, head {head}, element {element}"
    return f"{place} reads {found.got:.4g}, {found.wanted:.4g} was written"


def _answer(device: Device, filled: _Filled, kernel: str, found: Difference) -> list[Finding]:
    """Return the finding of a wrong answer, with the first position of K or V that does not read back, or nothing."""
    if found.within:
        return []
    _, head, element = found.place
    text = f"request 0, query head {head}, element {element} is {found.got:.4g}, the reference says {found.wanted:.4g}"
    text += f" (relative L2 {found.relative_l2:.1e})"
    return [_finding(filled, kernel, text, _first_wrong(device, filled))]


def _first_wrong(device: Device, filled: _Filled) -> tuple[str, str] | None:
    """Return (role, words) of the first position that reads back something else than was written."""
    for role in filled.planes:
        got, wanted = _fetched(device, filled, role).to(torch.float64), filled.held[role]
        off = ~((got - wanted).abs() <= STORED_BOUNDS[_format(filled, role)].worst * wanted.abs() + 1e-6)
        places = off.nonzero()
        if len(places):
            position, head, element = (int(axis) for axis in places[0])
            read, written = float(got[position, head, element]), float(wanted[position, head, element])
            spot = (
                f"position {position}, head {head}, element {element} reads {read:.4g}, and {written:.4g} was written"
            )
            return role, spot
    return None


def _finding(filled: _Filled, kernel: str, text: str, spot: tuple[str, str] | None = None) -> Finding:
    given = filled.given
    message = f"layer {given.layer}'s {kernel}: {text}"
    role = KEY if VALUE not in kernel else VALUE
    if spot is not None:
        role = spot[0]
        message += f"; its {role} at {spot[1]}"
    message += f"; {formula(given, role)}"
    access = given.accesses[role]
    where = Where(
        manager=given.manager, layer=given.layer, role=role, consumer=access.consumer if access is not None else None
    )
    return Finding(rule="kernel-result", message=message, remedy=REMEDY, where=(where,))
