"""``PagedMemory``: the running cache of one rank with values in its bytes.

The running cache decides which slot holds what; here lie the bytes. A token is written through the address formula of
the consumer that writes its role and read through that of the view that reads it (``sim.cache.geometry``), with the
slots that the step's own page table names. Copies, fills and clears of the cache move the same bytes. Fresh and freed
memory is 0xFF, NaN in every format that has one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ...model.errors import SpecError
from ...model.spec import CacheSpec
from ...sim.cache.geometry import CycleGeometry, Geometry, Indices
from ...sim.cache.ledger import Ledger
from ...sim.cache.managers import running_cache
from ...sim.cache.shadow import Shadow
from ...sim.cache.steps import Row, Step
from ...sim.cache.trace import Operation
from ...sim.finding import Finding
from ...sim.registry import Allocator

POISON: Final = 0xFF


class _ValueShadow(Shadow):
    """A shadow whose every copy, fill and clear happens to ``memory`` as well."""

    def __init__(self, geometry: Geometry, device: str) -> None:
        super().__init__(geometry)
        self.memory = torch.full((geometry.size_bytes,), POISON, dtype=torch.uint8, device=device)

    def fill(self, rows: Indices, poison: int) -> None:
        super().fill(rows, poison)
        self.memory[torch.from_numpy(rows)] = POISON

    def clear(self, start: int, count: int) -> None:
        super().clear(start, count)
        self.memory[start : start + count] = 0

    def copy(self, source: Indices, target: Indices) -> None:
        super().copy(source, target)
        self.memory[torch.from_numpy(target)] = self.memory[torch.from_numpy(source)]


class _Plane:
    """One role of one layer: its life cycle, and a row of flat byte indices for each (slot, token)."""

    def __init__(self, cycle: CycleGeometry, place: int, target: int) -> None:
        self.cycle = cycle
        self.place = place
        self.write = cycle.write[:, cycle.write_cells == target]
        self.read = cycle.read[:, cycle.read_cells == target]


class PagedMemory:
    """One rank: slots, tables and bytes, the bytes on torch's ``device``; what is read comes back to the host."""

    def __init__(self, spec: CacheSpec, allocator: str | Allocator, device: str = "cpu") -> None:
        self.cache = running_cache(spec, allocator)
        geometry = self.cache.geometry
        self._shadow = _ValueShadow(geometry, device)
        self.cache.shadow = self._shadow
        self.cache.ledger = Ledger(geometry, self._shadow)
        self._operations = 0
        paged = [cycle.cycle for cycle in self.cache.paged]
        self.planes: dict[tuple[int, str], _Plane] = {}
        for number, target in enumerate(geometry.targets):
            cycle = geometry.cycles[geometry.layout.buffers[target.buffer].life_cycle]
            place = -1 if cycle.recurrent else paged.index(cycle.cycle)
            self.planes[target.layer, target.role] = _Plane(cycle, place, number)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the running cache reported so far."""
        return tuple(self._shadow.findings)

    def apply(self, operation: Operation) -> None:
        """Do one operation; raise ``Refused`` if it cannot be done."""
        refused = self.cache.apply(self._operations, operation)
        self._operations += 1
        if refused is not None:
            raise refused

    @property
    def step(self) -> Step:
        """The oldest step in flight."""
        return self.cache.flight[0]

    def row(self, request: int, beam: int) -> Row:
        """Return the row of one request and beam in the oldest step."""
        for row in self.step.rows:
            if (row.sequence.request, row.beam) == (request, beam):
                return row
        raise SpecError("step", f"found no row of request {request}, beam {beam}")

    def put(self, row: Row, layer: int, role: str, position: int, data: torch.Tensor) -> None:
        """Write the bytes of one token, in the order of the page's axes; a token without a page is lost."""
        plane = self.planes[layer, role]
        code = self._codes(plane.cycle, row.seat, np.array([position]))[0]
        if code >= 0:
            self._write(plane.write[code], data)

    def get(self, row: Row, layer: int, role: str, position: int) -> tuple[NDArray[np.int64], torch.Tensor]:
        """Return (positions, bytes (tokens, bytes)) of what the query at ``position`` can attend to, itself included.

        Positions without a page read poison.
        """
        positions, found = self._found(row, layer, role, position)
        data = self._shadow.memory[torch.from_numpy(self.planes[layer, role].read[np.maximum(found, 0)])].cpu()
        data[torch.from_numpy(found < 0)] = POISON
        return positions, data

    def _found(self, row: Row, layer: int, role: str, position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (positions, rows of the address table) of what the query at ``position`` can attend to."""
        plane = self.planes[layer, role]
        positions, codes = [], []
        for seat, first, events in (*row.reads[plane.place], (row.seat, row.start, range(row.start, position + 1))):
            places = np.arange(first, first + len(events))
            positions.append(places)
            codes.append(self._codes(plane.cycle, seat, places))
        return np.concatenate(positions), np.concatenate(codes)

    def bytes_as(self, dtype: torch.dtype, width: int) -> torch.Tensor:
        """Return all bytes as numbers of ``dtype``, of ``width`` bytes; a last shorter piece is left out."""
        memory = self._shadow.memory
        return memory[: len(memory) - len(memory) % width].view(dtype)

    def put_state(self, row: Row, layer: int, role: str, data: torch.Tensor) -> None:
        """Write a row's new recurrent state to the slot that the table names for it."""
        plane = self.planes[layer, role]
        entries = self.step.table.get((plane.cycle.cycle, row.seat))
        if entries is not None:
            self._write(plane.write[entries[1]], data)

    def get_state(self, row: Row, layer: int, role: str, *, first: bool) -> torch.Tensor:
        """Return the bytes of a row's state: at its ``first`` token from where the table says that the state was."""
        plane = self.planes[layer, role]
        entries = self.step.table.get((plane.cycle.cycle, row.seat), [0, 0])
        return self._shadow.memory[torch.from_numpy(plane.read[entries[0 if first else 1]])].cpu()

    def _codes(self, cycle: CycleGeometry, seat: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of the address table for each position, -1 where the page table names no slot."""
        entries = np.array([*self.step.table.get((cycle.cycle, seat), []), -1])
        blocks = np.minimum(positions // cycle.tokens, len(entries) - 1)  # floor: the block of a position
        slots = entries[blocks]
        held = (slots >= 0) & (slots * cycle.tokens < len(cycle.read))
        codes: NDArray[np.int64] = np.where(held, slots * cycle.tokens + positions % cycle.tokens, -1)
        return codes

    def _write(self, places: Indices, data: torch.Tensor) -> None:
        """Write bytes where their consumer's formula leads; what would leave its pool (index 0) is not written."""
        inside = places > 0
        memory = self._shadow.memory
        memory[torch.from_numpy(places[inside])] = data.flatten()[torch.from_numpy(inside)].to(memory.device)
