"""What every allocator of an installed engine can do: lay out by the engine, and compare that with its model."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from ...model.errors import SpecError
from ...model.spec import CacheSpec
from ...sim.engines.difference import differences
from ...sim.layout import Layout
from ...sim.registry import Allocator
from ...sim.rejection import Rejected
from .installed import Installed, named, python_of, warm_process
from .supervisor import AHEAD, EngineEnded, EngineProcess

DIFFERENT: Final = ("differ", "only-model-refuses", "only-engine-fails", "unexplained")
"""The kinds of comparison that are no agreement."""

NO_MEMORY: Final = "give a larger quota"
"""The remedy that marks a refusal for want of memory, which models do not count."""


class Comparison(msgspec.Struct, frozen=True):
    """What came of a spec: ``agree``, ``both-refuse``, ``no-memory``, ``unasked`` (the model's support ends there), or
    one of ``DIFFERENT``.

    ``only-model-refuses`` is a latent hole in the engine or a gap of the model, ``unexplained`` a refusal by both for
    which the engine gives no reason. ``rule`` is what the engine's refusal breaks, None where it did not refuse.
    """

    kind: str
    sentences: tuple[str, ...] = ()
    rule: str | None = None


class EngineAllocator:
    """The allocator called ``name``: lays a spec out by an installed engine's own code, in its warm process.

    What the model does not know is not asked. Whatever the engine then raises is its fault, unless its model refuses
    the spec too and the engine says why: an error that explains itself is ``rejected``, any other and the end of the
    process ``unexplained-rejection``. ``process`` is the engine's, None for the one that this process keeps warm.
    """

    def __init__(self, name: str, process: EngineProcess | None = None) -> None:
        self.name = name
        self._process = process

    @property
    def installed(self) -> Installed:
        """How the engine is found."""
        raise NotImplementedError

    def ready(self) -> None:
        """Raise ``SpecError``, saying how to get it, where no engine is found; it is not started yet."""
        if self._process is None:
            python_of(self.installed)

    @property
    def process(self) -> EngineProcess:
        """The engine's process."""
        return warm_process(self.installed) if self._process is None else self._process

    def engine(self) -> str:
        """Return the engine's name and version; starts it."""
        return named(self.process)

    @property
    def release(self) -> str:
        """The engine's version, by which the ledger goes; starts it."""
        self.engine()
        return self.process.version

    @property
    def drawn_as(self) -> str:
        """The model whose specs a campaign draws."""
        return self.name

    def begin(self, spec: CacheSpec) -> None:
        """Have the engine work on ``spec``, which is asked for next, while the caller does something else."""

    def __call__(self, spec: CacheSpec) -> Layout:
        """Return the engine's layout; raise ``Rejected`` for its refusal, its error, or the end of its process."""
        model = self.model(spec)
        try:
            return self.lay_out(spec, None)
        except Rejected as refused:
            expected = refusal_by(spec, model) if refused.rule == "rejected" and refused.supported else None
            if expected is None:
                raise
            raise Rejected(refused.message, expected.remedy, supported=False) from None

    def model(self, spec: CacheSpec) -> Allocator:
        """Return the model of what the engine is asked for; raise ``Rejected`` for what it does not know."""
        raise NotImplementedError

    def lay_out(self, spec: CacheSpec, expected: Rejected | None) -> Layout:
        """Ask the engine; ``expected`` is the refusal by its model, if any."""
        raise NotImplementedError

    def compare(self, spec: CacheSpec) -> Comparison:
        """Lay ``spec`` out by the engine and by its model, and say where the two differ."""
        try:
            model = self.model(spec)
        except Rejected:
            return Comparison("unasked")
        refusal: Rejected | None = None
        try:
            expected: Layout | None = model(spec)
        except Rejected as refused:
            expected, refusal = None, refused
        try:
            real = self.lay_out(spec, refusal)
        except Rejected as refused:
            if refused.remedy == NO_MEMORY:
                return Comparison("no-memory")
            if refusal is None:
                return Comparison("only-engine-fails", (refused.message,), refused.rule)
            kind = "both-refuse" if refused.rule == "rejected" else "unexplained"
            return Comparison(kind, (refused.message, refusal.message), refused.rule)
        if expected is None:
            return Comparison("only-model-refuses", (refusal.message if refusal is not None else "",))
        found = tuple(differences(real, expected))
        return Comparison("differ" if found else "agree", found)


def begun_ahead(allocator: EngineAllocator, specs: Iterable[CacheSpec]) -> Iterator[CacheSpec]:
    """Yield ``specs`` in order, the engine at work on the next ones meanwhile."""
    ahead = Ahead(allocator)
    for spec in specs:
        yield from ahead.take(spec)
    yield from ahead.rest()


class Ahead:
    """Specs that the engine has begun on, given back in order as soon as there are enough of them."""

    def __init__(self, allocator: Allocator) -> None:
        self._engine = allocator if isinstance(allocator, EngineAllocator) else None
        self._held: deque[CacheSpec] = deque()

    def take(self, spec: CacheSpec) -> list[CacheSpec]:
        """Have the engine begin on ``spec``; return what to judge now, ``spec`` itself where no engine is asked."""
        if self._engine is None:
            return [spec]
        with contextlib.suppress(SpecError, EngineEnded):  # it is told when the spec is asked for
            self._engine.begin(spec)
        self._held.append(spec)
        return [self._held.popleft()] if len(self._held) > AHEAD else []

    def rest(self) -> Iterator[CacheSpec]:
        """Yield what is left to judge."""
        while self._held:
            yield self._held.popleft()


def refusal_by(spec: CacheSpec, model: Allocator) -> Rejected | None:
    """Return the refusal of ``spec`` by its model, None where it lays it out."""
    try:
        model(spec)
    except Rejected as refusal:
        return refusal
    return None
