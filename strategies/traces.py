"""Traces for campaigns: the length first, then operations of at most four choices, every choice below 256.

Which operation comes next is chosen among those that are likely to do something, by a rough account of which requests
are there; one in sixteen is drawn from all, so that refusals are met too. Small choices mean simple operations.
"""

from __future__ import annotations

from typing import Final

import msgspec
from hypothesis import strategies as st

from ..model.arithmetic import div_up
from ..sim.cache.trace import Kind, Operation, Trace
from .worlds import SLOTS, TOKENS_PER_BLOCK, World, worlds_for

REQUESTS: Final = 3
_BYTE: Final = st.integers(0, 255)
_ANY: Final = 246
"""Choices of an operation from here on pick from all of them."""

LENGTHS: Final = tuple([1 + choice if choice < 192 else 192 + 16 * (choice - 191) for choice in range(256)])
"""Operations of a trace by choice: 1 to 192, then in steps up to 1,216."""
_TOKENS: Final = (1, 2, 3, 4, 1, 5, 2, 7, 3, 1, 6, 2, 9, 1, 12, 0)
_TEXTS: Final = (0, 1, 0, 2, 0, 8, 3, 0, 4, 1, 0, 10, 5, 0, 2, 7)
_CHUNKS: Final = (0, 0, 1, 0, 0, 2, 0, 3)
_PADDING: Final = (0, 0, 0, 1)
_BEAMS: Final = (2, 3, 4, 2, 4, 2, 3, 1)


class _Account:
    """What a trace's requests are likely to be at, as if every operation were done.

    ``waiting``, ``running`` and ``fresh`` are tokens by request: with room and not dispatched, dispatched and not
    completed, and written since the last commit.
    """

    def __init__(self, kinds: tuple[Kind, ...], world: World, slots: int, block_tokens: int) -> None:
        self.kinds = kinds
        self.common = "suspend" not in kinds
        self.block_tokens = block_tokens
        self.blocks = slots // world.crowd  # floor: a rough account
        self.held = [0] * REQUESTS
        self.capacity = [0] * REQUESTS
        self.beams = [1] * REQUESTS
        self.live: list[int] = []
        self.suspended: list[int] = []
        self.forked: list[int] = []
        self.waiting = [0] * REQUESTS
        self.fresh = [0] * REQUESTS
        self.flight: list[dict[int, int]] = []
        self.stored = 0

    def running(self, request: int) -> int:
        """Return the tokens of a request that are in flight."""
        return sum(step.get(request, 0) for step in self.flight)

    def likely(self) -> list[Kind]:
        """Return operations that are likely to do something, the more useful ones several times."""
        kinds: list[Kind] = []
        live = self.live
        if len(live) + len(self.suspended) < REQUESTS:
            kinds += ["admit", "admit"] if live else ["admit", "admit", "admit", "admit"]
        if any(self.waiting[request] for request in live) and len(self.flight) < 2:
            kinds += ["step", "step", "step", "step"]
        if self.flight:
            kinds += ["complete", "complete", "complete"]
        if live:
            kinds += ["extend", "extend", "free"]
            if any(self.fresh[request] for request in live):
                kinds += ["commit", "commit"]
            if self.fitting("rewind"):
                kinds.append("rewind")
            if any(self._quiet(request) for request in live):
                kinds += ["fork"] if len(self.forked) < len(live) else []
                kinds += ["reorder", "reorder"] if self.forked else []
            kinds += [] if self.common else ["suspend"]
        if self.suspended:
            kinds += ["resume", "resume", "offload"]
        if self.stored:
            kinds += ["offload", "onload"]
        return [kind for kind in kinds if kind in self.kinds]

    def _take(self, request: int, tokens: int) -> bool:
        """Take room for ``tokens`` more tokens, where there is."""
        capacity = self.capacity[request] + tokens
        held = div_up(capacity, self.block_tokens) * self.beams[request]
        if sum(self.held) - self.held[request] + held > self.blocks:
            return False
        self.held[request], self.capacity[request] = held, capacity
        return True

    def _quiet(self, request: int) -> bool:
        return not self.waiting[request] and not self.running(request)

    def fitting(self, kind: Kind) -> list[int]:
        """Return the requests that an operation is likely to work on."""
        live = self.live
        if kind == "admit":
            return [number for number in range(REQUESTS) if number not in live + self.suspended]
        if kind == "resume":
            return self.suspended
        if kind == "commit":
            return [request for request in live if self.fresh[request]]
        if kind == "rewind":
            return [request for request in live if self.fresh[request] or self.running(request)]
        if kind == "fork":
            return [request for request in live if self._quiet(request) and request not in self.forked]
        if kind == "reorder":
            return [request for request in self.forked if self._quiet(request)]
        return live

    def note_step(self, mask: int, chunk: int) -> None:
        """Take a step into account."""
        taken = {}
        for request in self.live:
            if mask >> request & 1 and self.waiting[request] > 0:
                taken[request] = min(self.waiting[request], chunk) if chunk else self.waiting[request]
                self.waiting[request] -= taken[request]
        if taken and len(self.flight) < 2:
            self.flight.append(taken)

    def note_complete(self) -> None:
        """Take the completion of a step into account."""
        if self.flight:
            for request, tokens in self.flight.pop(0).items():
                self.fresh[request] += tokens

    def note(self, kind: Kind, request: int, tokens: int) -> None:
        """Take any other operation into account."""
        if kind == "admit" and request not in self.live + self.suspended:
            self.capacity[request], self.beams[request] = 0, 1
            if self._take(request, tokens):
                self.live.append(request)
                self.waiting[request], self.fresh[request] = tokens, 0
        elif kind == "extend" and request in self.live and self._take(request, tokens):
            self.waiting[request] += tokens
        elif kind == "rewind":
            self.waiting[request] = max(0, self.waiting[request] - tokens)
        elif kind == "commit":
            self.fresh[request] = 0
            self.stored += 1
        elif kind == "fork" and request in self.live and request not in self.forked:
            self.beams[request] = tokens
            self.forked += [request] if self._take(request, 0) else []
            self.beams[request] = tokens if request in self.forked else 1
        elif kind == "suspend" and request in self.live:
            self.live.remove(request)
            self.suspended.append(request)
        elif kind == "resume" and request in self.suspended:
            self.suspended.remove(request)
            self.live.append(request)
        elif kind == "free":
            self.held[request] = 0
            for members in (self.live, self.suspended, self.forked):
                if request in members:
                    members.remove(request)
            for step in self.flight:
                step.pop(request, None)
            self.stored += self.common


def traces(allocator: str = "trtllm-v2", *, max_operations: int = LENGTHS[-1]) -> st.SearchStrategy[Trace]:
    """Return traces for ``allocator`` of 1 to ``max_operations`` operations (at most 1,216)."""
    from ..sim.cache.managers import kinds_of

    return _traces(worlds_for(allocator), kinds_of(allocator), max_operations)


@st.composite
def _traces(draw: st.DrawFn, worlds: tuple[World, ...], kinds: tuple[Kind, ...], max_operations: int) -> Trace:
    world = worlds[draw(_BYTE) % len(worlds)]
    choice = draw(_BYTE)
    tokens, slots = TOKENS_PER_BLOCK[choice & 3], SLOTS[choice >> 2 & 7]
    count = min(LENGTHS[draw(_BYTE)], max_operations)
    account = _Account(kinds, world, slots, tokens)
    operations = tuple([_operation(draw, account) for _ in range(count)])
    return Trace(spec=msgspec.structs.replace(world.spec, tokens_per_block=tokens, slots=slots), operations=operations)


def _operation(draw: st.DrawFn, account: _Account) -> Operation:
    choice = draw(_BYTE)
    if choice >= _ANY:
        kind: Kind = account.kinds[choice % len(account.kinds)]
    else:
        likely = account.likely()
        kind = likely[choice % len(likely)]
    if kind == "complete":
        account.note_complete()
        return Operation("complete")
    if kind in ("offload", "onload"):
        return Operation(kind, draw(_BYTE) & 3)
    if kind == "step":
        mask = draw(_BYTE)
        mask = 7 if mask & 8 else mask & 7 or 7
        limits = draw(_BYTE)
        chunk = _CHUNKS[limits & 7]
        account.note_step(mask, chunk)
        return Operation("step", mask, chunk, _PADDING[limits >> 3 & 3])
    choice = draw(_BYTE)
    fitting = account.fitting(kind)
    request = choice % REQUESTS if not fitting or choice >= _ANY else fitting[choice % len(fitting)]
    tokens = _TOKENS[draw(_BYTE) & 15] if kind in ("admit", "extend", "rewind") else 0
    tokens = _BEAMS[draw(_BYTE) & 7] if kind == "fork" else tokens
    account.note(kind, request, tokens)
    if kind == "admit":
        return Operation("admit", request, tokens, _TEXTS[draw(_BYTE) & 15])
    if kind in ("extend", "rewind"):
        return Operation(kind, request, tokens)
    if kind == "fork":
        return Operation("fork", request, tokens)
    if kind == "reorder":
        return Operation("reorder", request, draw(_BYTE))
    return Operation(kind, request)
