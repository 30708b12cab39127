"""``ContiguousStore``: no pages, no slots, no addresses; a list of rounded values for each beam, layer and role.

What every paged cache must equal, token by token.
"""

from __future__ import annotations

import torch

from ...model.layers import INDEX_POSITION, RecurrentLayer
from ...model.spec import CacheSpec
from ...sim.cache.trace import Operation, parents_of, requests_of
from .codec import rounded
from .formats import format_of, state_shape
from .store import StepRow

_Plane = tuple[int, str]


class _Line:
    """One request on one beam: tokens that were asked for and written, and what is kept of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.done = 0
        self.kept: dict[_Plane, list[torch.Tensor]] = {}
        self.states: dict[_Plane, torch.Tensor] = {}

    def copy(self) -> _Line:
        """Return a line that goes on by itself."""
        other = _Line(self.capacity)
        other.done = self.done
        other.kept = {plane: list(values) for plane, values in self.kept.items()}
        other.states = dict(self.states)
        return other


class ContiguousStore:
    """A ``Store`` without a cache; operations that only move pages do nothing, and nothing is refused."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.lines: dict[int, list[_Line]] = {}
        self.flight: list[list[StepRow]] = []

    def apply(self, operation: Operation) -> None:
        """See ``Store``."""
        kind, a, b = operation.kind, operation.a, operation.b
        if kind == "admit":
            self.lines[a] = [_Line(b)]
        elif kind == "step":
            self.flight.append(self._step(a, b))
        elif kind == "complete":
            for row in self.flight.pop(0):
                self.lines[row.request][row.beam].done = row.end
        elif kind == "extend":
            for line in self.lines[a]:
                line.capacity += b
        elif kind == "rewind":
            for line in self.lines[a]:
                line.capacity -= b
                line.done = min(line.done, line.capacity)
                line.kept = {plane: values[: line.capacity] for plane, values in line.kept.items()}
        elif kind == "fork":
            self.lines[a] = [self.lines[a][0].copy() for _ in range(b)]
        elif kind == "reorder":
            beams = self.lines[a]
            self.lines[a] = [beams[parent].copy() for parent in parents_of(b)[: len(beams)]]
        elif kind == "free":
            del self.lines[a]

    def _step(self, mask: int, chunk: int) -> list[StepRow]:
        rows = []
        for request in requests_of(mask):
            for beam, line in enumerate(self.lines.get(request, [])):
                waiting = line.capacity - line.done
                end = line.done + (min(chunk, waiting) if chunk else waiting)
                if end > line.done:
                    rows.append(StepRow(request, beam, line.done, end))
        return rows

    def rows(self) -> list[StepRow]:
        """See ``Store``."""
        return self.flight[0]

    def owner(self, layer: int, role: str) -> int | None:
        """See ``Store``; positions are kept by the first layer that has some, as in every cache."""
        layers = [*self.spec.layers, *self.spec.draft.layers]
        holders = [number for number, each in enumerate(layers) if _keeps(each, role)]
        if role == INDEX_POSITION:
            return holders[0] if holders else None
        return layer if layer in holders else None

    def put(self, row: StepRow, layer: int, role: str, position: int, values: torch.Tensor) -> None:
        """See ``Store``."""
        format = format_of(self.spec, layer, role)
        kept = self.lines[row.request][row.beam].kept.setdefault((layer, role), [])
        del kept[position:]
        kept.append(rounded(values, format))

    def get(
        self, row: StepRow, layer: int, role: str, position: int, readers: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Store``."""
        kept = torch.stack(self.lines[row.request][row.beam].kept[layer, role][: position + 1])
        return torch.arange(position + 1), kept[:, :, None].expand(-1, -1, readers, -1)

    def put_state(self, row: StepRow, layer: int, role: str, values: torch.Tensor) -> None:
        """See ``Store``."""
        format = format_of(self.spec, layer, role)
        self.lines[row.request][row.beam].states[layer, role] = rounded(values, format)

    def get_state(self, row: StepRow, layer: int, role: str, position: int) -> torch.Tensor:
        """See ``Store``."""
        shape = state_shape(self.spec, layer, role)
        if position == 0:
            return torch.zeros(shape, dtype=torch.float64)
        return self.lines[row.request][row.beam].states[layer, role]


def _keeps(layer: object, role: str) -> bool:
    if isinstance(layer, RecurrentLayer):
        return False
    return any(plane.role == role for plane in getattr(layer, "side_planes", ()))
