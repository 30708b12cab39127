"""What ``kvsan peers`` does once its options are known: one pair of deployments, or a matrix of pairs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from ..ci.cases import Case, FoundRule, add_case, require_folder
from ..ci.transfer_judging import judge_transfer
from ..model.architecture import Architecture
from ..model.errors import SpecError, shown
from ..model.formats import KV_FORMATS
from ..model.spec import CacheSpec
from ..sim.registry import default_allocator, is_shipped
from ..sim.transfer.method import Method
from ..sim.transfer.pair import Pair, PairVerdict, judge_pair
from ..sim.transfer.planning import SOUND, bytes_moved
from .allocator_choice import choose_allocator
from .deployment import deploy_model, read_deployment, read_format, read_list, read_model, read_whole
from .examination import NamedAllocator
from .output import print_report, stdout_kept, terminal, watched, write_json
from .peers_document import document_of
from .peers_replay import OPTIONS as REPLAY_OPTIONS
from .peers_replay import ReplayedPair, read_replay, replay_pair
from .saved_case import SavedCase, read_saved_case
from .status import CLEAN, WRONG
from .wording import printable_path

Options: TypeAlias = Mapping[str, str | None]

FIVE_LAYOUTS: Final = "tp1,tp2,tep4,adp2,adp4"
THREE_DTYPES: Final = "bf16,fp8,nvfp4"


class Side(msgspec.Struct, frozen=True):
    """One side of a pair: its spec, its attention-DP rank, its allocator, and what of the spec was concluded."""

    spec: CacheSpec
    dp: int
    allocator: NamedAllocator
    inferred: tuple[str, ...] = ()


class JudgedPair(msgspec.Struct, frozen=True):
    """Two sides, and what came of them."""

    source: Side
    destination: Side
    verdict: PairVerdict

    @property
    def message(self) -> str | None:
        """What the refusal or the first finding says, None when all is well."""
        rejection = self.verdict.rejection
        if rejection is not None:
            return f"the {self.verdict.side}: {rejection.message}"
        return self.verdict.findings[0].message if self.verdict.findings else None


class PairCell(msgspec.Struct, frozen=True):
    """One cell of the matrix: ``bytes`` are those that one block and one state move, 0 where nothing does."""

    source: str
    destination: str
    kv_dtype: str
    allocator: str
    status: str
    copies: int
    bytes: int
    message: str | None


def run_pair(config: str, other: str | None, words: Mapping[str, Any], json: bool) -> int:
    """Run ``peers`` for one pair; return the exit status. ``words`` are the options by name."""
    for name in ("layouts", "kv_dtypes"):
        if words[name] is not None:
            raise SpecError(_option(name), "found without --matrix, needs it")
    saved = read_saved_case(config, words["allocator"])
    if saved is not None and isinstance(saved.case.input, Pair):
        return _run_saved(saved, saved.case.input, other, words, json)
    method, replay = read_method(words["transfer"]), read_replay(words)
    common, source, destination = _common(words), _own(words, "src"), _own(words, "dst")
    if words["save"] == "":
        raise SpecError("--save", "found an empty path, needs a folder")
    if words["save"] is not None:
        require_folder(Path(words["save"]), "--save")
    with stdout_kept():  # an allocator of somebody's own may print
        model = read_model(config)
        one = read_side(model, config, "--src", common, source)
        theirs = model if other is None else read_model(other)
        two = read_side(theirs, other or config, "--dst", common, destination)
        judged = judge_sides(one, two, method)
        kept = None if words["save"] is None else save_pair(judged, method, Path(words["save"]))
        moved = None if replay is None else replay_pair(judged, method, replay)
    if json:
        more: dict[str, Any] = {} if kept is None else {"case": str(kept)}
        write_json(document_of(judged) | more | ({} if replay is None else {"replay": moved}))
    else:
        from .report_peers import report_pair

        console = terminal()
        report_pair(console, judged, moved)
        if words["save"] is not None:
            said = "Nothing saved: the pair is clean" if kept is None else f"Saved as {printable_path(kept)}"
            console.print(f"\n{said}", markup=False, soft_wrap=True)
        print_report(console)
    return exit_status(judged, moved)


def exit_status(judged: JudgedPair, moved: ReplayedPair | None) -> int:
    """Return 0 where the pair is clean and memory agrees with the simulator, 1 otherwise."""
    return WRONG if judged.verdict.status != "clean" or (moved is not None and moved.findings) else CLEAN


def _run_saved(saved: SavedCase, pair: Pair, other: str | None, words: Mapping[str, Any], json: bool) -> int:
    """Run ``peers`` for the saved case of a pair, which has both sides with it."""
    from .pair_case import check_pair_case

    meant = {"config", "allocator", "json", *REPLAY_OPTIONS}
    extra = [_option(name) for name, value in words.items() if value not in (None, False) and name not in meant]
    if extra:
        what = "OTHER" if other is not None else extra[0]
        raise SpecError(what, "the case is a pair, which has its specs with it: leave it out")
    return check_pair_case(saved, pair, json, read_replay(words))


def save_pair(judged: JudgedPair, method: Method, folder: Path) -> Path | None:
    """Save a pair that is not clean as a case, and return its path; raise ``SpecError`` for somebody's own allocator.

    The case names the faulty transfer, or else the source's allocator; what differs from that is named in the pair.
    """
    source, destination = judged.source, judged.destination
    for side in (source, destination):
        if not is_shipped(side.allocator.name):
            problem = f"found {shown(side.allocator.name)}, a case of a pair names shipped allocators alone"
            raise SpecError("--save", problem)
    name = source.allocator.name if method is SOUND else method.name
    defaults = [default_allocator(side.spec) if method is not SOUND else name for side in (source, destination)]
    own = [
        None if side.allocator.name == default else side.allocator.name
        for side, default in zip((source, destination), defaults, strict=True)
    ]
    pair = msgspec.structs.replace(pair_of(source, destination), source_allocator=own[0], destination_allocator=own[1])
    faults = judge_transfer(pair, name).faults
    if not faults:
        return None
    first = {fault.rule: fault.message for fault in reversed(faults)}
    found = tuple([FoundRule(rule=rule, message=message) for rule, message in sorted(first.items())])
    return add_case(Case(allocator=name, input=pair, found=found), folder)


def run_matrix(config: str, other: str | None, words: Mapping[str, Any], json: bool) -> int:
    """Run ``peers --matrix``; return the exit status. ``words`` are the options by name."""
    extra = next((name for name in ("save", *REPLAY_OPTIONS) if words[name] not in (None, False)), None)
    if extra is not None:
        raise SpecError(_option(extra), "found together with --matrix, needs a single pair")
    common, source, destination = _common(words), _own(words, "src"), _own(words, "dst")
    given = [name for side, option in ((source, "--src"), (destination, "--dst")) for name in _named(side, option)]
    if given or other is not None or common["--kv-dtype"] is not None:
        what = given[0] if given else "OTHER" if other is not None else "--kv-dtype"
        raise SpecError(what, "found together with --matrix, which has its own layouts and dtypes; give one of them")
    method = read_method(words["transfer"])
    layouts, kv_dtypes = words["layouts"], words["kv_dtypes"]
    names = list(dict.fromkeys(read_list("--layouts", FIVE_LAYOUTS if layouts is None else layouts)))
    written = read_list("--kv-dtypes", THREE_DTYPES if kv_dtypes is None else kv_dtypes)
    formats = list(dict.fromkeys(read_format("--kv-dtypes", name, KV_FORMATS).value for name in written))
    with stdout_kept():
        model = read_model(config)
        sides = {
            (kv_dtype, name): read_side(
                model, config, "--layouts", {**common, "--kv-dtype": kv_dtype}, {"--layout": name}
            )
            for kv_dtype in formats
            for name in names
        }
        work = list(itertools.product(formats, names, names))
        pairs = [
            judge_sides(sides[kv_dtype, one], sides[kv_dtype, two], method)
            for kv_dtype, one, two in watched(work, "pairs")
        ]
    if json:
        write_json({"cells": [cell_of(judged) for judged in pairs]})
    else:
        from .report_peers import report_pairs

        console = terminal()
        report_pairs(console, pairs)
        print_report(console)
    return CLEAN if all(judged.verdict.status == "clean" for judged in pairs) else WRONG


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _common(words: Mapping[str, Any]) -> Options:
    """Return the options that hold for both sides."""
    names = ("kv_dtype", "state_dtype", "tokens_per_block", "draft", "kv_layout", "allocator")
    return {_option(name): words[name] for name in names}


def _own(words: Mapping[str, Any], side: str) -> Options:
    """Return the options of one side, under the names that they have where there is one side alone."""
    own = {_option(name.removeprefix(f"{side}_")): words[name] for name in words if name.startswith(f"{side}_")}
    return {"--layout": words[side], **own}


def read_method(name: str | None) -> Method:
    """Return the transfer called ``name``, the sound one where there is none; raise ``SpecError`` for any other."""
    if name is None:
        return SOUND
    from ..sim.transfer.faulty import method_named

    try:
        return method_named(name)
    except SpecError as error:
        raise SpecError("--transfer", error.problem) from None


def _named(options: Options, side: str) -> list[str]:
    """Return the options of one side that are given, as they are written."""
    return [_written(option, side) for option, value in options.items() if value is not None]


def _written(option: str, side: str) -> str:
    return side if option == "--layout" else f"{side}{option[1:]}"


def read_side(model: Architecture | CacheSpec, source: str, side: str, common: Options, own: Options) -> Side:
    """Return one side; raise ``SpecError`` naming the option as it was written (``--dst``, ``--dst-kv-dtype``)."""
    given = dict(common) | {option: value for option, value in own.items() if value is not None}
    try:
        deployment = read_deployment(given)
        loaded = deploy_model(model, msgspec.structs.replace(deployment, rank=0), given, source)
        allocator = choose_allocator(given.get("--allocator"), loaded.spec)
        dp = given.get("--dp")
        chosen = Side(loaded.spec, 0 if dp is None else read_whole("--dp", dp), allocator, loaded.inferred)
        Pair(source=chosen.spec, destination=chosen.spec, source_dp=chosen.dp, destination_dp=chosen.dp)
    except SpecError as error:
        raise _renamed(error, side, own) from None
    return chosen


def _renamed(error: SpecError, side: str, own: Options) -> SpecError:
    """Return ``error`` with the option as it was written for this side."""
    field = {"source_dp": "--dp", "source": "--layout"}.get(error.field, error.field)
    if field in ("--layout", "--dp") or own.get(field) is not None:
        return SpecError(side if side == "--layouts" else _written(field, side), error.problem)
    return error


def pair_of(source: Side, destination: Side) -> Pair:
    """Return the two sides as a pair."""
    return Pair(source=source.spec, destination=destination.spec, source_dp=source.dp, destination_dp=destination.dp)


def judge_sides(source: Side, destination: Side, method: Method) -> JudgedPair:
    """Return the two sides with their verdict."""
    pair = pair_of(source, destination)
    chosen = [
        side.allocator.name if side.allocator.by_stage else side.allocator.function for side in (source, destination)
    ]
    return JudgedPair(source, destination, judge_pair(pair, chosen[0], chosen[1], method))


def cell_of(judged: JudgedPair) -> PairCell:
    """Return what the matrix says of a pair."""
    plan = judged.verdict.plan
    return PairCell(
        judged.source.spec.parallel.name,
        judged.destination.spec.parallel.name,
        judged.source.spec.kv_format.value,
        judged.source.allocator.name,
        judged.verdict.status,
        len(plan.copies),
        bytes_moved(plan),
        judged.message,
    )
