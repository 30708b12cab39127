"""The case of a pair: ``kvsan check CASE`` and ``kvsan peers CASE`` judge it again."""

from __future__ import annotations

from ..ci.transfer_judging import JudgedTransfer, judge_transfer, require_transfer
from ..model.errors import SpecError, shown
from ..sim.registry import default_allocator
from ..sim.transfer.names import transfer_named
from ..sim.transfer.pair import Pair, PairVerdict
from .allocator_choice import choose_allocator, import_from_here
from .output import print_report, stdout_kept, terminal, write_json
from .peers_document import document_of
from .peers_replay import ReplayOptions, replay_pair
from .peers_run import JudgedPair, Side, exit_status
from .saved_case import SavedCase


def check_pair_case(saved: SavedCase, pair: Pair, json: bool, replay: ReplayOptions | None = None) -> int:
    """Judge a saved pair again (and carry it out on memory) and report it; return the exit status."""
    with stdout_kept():  # an allocator of somebody's own may print
        judged = judge_saved_pair(pair, saved.allocator)
        sides = sides_of(pair, saved.allocator, judged.verdict)
        method = transfer_named(saved.allocator)[0]
        moved = None if replay is None else replay_pair(sides, method, replay)
    rules = judged.rules
    outcome = saved.outcome_of(rules)
    if json:
        document = document_of(sides) | {"transfer": method.name, "case": outcome}
        write_json(document | ({} if replay is None else {"replay": moved}))
    else:
        from .report_peers import report_pair

        console = terminal()
        report_pair(console, sides, moved)
        verb = "still breaks" if outcome["still_fails"] else "no longer breaks"
        console.print(f"\nThe case {verb} {', '.join(outcome['rules']) or 'any rule'}.", markup=False)
        print_report(console)
    return exit_status(sides, moved)


def judge_saved_pair(pair: Pair, allocator: str) -> JudgedTransfer:
    """Return the verdict on a saved pair; raise ``SpecError`` naming ``--allocator`` where it cannot be judged."""
    import_from_here()
    try:
        require_transfer(allocator)
        return judge_transfer(pair, allocator)
    except SpecError as error:
        problem = error.problem if error.field == "allocator" else str(error)
        raise SpecError("--allocator", f"{shown(allocator)}: {problem}") from None


def sides_of(pair: Pair, allocator: str, verdict: PairVerdict) -> JudgedPair:
    """Return the two sides of a saved pair with their allocators, and its verdict."""
    name = transfer_named(allocator)[1]
    sides: list[Side] = []
    for spec, dp, own in (
        (pair.source, pair.source_dp, pair.source_allocator),
        (pair.destination, pair.destination_dp, pair.destination_allocator),
    ):
        sides.append(Side(spec, dp, choose_allocator(own or name or default_allocator(spec), spec)))
    return JudgedPair(sides[0], sides[1], verdict)
