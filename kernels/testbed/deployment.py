"""``Deployment``: the ranks of a parallel layout, each with a cache of its own, as one ``Store``.

K and V are cut by heads, recurrent states by heads and the sections of their convolution, side planes and latent rows
are on every rank. A query head reads K and V of the rank that computes it: of several replicas each serves its share of
the group. Results are gathered by head and never added up in parts, so that a parallel layout changes no bit.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from ...model.arithmetic import exact_div
from ...model.errors import SpecError
from ...model.formats import ElementFormat
from ...model.layers import AttentionLayer, RecurrentLayer
from ...model.parallel import rank_head_range, rank_heads
from ...model.spec import CacheSpec
from ...sim.cache.trace import Operation, requests_of
from ...sim.finding import Finding
from ...sim.layout import KEY, KEY_SCALE, SSM_STATE, VALUE, VALUE_SCALE
from ...sim.registry import Allocator
from .codec import decode, encode
from .formats import format_of, layer_of, recurrent, state_shape
from .paged import PagedMemory
from .store import StepRow

_SCALES = {KEY: KEY_SCALE, VALUE: VALUE_SCALE}
_EVERYONE = ("complete", "offload", "onload")


class Deployment:
    """All ranks of ``spec.parallel`` under one allocator, each with a ``memory`` of that kind on torch's ``device``.

    Raises ``Rejected`` where the allocator refuses a rank's spec.
    """

    def __init__(
        self,
        spec: CacheSpec,
        allocator: str | Allocator,
        *,
        memory: type[PagedMemory] = PagedMemory,
        device: str = "cpu",
    ) -> None:
        if spec.parallel.cp > 1:
            raise SpecError("parallel.cp", f"found {spec.parallel.cp}, the testbed needs 1")
        self.spec = spec
        self._check_states()
        ranks = range(spec.parallel.world_size)
        self.ranks = [memory(msgspec.structs.replace(spec, rank=rank), allocator, device) for rank in ranks]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the running caches of all ranks reported so far."""
        return tuple([finding for rank in self.ranks for finding in rank.findings])

    def apply(self, operation: Operation) -> None:
        """See ``Store``; under attention-DP an operation goes to the ranks of its request."""
        for rank in range(len(self.ranks)):
            given = operation
            if self.spec.parallel.attention_dp and operation.kind == "step":
                mask = sum([1 << request for request in requests_of(operation.a) if self._serves(rank, request)])
                given = Operation("step", mask, operation.b, operation.c)
                if not mask:
                    continue
            elif operation.kind not in ("step", *_EVERYONE) and not self._serves(rank, operation.a):
                continue
            if operation.kind == "complete" and not self.ranks[rank].cache.flight:
                continue
            self.ranks[rank].apply(given)

    def rows(self) -> list[StepRow]:
        """See ``Store``. Raises ``SpecError`` where the ranks would start a request at different tokens."""
        found: dict[tuple[int, int], StepRow] = {}
        for rank in self.ranks:
            for row in rank.step.rows if rank.cache.flight else ():
                request, beam = row.sequence.request, row.beam
                mine = StepRow(request, beam, row.start, row.end)
                if found.setdefault((request, beam), mine) != mine:
                    starts = sorted({mine.start, found[request, beam].start})
                    problem = f"ranks start request {request} at different tokens, {starts[0]} and {starts[1]}"
                    raise SpecError("parallel", f"{problem}: they found different prefixes to reuse")
        return list(found.values())

    def owner(self, layer: int, role: str) -> int | None:
        """See ``Store``; a plane of a rank belongs to the first layer of that rank that has it."""
        for rank in self.ranks:
            if (layer, KEY) in rank.planes:
                if (layer, role) in rank.planes:
                    return layer
                return min([number for number, held in rank.planes if held == role], default=None)
        return None

    def put(self, row: StepRow, layer: int, role: str, position: int, values: torch.Tensor) -> None:
        """See ``Store``."""
        format = format_of(self.spec, layer, role)
        for rank in self._holders(row, layer, role):
            data, scales = encode(self._share(rank, layer, role, values), format)
            memory = self.ranks[rank]
            at = memory.row(row.request, row.beam)
            memory.put(at, layer, role, position, data)
            if scales is not None:
                memory.put(at, layer, _SCALES[role], position, scales)

    def get(
        self, row: StepRow, layer: int, role: str, position: int, readers: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Store``."""
        held = {rank: self._read(rank, row, layer, role, position) for rank in self._holders(row, layer, role)}
        positions = next(iter(held.values()))[0]
        columns = []
        for head in range(self._heads(layer, role)):
            choices = [(rank, self._local(rank, layer, role, head)) for rank in held]
            choices = [(rank, local) for rank, local in choices if local is not None]
            for reader in range(readers):
                rank, local = choices[reader * len(choices) // readers]  # floor: which replica serves this reader
                columns.append(held[rank][1][:, local])
        return positions, torch.stack(columns, dim=1).unflatten(1, (-1, readers))

    def put_state(self, row: StepRow, layer: int, role: str, values: torch.Tensor) -> None:
        """See ``Store``."""
        format = format_of(self.spec, layer, role)
        for rank in self._holders(row, layer, role):
            memory = self.ranks[rank]
            data, _ = encode(values[self._state_rows(rank, layer, role)], format)
            memory.put_state(memory.row(row.request, row.beam), layer, role, data)

    def get_state(self, row: StepRow, layer: int, role: str, position: int) -> torch.Tensor:
        """See ``Store``."""
        shape = state_shape(self.spec, layer, role)
        state = torch.zeros(shape, dtype=torch.float64)
        for rank in self._holders(row, layer, role) if position else ():
            memory = self.ranks[rank]
            data = memory.get_state(memory.row(row.request, row.beam), layer, role, first=position == row.start)
            values = decode(data, format_of(self.spec, layer, role)).reshape(-1, *shape[1:])
            state[self._state_rows(rank, layer, role)] = values
        return state

    def _serves(self, rank: int, request: int) -> bool:
        """Say whether a rank has anything to do with a request: under attention-DP its group's rank by turns."""
        parallel = self.spec.parallel
        return not parallel.attention_dp or parallel.coordinates(rank).tp_rank == request % parallel.tp

    def _holders(self, row: StepRow, layer: int, role: str) -> list[int]:
        return [
            rank
            for rank, memory in enumerate(self.ranks)
            if (layer, role) in memory.planes and self._serves(rank, row.request)
        ]

    def _heads(self, layer: int, role: str) -> int:
        kind = layer_of(self.spec, layer)
        return kind.kv_heads if isinstance(kind, AttentionLayer) and role in _SCALES else 1

    def _range(self, rank: int, layer: int, role: str) -> range:
        """Return the heads of ``role`` that a rank stores."""
        heads = self._heads(layer, role)
        if not isinstance(layer_of(self.spec, layer), AttentionLayer) or role not in _SCALES:
            return range(heads)
        parallel = self.spec.parallel
        tp_rank = 0 if parallel.attention_dp else parallel.coordinates(rank).tp_rank
        return rank_head_range(heads, parallel.attention_tp, tp_rank)

    def _local(self, rank: int, layer: int, role: str, head: int) -> int | None:
        held = self._range(rank, layer, role)
        return head - held.start if head in held else None

    def _share(self, rank: int, layer: int, role: str, values: torch.Tensor) -> torch.Tensor:
        """Return the heads of (heads, dim) that a rank stores, with zeros for padding heads."""
        held = self._range(rank, layer, role)
        share = values[held.start : held.stop]
        sharded = role in _SCALES and isinstance(layer_of(self.spec, layer), AttentionLayer)
        padding = (rank_heads(len(values), self.spec.parallel.attention_tp) if sharded else len(held)) - len(share)
        return torch.cat([share, torch.zeros((padding, values.shape[1]), dtype=values.dtype)])

    def _read(self, rank: int, row: StepRow, layer: int, role: str, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (positions, values (tokens, local heads, dim)) of one rank."""
        memory, format = self.ranks[rank], format_of(self.spec, layer, role)
        at = memory.row(row.request, row.beam)
        positions, data = memory.get(at, layer, role, position)
        heads = max(1, len(self._range(rank, layer, role)))
        if role in _SCALES and isinstance(layer_of(self.spec, layer), AttentionLayer):
            heads = rank_heads(self._heads(layer, role), self.spec.parallel.attention_tp)
        scales = None
        if format is ElementFormat.NVFP4:
            scales = memory.get(at, layer, _SCALES[role], position)[1].unflatten(1, (heads, -1))
        values = decode(data.unflatten(1, (heads, -1)), format, scales)
        return torch.from_numpy(positions.astype(np.int64)), values

    def _state_rows(self, rank: int, layer: int, role: str) -> torch.Tensor:
        """Return the heads of a temporal state, or the channels of a convolution's (q, k, v), that a rank stores."""
        kind, parallel = recurrent(self.spec, layer), self.spec.parallel
        shares = parallel.state_tp
        part = 0 if parallel.attention_dp else parallel.coordinates(rank).tp_rank
        if role == SSM_STATE:
            sections = [kind.heads]
        else:
            sections = [kind.groups * kind.state_dim] * 2 + [kind.heads * kind.head_dim]
        rows, first = [], 0
        for size in sections:
            share = exact_div(size, shares, "a section of a recurrent state")
            rows.append(torch.arange(first + part * share, first + (part + 1) * share))
            first += size
        return torch.cat(rows)

    def _check_states(self) -> None:
        shares = self.spec.parallel.state_tp
        for number, layer in enumerate(self.spec.layers):
            if isinstance(layer, RecurrentLayer) and (layer.heads % shares or layer.groups % shares):
                found = f"layer {number} has {layer.heads} heads in {layer.groups} groups over {shares} ranks"
                raise SpecError("parallel.tp", f"{found}, the testbed needs whole groups on every rank")
