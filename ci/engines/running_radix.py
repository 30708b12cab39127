"""``RadixEngineCache``: an engine that hands out slots of tokens and shares prefixes in a radix tree, under a trace."""

from __future__ import annotations

from typing import Any

from ...model.arithmetic import round_up
from ...sim.engines.lifecycle import BlockShadow, Part, Request, State
from ...sim.engines.radix import RadixShadow, pages_of, radix_state, read_radix_state
from .running import EngineCache
from .supervisor import EngineProcess


class RadixEngineCache(EngineCache):
    """Prompts are computed in chunks of whole pages, then each step decodes one token of a request.

    A request that is taken up anew has what it had decoded as a part of its prompt.
    """

    def __init__(self, process: EngineProcess, opening: dict[str, Any]) -> None:
        self._prompts: dict[int, int] = {}
        super().__init__(process, opening)

    def new_shadow(self, engine: str) -> BlockShadow:
        """Return the shadow of slots, pages and the tree."""
        return RadixShadow(engine)

    def read(self, answer: dict[str, Any]) -> State:
        """Return the state that allocators and tree answer."""
        return read_radix_state(answer, self.shadow.engine)

    def _step(self, numbers: tuple[int, ...], chunk: int) -> None:
        super()._step(numbers, round_up(chunk, radix_state(self.state).tokens))

    def wanted(self, request: Request, part: Part, chunk: int) -> tuple[int, int]:
        """Return what is left of a prompt, a chunk of it at most, or the next token."""
        if not request.running:
            self._prompts[part.request] = len(request.contents)
        begins = request.computed if request.running else part.hit
        left = self._prompts[part.request] - begins
        if left <= 0:
            return begins, 1
        return begins, min(left, chunk) if chunk else left

    def check_refusal(self, state: State, ready: list[int]) -> None:
        """Report a step that takes up nobody, where there are pages for all tokens of any that could go on."""
        state = radix_state(state)
        tables = dict(state.tables)
        missing = []
        for number in ready:
            pages = pages_of(len(self.requests[number].contents), state)
            rows = tables.get(number, ((),) * len(state.groups))
            missing += [
                max(0, pages - sum(block != state.null for block in row)) - state.room(group)
                for group, row in enumerate(rows)
            ]
        if max(missing) <= 0:
            self.shadow.report(
                "capacity",
                f"each of the requests {', '.join(map(str, ready))} has pages enough that are free or may be evicted, "
                "and the step takes up nobody",
                "refuse a request only where pages are missing, and give back what nobody holds",
            )
