"""``vllm``: the allocators that ask the vLLM that is installed, each compared with the model of its era."""

from __future__ import annotations

import functools
from typing import Any, Final

from ...model.layers import AttentionLayer, Layer, paged_part, recurrent_part
from ...model.spec import CacheSpec
from ...sim.allocators.trtllm.support import refuse_unsupported
from ...sim.allocators.vllm import allocators as models
from ...sim.allocators.vllm.support import reasons
from ...sim.engines.answer import read_answer
from ...sim.engines.limits import KERNEL_TOKENS
from ...sim.engines.vllm import layout_of, request_of
from ...sim.layout import Layout
from ...sim.registry import Allocator
from ...sim.rejection import Rejected
from .comparison import EngineAllocator
from .installed import VLLM, Installed, ask
from .running import EngineCache, refuse_many

ORDERS: Final = {
    "vllm": ("LBNHC", "LBHNC"),
    "vllm-block-outermost": ("BLNHC", "BLHNC"),
    "vllm-lhbnc": ("LHBNC", "LHBNC"),
    "vllm-bhlnc": ("BHLNC", "BHLNC"),
    "vllm-kernel-blocks": ("LBNHC", "LBHNC"),
}
"""The physical orders of era 3 by allocator, for consumers of NHD and of HND pages."""

SCATTERED: Final = ("LHBNC", "BHLNC")
"""Orders in which a page is no run of bytes."""

EARLY: Final[dict[tuple[str, int], tuple[str, Allocator]]] = {
    ("vllm", 1): ("vllm-e1", models.allocate_e1),
    ("vllm", 2): ("vllm-e2", models.allocate_e2),
    ("vllm-block-outermost", 2): ("vllm-e2-packed", models.allocate_e2_packed),
    ("vllm-kernel-blocks", 1): ("vllm-e1", functools.partial(models.allocate_e1, kernel_tokens=KERNEL_TOKENS)),
    ("vllm-kernel-blocks", 2): ("vllm-e2", functools.partial(models.allocate_e2, kernel_tokens=KERNEL_TOKENS)),
}
"""The models of the eras before: what an allocator of this module is compared with."""


EARLY_GRANULE_TOKENS: Final = 16
"""What blocks of K/V layers are a multiple of before era 3."""


def _has_heads(layer: Layer) -> bool:
    return isinstance(paged_part(layer), AttentionLayer)


def _refuse_kernel_blocks(spec: CacheSpec) -> None:
    """Refuse what no backend sees as kernel blocks: blocks that they do not divide, and block scales."""
    if spec.tokens_per_block % KERNEL_TOKENS or spec.kv_format.block_scaled:
        raise Rejected(
            f"kernel blocks of {KERNEL_TOKENS} tokens need blocks of a multiple of them, without block scales; found "
            f"{spec.tokens_per_block} tokens of {spec.kv_format.value}",
            "use --allocator vllm",
            supported=False,
        )


class VllmAllocator(EngineAllocator):
    """An allocator of the installed vLLM, of whatever era."""

    @property
    def installed(self) -> Installed:
        """How vLLM is found."""
        return VLLM

    @property
    def era(self) -> int:
        """The era of the installed release, 1 to 3; starts the engine."""
        self.engine()
        return int(self.process.greeting["era"])

    @property
    def drawn_as(self) -> str:
        """The model whose specs a campaign draws: that of the installed era."""
        if self.era < 3:
            return EARLY[self.name, self.era][0] if (self.name, self.era) in EARLY else self.name
        if self.name == "vllm-kernel-blocks":
            return self.name  # blocks of two kernel blocks or more
        return "vllm-e3-block-outermost" if self.name == "vllm-block-outermost" else "vllm-e3"

    def order(self, spec: CacheSpec) -> str:
        """Return the physical order to ask for; before era 3 the order of a page, and whether blocks are packed."""
        kv_layout = spec.consumer.kv_layout
        if self.era < 3:
            return f"{kv_layout}-packed" if self.name == "vllm-block-outermost" else kv_layout
        return ORDERS[self.name][0 if kv_layout == "NHD" else 1]

    def model(self, spec: CacheSpec) -> Allocator:
        """Return the model of the installed era; raise ``Rejected`` for what it does not know."""
        era = self.era
        if era < 3 and (self.name, era) not in EARLY:
            raise Rejected(
                f"{self.engine()} has no layout that {self.name} names", "use --allocator vllm", supported=False
            )
        refuse_unsupported(reasons(spec, era))
        if self.name == "vllm-kernel-blocks":
            _refuse_kernel_blocks(spec)
        if era < 3:
            if spec.tokens_per_block % EARLY_GRANULE_TOKENS and any(map(_has_heads, spec.layers + spec.draft.layers)):
                raise Rejected(
                    f"the K/V backends of {self.engine()} take blocks of a multiple of {EARLY_GRANULE_TOKENS} tokens, "
                    f"found {spec.tokens_per_block}",
                    f"choose a multiple of {EARLY_GRANULE_TOKENS}",
                    supported=False,
                )
            return EARLY[self.name, era][1]
        order = self.order(spec)
        if spec.kv_format.block_scaled and order in SCATTERED:
            raise Rejected(
                f"no backend of {self.engine()} with block scales declares order {order}, which scatters a page",
                "use --allocator vllm",
                supported=False,
            )
        kernel = KERNEL_TOKENS if self.name == "vllm-kernel-blocks" else None
        return functools.partial(models.allocate_e3, order=order, kernel_tokens=kernel)

    def begin(self, spec: CacheSpec) -> None:
        """Have the engine plan ``spec`` and make its views while the caller does something else."""
        try:
            self.model(spec)
        except Rejected:
            return  # it is not asked for
        self.process.begin(self.request(spec))

    def request(self, spec: CacheSpec) -> dict[str, Any]:
        """Return what the engine is asked for ``spec``."""
        request = request_of(spec, self.order(spec))
        return {**request, "kernel": KERNEL_TOKENS} if self.name == "vllm-kernel-blocks" else request

    @property
    def reuses(self) -> bool:
        """Whether traces run with prefix caching: one allocator runs without, so that both are tried."""
        return self.name != "vllm-block-outermost"

    def running_cache(self, spec: CacheSpec) -> EngineCache:
        """Return the engine's cache manager, opened for ``spec``; raise ``Rejected`` where it or its model is not.

        Prefix caching is on, but for models with states, which this engine then keeps in blocks of another kind, and
        for ``vllm-block-outermost``: so traces run with it and without.
        """
        refuse_many(spec)
        model = self.model(spec)
        try:
            model(spec)
        except Rejected as refusal:  # the engine may refuse it in words of its own
            raise Rejected(refusal.message, refusal.remedy, supported=False) from None
        states = any(recurrent_part(layer) is not None for layer in spec.layers + spec.draft.layers)
        return EngineCache(self.process, {**self.request(spec), "caching": self.reuses and not states})

    def lay_out(self, spec: CacheSpec, expected: Rejected | None) -> Layout:
        """Ask the engine for its plan and views."""
        answer = ask(self.process, self.request(spec), expected)
        engine = self.engine()
        return layout_of(spec, read_answer(answer, engine), self.name, self.order(spec), engine)


allocate_vllm = VllmAllocator("vllm")
allocate_block_outermost = VllmAllocator("vllm-block-outermost")
allocate_lhbnc = VllmAllocator("vllm-lhbnc")
allocate_bhlnc = VllmAllocator("vllm-bhlnc")
allocate_kernel_blocks = VllmAllocator("vllm-kernel-blocks")
