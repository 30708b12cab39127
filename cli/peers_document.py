"""The JSON document of a pair: what every rank registers, what is moved, and what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..model.arithmetic import InexactDivision
from ..sim.layout import Layout
from ..sim.rejection import Rejected
from ..sim.transfer.declaration import View
from ..sim.transfer.planning import bytes_moved
from ..sim.transfer.registering import register

if TYPE_CHECKING:
    from .peers_run import JudgedPair, Side


def document_of(judged: JudgedPair) -> dict[str, Any]:
    """Return the document of one pair: plain numbers that an executor can follow."""
    verdict = judged.verdict
    rejection = verdict.rejection
    return {
        "status": verdict.status,
        "source": _side(judged.source, verdict.source),
        "destination": _side(judged.destination, verdict.destination),
        "bytes": bytes_moved(verdict.plan),
        "copies": verdict.plan.copies,
        "findings": verdict.findings,
        "rejection": None
        if rejection is None
        else {
            "side": verdict.side,
            "rule": rejection.rule,
            "message": rejection.message,
            "remedy": rejection.remedy,
            "where": rejection.where,
            "supported": rejection.supported,
        },
    }


def _side(side: Side, layouts: tuple[Layout, ...]) -> dict[str, Any]:
    return {
        "layout": side.spec.parallel.name,
        "allocator": side.allocator.name,
        "spec": side.spec,
        "dp": side.dp,
        "ranks": [_rank(layout) for layout in layouts],
    }


def _rank(layout: Layout) -> dict[str, Any]:
    """Return what one rank registers, or why it cannot."""
    rank = 0 if layout.spec is None else layout.spec.rank
    document: dict[str, Any] = {"rank": rank, "pools": layout.pools}
    try:
        registration = register(layout)
    except (Rejected, InexactDivision) as error:
        return document | {"views": [], "regions": [], "refused": str(error)}
    return document | {"views": [_view(view) for view in registration.views], "regions": registration.regions}


def _view(view: View) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.structs.asdict(view)
    document["role_layout"] = msgspec.structs.asdict(view.role_layout)
    document["entries"] = [
        {
            "layer": entry.layer,
            "role": entry.role,
            "offset_bytes": entry.offset_bytes,
            "size_bytes": entry.size_bytes,
            "layers": entry.layers,
        }
        for entry in view.entries
    ]
    return document
