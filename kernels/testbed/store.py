"""``Store``: where the model keeps what it must remember, whoever implements it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ...sim.cache.trace import Operation


class StepRow(NamedTuple):
    """One request and beam of the step that was dispatched: tokens ``start`` to ``end`` are to be computed."""

    request: int
    beam: int
    start: int
    end: int


class Store(Protocol):
    """What the model asks of a cache. Values are float64; what comes back was rounded to the stored format."""

    def apply(self, operation: Operation) -> None:
        """Do an operation of a trace (admit, extend, step, complete, fork, ...); raise ``Refused`` if it cannot be."""

    def rows(self) -> list[StepRow]:
        """Return the rows of the oldest step in flight."""

    def owner(self, layer: int, role: str) -> int | None:
        """Return the layer in whose buffers ``layer`` keeps ``role``, None where nobody does."""

    def put(self, row: StepRow, layer: int, role: str, position: int, values: torch.Tensor) -> None:
        """Store one token's ``values`` (heads, dim)."""

    def get(
        self, row: StepRow, layer: int, role: str, position: int, readers: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (positions, values) of what the query at ``position`` finds: values (tokens, heads, readers, dim).

        ``readers`` query heads share a KV head; each reads from the rank that computes it.
        """

    def put_state(self, row: StepRow, layer: int, role: str, values: torch.Tensor) -> None:
        """Store the recurrent state after a token: (heads, dim, states), or (channels, taps)."""

    def get_state(self, row: StepRow, layer: int, role: str, position: int) -> torch.Tensor:
        """Return the state before the token at ``position``; zeros before the first one."""
