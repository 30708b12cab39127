"""``Replayer``: layouts on real memory, and what memory says of them.

    replayer = Replayer(open_device("cuda"))
    for result in replayer.replay([layout, ...]):
        result.digest, result.findings

Layouts share launches in batches. A layout on which anything differs is carried out once more by itself and in order,
so that its report is the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from ..model.errors import SpecError
from ..sim.arena.arena import digest_of_folds
from ..sim.checking import FINDINGS_PER_RULE, check
from ..sim.finding import Finding
from ..sim.layout import Access, Layout
from .alone import Stray, try_alone, try_narrow
from .batch import Batch
from .device import Device
from .findings import replay_findings
from .fitting import DEFAULT_MAX_BYTES, fitted
from .plan import Plan
from .probe.launch import Anchor
from .seen import Seen

BATCH_BYTES: Final = 1 << 30
"""Memory in bytes that the layouts of one batch take together; a larger one is a batch of its own."""
BATCH_LAYOUTS: Final = 256
"""Layouts of one batch at most."""


class Replayed(msgspec.Struct, frozen=True):
    """What memory says of one layout.

    ``layout`` is what was replayed, which may have fewer slots than asked for (its notes say so). ``digest`` is that of
    the bytes after each pass; where nothing differs from the prediction it equals ``Arena.digest``. ``refusal`` is the
    one line that says why nothing was replayed. ``compared_on_host`` says that all pools were small enough to be
    compared byte for byte on the host too.
    """

    layout: Layout
    digest: str | None
    findings: tuple[Finding, ...]
    refusal: str | None = None
    compared_on_host: bool = False


class Replayer:
    """Replays layouts on one device, each in at most ``max_bytes`` of its memory.

    ``allocated`` says that the layouts come from ``allocate``, which has looked at the types of all their values.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        findings_per_rule: int = FINDINGS_PER_RULE,
        allocated: bool = False,
    ) -> None:
        self.device = device
        self.allocated = allocated
        self.max_bytes = max_bytes
        self.findings_per_rule = findings_per_rule
        self.anchor = Anchor(device)

    def replay(self, layouts: Iterable[Layout]) -> Iterator[Replayed]:
        """Yield what memory says of each of ``layouts``, in their order.

        A layout that is refused (too large, too scattered, or inconsistent) is yielded as well, with the reason.
        """
        waiting: list[Plan | Replayed] = []
        held_bytes = 0
        for layout in layouts:
            planned = self._planned(layout)
            size = planned.memory_bytes if isinstance(planned, Plan) else 0
            if waiting and (held_bytes + size > BATCH_BYTES or len(waiting) >= BATCH_LAYOUTS):
                yield from self._carried_out(waiting)
                waiting, held_bytes = [], 0
            waiting.append(planned)
            held_bytes += size
        yield from self._carried_out(waiting)

    def _planned(self, layout: Layout) -> Plan | Replayed:
        """Return the plan of ``layout``, or the refusal."""
        try:
            check(layout, rules=(), allocated=self.allocated)
            return fitted(layout, self.max_bytes)
        except SpecError as error:
            return Replayed(layout, None, (), refusal=str(error))

    def _carried_out(self, waiting: list[Plan | Replayed]) -> Iterator[Replayed]:
        plans = [each for each in waiting if isinstance(each, Plan)]
        try:
            results = iter(Batch(self.device, self.anchor, plans).run() if plans else [])
        except MemoryError as error:
            results = iter([])
            waiting = [
                Replayed(each.layout, None, (), refusal=f"memory: {error}") if isinstance(each, Plan) else each
                for each in waiting
            ]
        for each in waiting:
            yield self._result(each, next(results)) if isinstance(each, Plan) else each

    def _result(self, plan: Plan, seen: Seen) -> Replayed:
        """Return the result of one plan; where anything differs, carry it out again in order."""
        strays: dict[int, Stray] = {}
        narrow: dict[int, int] = {}
        if not seen.clean or plan.suspects or plan.narrow:
            try:
                batch = Batch(self.device, self.anchor, [plan], ordered=True)
                if not seen.clean:
                    seen = msgspec.structs.replace(batch.run()[0], lanes=seen.lanes)
                strays = self._strays(batch, plan, [*seen.lanes, *plan.suspects])
                narrow = {index: wrong for index in plan.narrow if (wrong := try_narrow(batch, index))}
            except SpecError as error:
                return Replayed(plan.layout, None, (), refusal=str(error))
        findings = replay_findings(plan, seen, strays, narrow, self.findings_per_rule)
        return Replayed(
            plan.layout,
            digest_of_folds(plan.layout, plan.table, seen.folds),
            tuple(findings),
            compared_on_host=seen.compared_on_host,
        )

    def _strays(self, batch: Batch, plan: Plan, suspects: list[int]) -> dict[int, Stray]:
        """Return how those of ``suspects`` stray that do; consumers with one formula are tried once."""
        strays: dict[int, Stray] = {}
        for index in sorted(suspects):
            access = msgspec.structs.replace(plan.layout.accesses[index], consumer="")
            stray = try_alone(batch, index)
            if stray is not None:
                strays.update(dict.fromkeys(_same_formula(plan.layout, access), stray))
        return strays


def _same_formula(layout: Layout, formula: Access) -> Iterator[int]:
    """Yield the places of all accesses, of whatever consumer, with one formula."""
    for index, access in enumerate(layout.accesses):
        if msgspec.structs.replace(access, consumer="") == formula:
            yield index
