"""``sglang-engine``: the allocators that ask the SGLang that is installed, each compared with its model."""

from __future__ import annotations

from typing import Any

from ...model.spec import CacheSpec
from ...sim.allocators.sglang import allocators as models
from ...sim.allocators.sglang.support import reasons
from ...sim.allocators.trtllm.support import refuse_unsupported
from ...sim.engines.answer import read_answer
from ...sim.engines.sglang import layout_of, refuse_unasked, request_of
from ...sim.layout import Layout
from ...sim.registry import Allocator
from ...sim.rejection import Rejected
from .comparison import EngineAllocator
from .installed import SGLANG, Installed, ask

MODELS = {"sglang-engine": models.allocate_sglang, "sglang-engine-envelope": models.allocate_envelope}
"""What each allocator is compared with."""


class SGLangAllocator(EngineAllocator):
    """An allocator of the installed SGLang."""

    @property
    def installed(self) -> Installed:
        """How SGLang is found."""
        return SGLANG

    @property
    def drawn_as(self) -> str:
        """The model whose specs a campaign draws."""
        return "sglang-envelope" if self._envelope else "sglang"

    @property
    def _envelope(self) -> bool:
        return self.name == "sglang-engine-envelope"

    def model(self, spec: CacheSpec) -> Allocator:
        """Return the model; raise ``Rejected`` for what it does not know, or the engine has no pool for."""
        refuse_unsupported(reasons(spec))
        refuse_unasked(spec)
        return MODELS[self.name]

    def request(self, spec: CacheSpec) -> dict[str, Any]:
        """Return what the engine is asked for ``spec``; raise ``Rejected`` where a quota leaves no page."""
        return request_of(spec, envelope=self._envelope)

    def begin(self, spec: CacheSpec) -> None:
        """Have the engine build the pools of ``spec`` while the caller does something else."""
        try:
            self.model(spec)
            request = self.request(spec)
        except Rejected:
            return  # it is not asked for
        self.process.begin(request)

    def lay_out(self, spec: CacheSpec, expected: Rejected | None) -> Layout:
        """Ask the engine for its pools."""
        answer = ask(self.process, self.request(spec), expected, SGLANG.explains)
        engine = self.engine()
        answer = {"blocks": 0, "groups": _groups(answer), **answer}
        return layout_of(spec, read_answer(answer, engine), self.name, engine)


def _groups(answer: dict[str, Any]) -> list[list[str]]:
    """Return the layers of each group that the views name."""
    groups: dict[int, list[str]] = {}
    for view in answer.get("views", ()):
        members = groups.setdefault(view["group"], [])
        if view["name"] not in members:
            members.append(view["name"])
    return [groups.get(group, []) for group in range(max(groups, default=-1) + 1)]


allocate_sglang = SGLangAllocator("sglang-engine")
allocate_envelope = SGLangAllocator("sglang-engine-envelope")
