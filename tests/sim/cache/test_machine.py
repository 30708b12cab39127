"""A Hypothesis state machine over the sound caches: for development, where Hypothesis's own shrinking is at hand."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsan.sim.cache.content import logical_content
from kvsan.sim.cache.managers import running_cache
from kvsan.sim.cache.sequence import root_of, token_of
from kvsan.sim.cache.trace import Operation
from kvsan.strategies.worlds import worlds_for

REQUESTS = st.integers(0, 2)
TOKENS = st.integers(1, 5)


class CacheMachine(RuleBasedStateMachine):
    """Drives one cache, with a model of its own: the tokens of every request that has one beam."""

    allocator = "trtllm-v2"

    @initialize(world=st.integers(0, 255), tokens=st.integers(1, 4), slots=st.sampled_from([4, 8, 16]))
    def begin(self, world, tokens, slots) -> None:
        worlds = worlds_for(self.allocator)
        spec = msgspec.structs.replace(worlds[world % len(worlds)].spec, tokens_per_block=tokens, slots=slots)
        self.cache = running_cache(spec, self.allocator)
        self.count = 0
        self.lengths: dict[int, tuple[int, int]] = {}

    def do(self, kind: str, *arguments: int) -> bool:
        refusal = self.cache.apply(self.count, Operation(kind, *arguments))
        self.count += 1
        return refusal is None

    @rule(request=REQUESTS, tokens=TOKENS, text=st.sampled_from([0, 1, 2, 3, 8, 9]))
    def admit(self, request, tokens, text) -> None:
        if self.do("admit", request, tokens, text):
            self.lengths[request] = (text, tokens)

    @rule(request=REQUESTS, tokens=TOKENS)
    def extend(self, request, tokens) -> None:
        if self.do("extend", request, tokens):
            text, length = self.lengths[request]
            self.lengths[request] = (text, length + tokens)

    @rule(request=REQUESTS, tokens=TOKENS)
    def rewind(self, request, tokens) -> None:
        if self.do("rewind", request, tokens):
            text, length = self.lengths[request]
            self.lengths[request] = (text, length - tokens)

    @rule(mask=st.integers(1, 7), chunk=st.integers(0, 3), padding=st.integers(0, 1))
    def step(self, mask, chunk, padding) -> None:
        self.do("step", mask, chunk, padding)

    @rule()
    def complete(self) -> None:
        self.do("complete")

    @rule(request=REQUESTS)
    def commit(self, request) -> None:
        self.do("commit", request)

    @rule(request=REQUESTS, beams=st.integers(2, 4))
    def fork(self, request, beams) -> None:
        self.do("fork", request, beams)

    @rule(request=REQUESTS, parents=st.integers(0, 255))
    def reorder(self, request, parents) -> None:
        self.do("reorder", request, parents)

    @rule(request=REQUESTS)
    def free(self, request) -> None:
        if self.do("free", request):
            del self.lengths[request]

    @rule(request=REQUESTS, kind=st.sampled_from(["suspend", "resume"]))
    def suspend(self, request, kind) -> None:
        self.do(kind, request)

    @rule(pages=st.integers(0, 2), kind=st.sampled_from(["offload", "onload"]))
    def move(self, pages, kind) -> None:
        self.do(kind, pages)

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.shadow.findings == []

    @invariant()
    def requests_and_lengths_are_the_models(self) -> None:
        if hasattr(self, "cache"):
            found = {number: entry.capacity for number, entry in self.cache.sequences.items()}
            assert found == {number: length for number, (_, length) in self.lengths.items()}

    @invariant()
    def memory_holds_the_texts(self) -> None:
        """What the views show of a request with one beam is its text, numbered prefix by prefix."""
        if not hasattr(self, "cache"):
            return
        recurrent = {
            (self.cache.geometry.targets[number].layer, self.cache.geometry.targets[number].role)
            for cycle in self.cache.recurrent
            for number in cycle.read_cells.tolist()
        }
        for (request, _, layer, role), tokens in logical_content(self.cache).items():
            sequence = self.cache.sequences[request]
            if sequence.beams > 1 or (layer, role) in recurrent:
                continue
            text, before = self.lengths[request][0], root_of(self.lengths[request][0])
            for position, token in enumerate(tokens):
                before = self.cache.contents.next(before, token_of(text, position))
                assert token in (None, before)


class CacheMachineV1(CacheMachine):
    allocator = "trtllm-v1"


TestV2 = CacheMachine.TestCase
TestV1 = CacheMachineV1.TestCase
TestV1.settings = TestV2.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
