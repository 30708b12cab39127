"""``vllm``: the allocators that ask the vLLM that is installed, and its comparison with the model of its era."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import msgspec

from ...model.spec import CacheSpec
from ...sim.allocators.trtllm.support import refuse_unsupported
from ...sim.allocators.vllm import allocators as models
from ...sim.allocators.vllm.support import reasons
from ...sim.engines.answer import read_answer
from ...sim.engines.difference import differences
from ...sim.engines.vllm import layout_of, request_of
from ...sim.layout import Layout
from ...sim.rejection import Rejected
from .installed import VLLM, ask, named, python_of, warm_process
from .supervisor import EngineProcess

ORDERS: Final = {
    "vllm": ("LBNHC", "LBHNC"),
    "vllm-block-outermost": ("BLNHC", "BLHNC"),
    "vllm-lhbnc": ("LHBNC", "LHBNC"),
    "vllm-bhlnc": ("BHLNC", "BHLNC"),
}
"""The physical orders of era 3 by allocator, for consumers of NHD and of HND pages."""

SCATTERED: Final = ("LHBNC", "BHLNC")
"""Orders in which a page is no run of bytes."""

EARLY: Final = {
    ("vllm", 1): models.allocate_e1,
    ("vllm", 2): models.allocate_e2,
    ("vllm-block-outermost", 2): models.allocate_e2_packed,
}
"""The models of the eras before: what an allocator of this module is compared with."""


MODEL_NAMES: Final = {
    ("vllm", 1): "vllm-e1",
    ("vllm", 2): "vllm-e2",
    ("vllm-block-outermost", 2): "vllm-e2-packed",
    ("vllm-block-outermost", 3): "vllm-e3-block-outermost",
}


class EngineAllocator(msgspec.Struct, frozen=True):
    """The allocator called ``name``: lays a spec out by the engine's own code.

    What the model of its era does not know is not asked. Whatever the engine then raises is its fault, unless its model
    refuses the spec too and the engine says why: an error that explains itself is ``rejected``, any other and the end
    of the process ``unexplained-rejection``.
    """

    name: str

    def ready(self) -> None:
        """Raise ``SpecError``, saying how to get it, where no engine is found; it is not started yet."""
        python_of(VLLM)

    @property
    def drawn_as(self) -> str:
        """The model whose specs a campaign draws: that of the installed era. Starts the engine."""
        process = warm_process(VLLM)
        named(process)
        return MODEL_NAMES.get((self.name, int(process.greeting["era"])), self.name)

    def __call__(self, spec: CacheSpec, process: EngineProcess | None = None) -> Layout:
        """Return the engine's layout; raise ``Rejected`` for its refusal, its error, or the end of its process."""
        running = warm_process(VLLM) if process is None else process
        engine = named(running)
        era = int(running.greeting["era"])
        model = model_of(self.name, spec, era)
        if model is None:
            raise Rejected(f"{engine} has no layout that {self.name} names", "use --allocator vllm", supported=False)
        refuse_unsupported(reasons(spec, era))
        order = order_of(self.name, spec, era)
        if spec.kv_format.block_scaled and order in SCATTERED:
            raise Rejected(
                f"no backend of {engine} with block scales declares order {order}, which scatters a page",
                "use --allocator vllm",
                supported=False,
            )
        answer = ask(running, request_of(spec, order), refusal_by(spec, model))
        return layout_of(spec, read_answer(answer, engine), self.name, order, engine)


allocate_vllm = EngineAllocator("vllm")
allocate_block_outermost = EngineAllocator("vllm-block-outermost")
allocate_lhbnc = EngineAllocator("vllm-lhbnc")
allocate_bhlnc = EngineAllocator("vllm-bhlnc")


def order_of(name: str, spec: CacheSpec, era: int) -> str:
    """Return the physical order to ask for; before era 3 the order of a page, and whether blocks are packed."""
    kv_layout = spec.consumer.kv_layout
    if era < 3:
        return f"{kv_layout}-packed" if name == "vllm-block-outermost" else kv_layout
    return ORDERS[name][0 if kv_layout == "NHD" else 1]


def model_of(name: str, spec: CacheSpec, era: int) -> Callable[[CacheSpec], Layout] | None:
    """Return the model of what ``name`` asks an engine of ``era`` for; None where that era has no such layout."""
    if era < 3:
        return EARLY.get((name, era))
    return functools.partial(models.allocate_e3, order=order_of(name, spec, era))


def refusal_by(spec: CacheSpec, model: Callable[[CacheSpec], Layout]) -> Rejected | None:
    """Return the refusal of ``spec`` by its model, None where it lays it out."""
    try:
        model(spec)
    except Rejected as refusal:
        return refusal
    return None


class Comparison(msgspec.Struct, frozen=True):
    """What came of a spec: ``agree``, ``both-refuse``, ``no-memory``, ``only-model-refuses`` (a latent hole in the
    engine, or a gap of the model), ``only-engine-fails``, ``differ``; ``unasked`` where the model's support ends."""

    kind: str
    sentences: tuple[str, ...] = ()


def compare(spec: CacheSpec, allocate: EngineAllocator, process: EngineProcess | None = None) -> Comparison:
    """Lay ``spec`` out by the engine and by the model of its era, and say where the two differ."""
    running = warm_process(VLLM) if process is None else process
    named(running)
    era = int(running.greeting["era"])
    model = model_of(allocate.name, spec, era)
    scattered = order_of(allocate.name, spec, era) in SCATTERED
    unknown = model is None or next(iter(reasons(spec, era)), None) is not None
    if model is None or unknown or (spec.kv_format.block_scaled and scattered):
        return Comparison("unasked")
    expected: Layout | Rejected
    try:
        expected = model(spec)
    except Rejected as refusal:
        expected = refusal
    try:
        real = allocate(spec, running)
    except Rejected as refusal:
        if refusal.remedy == "give a larger quota":
            return Comparison("no-memory")
        if isinstance(expected, Rejected):
            return Comparison("both-refuse", (refusal.message, expected.message))
        return Comparison("only-engine-fails", (refusal.message,))
    if isinstance(expected, Rejected):
        return Comparison("only-model-refuses", (expected.message,))
    found = tuple(differences(real, expected))
    return Comparison("differ" if found else "agree", found)
