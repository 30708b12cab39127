"""``kvsan shrink CASE`` for the case of a pair: a simpler model, and simpler deployments of it on both sides."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..ci.cases import Case, FoundRule, add_case
from ..ci.transfer_judging import judge_transfer
from ..ci.transfer_minima import pair_size
from ..ci.transfer_reducer import reduce_pair
from ..model.errors import SpecError
from ..sim.finding import Finding
from ..sim.transfer.pair import Pair
from ..sim.transfer.words import describe_pair
from .output import print_report, stdout_kept, terminal, write_json
from .pair_case import judge_saved_pair
from .status import CLEAN, INTERRUPTED, WRONG
from .wording import counted, printable_line, printable_path


def shrink_pair_case(
    path: str, case: Case, pair: Pair, allocator: str, rule: str | None, folder: Path, json: bool
) -> int:
    """Reduce ``pair``; return 1 when it still fails (and was reduced), 0 when nothing fails any more."""
    with stdout_kept():
        shrinking = _Shrinking(case, pair, allocator, rule)
        fault, interrupted, saved = shrinking.fault, False, None
        if fault is not None:
            interrupted = shrinking.run()
            fault = shrinking.fault or fault
            found = FoundRule(rule=fault.rule, message=fault.message)
            saved = add_case(Case(allocator=allocator, input=shrinking.pair, found=(found,)), folder)
    status = CLEAN if saved is None else INTERRUPTED if interrupted else WRONG
    if json:
        document = {
            "case": path if saved is None else str(saved),
            "allocator": allocator,
            "rule": None if fault is None else fault.rule,
            "message": None if fault is None else fault.message,
            "size": None if saved is None else pair_size(shrinking.pair),
            "size_before": None if saved is None else pair_size(pair),
            "checks": None if saved is None else shrinking.checks,
            "pair": None if saved is None else shrinking.pair,
            "interrupted": interrupted,
        }
        write_json(document)
        return status
    console = terminal()
    if saved is None or fault is None:
        text = f"✓ {allocator} breaks no rule on {printable_path(path)} any more: nothing to shrink"
        console.print(text, markup=False)
    else:
        before, after = pair_size(pair), pair_size(shrinking.pair)
        smaller = f"size {before} -> {after}"
        if shrinking.pair == pair and not interrupted:
            smaller = f"already minimal, size {after}"
        steps = f"{smaller} in {counted(shrinking.checks, 'check')}"
        console.print(f"{fault.rule}: {steps} (size: layers + buffers of both sides)", markup=False)
        console.print(f"  {printable_line(fault.message)}", markup=False)
        for line in describe_pair(shrinking.pair):
            console.print(f"    {line}", markup=False)
        console.print(f"  saved as {printable_path(saved)}", markup=False, soft_wrap=True)
    print_report(console)
    return status


class _Shrinking:
    """A pair on its way to the simplest one with the same ``fault``, which is None when there is none any more.

    A refused pair stays refused for the same reason: there are many ways not to fit.
    """

    def __init__(self, case: Case, pair: Pair, allocator: str, rule: str | None) -> None:
        self._allocator = allocator
        judged = judge_saved_pair(pair, allocator)
        first: dict[str, Finding] = {fault.rule: fault for fault in reversed(judged.faults)}
        if rule is not None and first and rule not in first:
            broken = ", ".join(judged.rules)
            raise SpecError("--rule", f"{allocator} does not break {rule!r} on this case, it breaks {broken}")
        wanted = rule or next((entry.rule for entry in case.found if entry.rule in first), None)
        self.fault = first.get(wanted or "", judged.faults[0] if judged.faults else None)
        messages = [entry.message for entry in case.found]
        for fault in judged.faults:
            if self.fault is not None and fault.rule == self.fault.rule and fault.message in messages:
                self.fault = fault  # of several reasons, the one that the case was saved for
                break
        self.pair, self.checks = pair, 0
        self._status = judged.verdict.status

    def run(self) -> bool:
        """Reduce as far as it goes; say whether Ctrl-C ended it. ``pair`` is the simplest so far."""
        try:
            with contextlib.suppress(ValueError):  # an allocator that changes its mind: the pair stays as it is
                self.pair = reduce_pair(self.pair, self._fails)
        except KeyboardInterrupt:
            return True
        return False

    def _fails(self, candidate: Pair) -> bool:
        """Say whether ``candidate`` has the fault; the reducer asks for simpler ones only, so keep it if it does."""
        self.checks += 1
        judged = judge_transfer(candidate, self._allocator)
        if judged.verdict.status != self._status or self.fault is None:
            return False
        fault = judged.alike(self.fault)
        if fault is None:
            return False
        self.pair, self.fault = candidate, fault
        return True
