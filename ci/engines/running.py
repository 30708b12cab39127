"""``EngineCache``: an installed engine's cache manager under a trace, each answer checked by a shadow of kvsan's own.

It has the face of a ``RunningCache``, so that campaigns, reductions and saved traces take it for one.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

from ...model.spec import CacheSpec
from ...sim.cache.refusal import Refused
from ...sim.cache.sequence import token_of
from ...sim.cache.trace import TEXTS, Operation, requests_of, words
from ...sim.engines.lifecycle import BlockShadow, Part, Request, State, blocks_of, null_blocks, read_state
from ...sim.rejection import Rejected
from .installed import ask, named
from .supervisor import EngineEnded, EngineProcess

LONGEST_TOKENS: Final = 256
"""Tokens of a request at most; a trace that asks for more is refused."""
MOST_SLOTS: Final = 4096
MOST_ROWS: Final = 1 << 22
"""Slots, and tokens in all of them, that a manager is opened for: it tells each of them after every operation."""
FLIGHT: Final = 2
_NUMBERS = itertools.count(1)


def refuse_many(spec: CacheSpec) -> None:
    """Raise ``Rejected`` for a spec with more slots than a trace over an engine's manager takes."""
    slots = spec.slots or 0
    if slots > MOST_SLOTS or slots * spec.tokens_per_block > MOST_ROWS:
        raise Rejected(
            f"a trace over an engine takes at most {MOST_SLOTS} slots and {MOST_ROWS} tokens in them, found {slots} "
            f"slots of {spec.tokens_per_block} tokens",
            "give the spec fewer slots",
            supported=False,
        )


class EngineCache:
    """A manager opened for one trace; ``apply`` is all that a trace needs.

    ``opening`` is the question that plans for it. Raises ``Rejected`` where the engine does not open it.
    """

    def __init__(self, process: EngineProcess, opening: dict[str, Any]) -> None:
        self._process = process
        self._id = next(_NUMBERS)
        self._admitted = 0
        self.shadow = self.new_shadow(named(process))
        answer = ask(process, {**opening, "cache": "open", "id": self._id})
        self.state = self.read(answer)
        self.requests: dict[int, Request] = {}
        self.flight: list[set[int]] = []
        self.seen: set[str] = set()
        self._before: dict[int, tuple[tuple[int, ...], ...]] = {}

    def new_shadow(self, engine: str) -> BlockShadow:
        """Return the shadow that checks this kind of manager."""
        return BlockShadow(engine)

    def read(self, answer: dict[str, Any]) -> State:
        """Return the state that the manager answers."""
        return read_state(answer, self.shadow.engine)

    def wanted(self, request: Request, part: Part, chunk: int) -> tuple[int, int]:
        """Return the first token that a step has to take of a request, and how many."""
        begins = request.computed if request.running else part.hit
        waiting = len(request.contents) - begins
        return begins, min(waiting, chunk) if chunk else waiting

    @property
    def crowd(self) -> int:
        """Groups that draw block ids from the one queue."""
        return max(1, len(self.state.groups))

    def apply(self, number: int, operation: Operation) -> Refused | None:
        """Do one operation; return the refusal, None when it was done."""
        try:
            self._do(operation)
        except Refused as refusal:
            return refusal
        except (EngineEnded, Rejected) as end:
            message = end.message if isinstance(end, Rejected) else str(end)
            self.shadow.report(
                "unexplained-rejection",
                f"{message}, asked to {words(operation)}",
                "report the saved case to the engine",
            )
        return None

    def _do(self, operation: Operation) -> None:
        kind, a, b = operation.kind, operation.a, operation.b
        if kind == "admit":
            self._admit(a, b, operation.c)
        elif kind == "step":
            self._step(requests_of(a), b)
        elif kind == "complete":
            if not self.flight:
                raise Refused("no-step", "no step is in flight")
            self.flight.pop(0)
            self._ask("complete")
        elif kind in ("extend", "free", "suspend", "resume"):
            self._do_with(kind, a, b)
        else:
            raise Refused("not-supported", f"{self.shadow.engine} has no {kind}")

    def _do_with(self, kind: str, number: int, tokens: int) -> None:
        request = self.requests.get(number)
        if request is None:
            raise Refused("unknown-request", f"request {number} is not there: admit it first")
        if kind == "resume":
            if not request.suspended:
                raise Refused("not-suspended", f"request {number} is not suspended")
            request.suspended = False
        elif kind == "free":
            if any(number in step for step in self.flight):
                self.seen.add("free under a step")
            del self.requests[number]
            self._ask("free", request=number)
        elif request.suspended:
            raise Refused("suspended", f"request {number} is suspended: resume it first")
        elif kind == "suspend":
            self._preempted(number)
            request.suspended = True
            self._ask("preempt", request=number)
        else:
            self._extend(number, request, tokens)

    def _admit(self, number: int, tokens: int, text: int) -> None:
        if number in self.requests:
            raise Refused("known-request", f"request {number} is there already")
        if not tokens:
            raise Refused("no-tokens", "a prompt of 0 tokens")
        self.requests[number] = Request(self.shadow.contents.prompt(text, tokens), text)
        self._admitted += 1
        scope = text // TEXTS  # floor: texts are numbered scope by scope
        self._ask(
            "admit",
            request=number,
            tokens=[token_of(text, position) for position in range(tokens)],
            salt=f"scope {scope}" if scope else None,
            unique=self._admitted,
        )

    def _extend(self, number: int, request: Request, tokens: int) -> None:
        if not tokens:
            raise Refused("no-tokens", "an extension by 0 tokens")
        first = len(request.contents)
        if first + tokens > LONGEST_TOKENS:
            raise Refused("table-width", f"request {number} would have {first + tokens} tokens")
        added = [token_of(request.text, position) for position in range(first, first + tokens)]
        for token in added:
            request.contents.append(self.shadow.contents.next(request.contents[-1], token))
        self._ask("extend", request=number, tokens=added)

    def _step(self, numbers: tuple[int, ...], chunk: int) -> None:
        if len(self.flight) >= FLIGHT:
            raise Refused("steps-in-flight", "two steps are in flight")
        ready = [
            number
            for number in numbers
            if number in self.requests
            and not self.requests[number].suspended
            and self.requests[number].computed < len(self.requests[number].contents)
        ]
        if not ready:
            raise Refused("nothing-waits", "no named request has a token waiting")
        cached = {key for _, _, key in self.state.cached}
        state = self._answer("step", requests=ready, chunk=chunk)
        for number in state.preempted:
            self.seen.add("preempted for room")
            self._preempted(number)
        self._check_parts(state, ready, chunk)
        self._note(state, cached)
        self.shadow.step(state, self.requests)
        self.state = state
        if not state.scheduled:
            if not state.preempted:
                self.check_refusal(state, ready)
            raise Refused("no-room", "the engine schedules none of the requests")
        self.flight.append({part.request for part in state.scheduled})
        if len(self.flight) == FLIGHT:
            self.seen.add("two steps in flight")

    def _preempted(self, number: int) -> None:
        request = self.requests[number]
        self._before[number] = dict(self.state.tables).get(number, ())
        request.computed, request.running = 0, False

    def _check_parts(self, state: State, ready: list[int], chunk: int) -> None:
        """Check what a step takes against what waits: no token twice, none left out, a hit before the last one."""
        for part in state.scheduled:
            request = self.requests.get(part.request)
            if request is None or part.request not in ready:
                raise EngineEnded(f"{self.shadow.engine} scheduled request {part.request}, which has nothing waiting")
            begins, count = self.wanted(request, part, chunk)
            if (part.start, part.count) != (begins, count) or part.count < 1:
                self.shadow.report(
                    "freshness",
                    f"request {part.request} has {len(request.contents)} tokens, {begins} of them computed or cached, "
                    f"and {part.count} are computed from token {part.start} on",
                    "compute each token once, after those before it, and the last one always",
                )
            request.running = True

    def check_refusal(self, state: State, ready: list[int]) -> None:
        """Report a step that takes up nobody, where there are blocks for all tokens of the first that could go on."""
        first = next((number for number in ready if self.requests[number].running), ready[0])
        rows = dict(state.tables).get(first, ())
        held = sum(block != state.null for row in rows for block in row)
        needed = sum(blocks_of(len(self.requests[first].contents), group) for group in state.groups)
        if needed - held <= state.free_count:
            self.shadow.report(
                "capacity",
                f"request {first} needs at most {needed - held} more blocks, {state.free_count} are free, and the step "
                "takes up nobody",
                "refuse a request only where blocks are missing, and give back what nobody holds",
            )

    def _note(self, state: State, cached: set[str]) -> None:
        tables = dict(state.tables)
        for part in state.scheduled:
            if part.hit:
                self.seen.add("full-block hit")
            if part.start + part.count < len(self.requests[part.request].contents):
                self.seen.add("prompt in chunks")
            before = self._before.pop(part.request, None)
            if before is not None and any(before) and before != tables[part.request]:
                self.seen.add("resume in other slots")
        if cached - {key for _, _, key in state.cached}:
            self.seen.add("eviction")
        if any(state.groups[group].window is not None for group in null_blocks(state)):
            self.seen.add("window passed")

    def _ask(self, what: str, **arguments: object) -> None:
        """Ask for an operation that computes nothing, and check what it leaves behind."""
        self.state = self._answer(what, **arguments)
        self.shadow.check(self.state, self.requests)

    def _answer(self, what: str, **arguments: object) -> State:
        answer = ask(self._process, {"cache": what, "id": self._id, **arguments})
        return self.read(answer)
