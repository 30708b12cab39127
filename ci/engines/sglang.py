"""``sglang-engine``: the allocators that ask the SGLang that is installed, each compared with its model."""

from __future__ import annotations

from typing import Any, Final

from ...model.layers import paged_part, recurrent_part
from ...model.rank import manager_layers
from ...model.spec import CacheSpec
from ...sim.allocators.sglang import allocators as models
from ...sim.allocators.sglang.support import reasons
from ...sim.allocators.sglang.unified import unified_reasons
from ...sim.allocators.trtllm.support import refuse_unsupported
from ...sim.engines.answer import read_answer
from ...sim.engines.sglang import layout_of, request_of
from ...sim.layout import Layout
from ...sim.registry import Allocator
from ...sim.rejection import Rejected
from .comparison import EngineAllocator
from .installed import SGLANG, Installed, ask
from .running import refuse_many
from .running_radix import RadixEngineCache

VARIANTS: Final[dict[str, tuple[str, Allocator]]] = {
    "sglang-engine": ("plain", models.allocate_sglang),
    "sglang-engine-envelope": ("envelope", models.allocate_envelope),
    "sglang-engine-speculative": ("speculative", models.allocate_speculative),
    "sglang-engine-unified": ("unified", models.allocate_unified),
}
"""What the engine is asked for, and the model of that, by allocator."""


class SglangAllocator(EngineAllocator):
    """An allocator of the installed SGLang."""

    @property
    def installed(self) -> Installed:
        """How SGLang is found."""
        return SGLANG

    def model(self, spec: CacheSpec) -> Allocator:
        """Return the model of the pools asked for; raise ``Rejected`` for what it does not know."""
        variant, model = VARIANTS[self.name]
        refuse_unsupported(unified_reasons(spec) if variant == "unified" else reasons(spec))
        return model

    def begin(self, spec: CacheSpec) -> None:
        """Have the engine make the pools of ``spec`` while the caller does something else."""
        try:
            self.model(spec)
            request = self.request(spec)
        except Rejected:
            return  # it is not asked for
        self.process.begin(request)

    def request(self, spec: CacheSpec) -> dict[str, Any]:
        """Return what the engine is asked for ``spec``; raise ``Rejected`` where a quota leaves no page."""
        return request_of(spec, VARIANTS[self.name][0])

    @property
    def reuses(self) -> bool:
        """Whether traces run with the radix tree: one allocator runs without, so that both are tried."""
        return self.name != "sglang-engine-envelope"

    def running_cache(self, spec: CacheSpec) -> RadixEngineCache:
        """Return the engine's slot allocators and its radix tree, opened for ``spec``.

        Raises ``Rejected`` where the engine does not open them, and for what is not driven: models of which some layer
        has states, or none keeps all tokens, and the unified buffer. ``sglang-engine-speculative`` has the free list
        sorted, as servers that only prefill or decode have it.
        """
        if self.name == "sglang-engine-unified":
            raise Rejected(
                f"traces over {self.name} are not driven: its buffer has an allocator of its own",
                "use --allocator sglang-engine",
                supported=False,
            )
        refuse_many(spec)
        self.model(spec)
        request = self.request(spec)
        layers = [held.layer for held in manager_layers(spec)[0].layers]  # drafts of their own use the same slots
        parts = [part for layer in layers if (part := paged_part(layer)) is not None]
        windows = {part.window for part in parts}
        states = any(recurrent_part(layer) is not None for layer in layers)
        if states or None not in windows or len(windows) > 2:  # all tokens, and one window
            raise Rejected(
                f"traces over {self.name} take models whose layers keep all tokens, but for those of one window, and "
                "have no state",
                "use --allocator sglang-engine and other layers",
                supported=False,
            )
        window = max((window for window in windows if window is not None), default=0)
        return RadixEngineCache(
            self.process,
            {**request, "window": window, "caching": self.reuses, "sorted": self.name == "sglang-engine-speculative"},
        )

    def lay_out(self, spec: CacheSpec, expected: Rejected | None) -> Layout:
        """Ask the engine for its pools."""
        answer = ask(self.process, self.request(spec), expected, SGLANG.explains)
        engine = self.engine()
        return layout_of(spec, read_answer(answer, engine), self.name, engine)


allocate_sglang = SglangAllocator("sglang-engine")
allocate_envelope = SglangAllocator("sglang-engine-envelope")
allocate_speculative = SglangAllocator("sglang-engine-speculative")
allocate_unified = SglangAllocator("sglang-engine-unified")
