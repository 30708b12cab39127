"""What ``kvsan check`` does once its options are known: one rank, or all of them.

Ranks of one pipeline stage hold the same bytes: the engine's allocators look at the stage alone, so they are asked once
for each stage, and every rank still gets a document of its own. Anybody else's allocator is asked for every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from ..ci.cases import spec_of
from ..model.errors import SpecError
from ..model.spec import CacheSpec, encode_spec
from ..sim.cache.trace import Trace
from ..sim.transfer.pair import Pair
from .allocator_choice import choose_allocator, import_from_here
from .deployment import Given, deploy_model, read_deployment, read_model
from .document import document_of
from .examination import Examination, examine
from .output import print_report, stdout_kept, terminal, watched, write_bytes, write_json
from .saved_case import SavedCase, read_saved_case
from .status import CLEAN, WRONG

MAX_RANKS: Final = 4096
"""Most ranks that one command looks at: each has a document of its own."""


class StageExamination(msgspec.Struct, frozen=True):
    """An examination and the ranks that it holds for, in order."""

    ranks: tuple[int, ...]
    examination: Examination


def check_one_rank(config: str, given: Given, allocator_name: str | None, json: bool) -> int:
    """Run ``check`` for one rank; return the exit status."""
    saved = read_saved_case(config, allocator_name)
    if saved is not None and isinstance(saved.case.input, Trace):
        return _check_trace(saved, saved.case.input, given, json)
    if saved is not None and isinstance(saved.case.input, Pair):
        from .pair_case import check_pair_case

        _refuse_options(given, "a pair, which has its specs with it")
        return check_pair_case(saved, saved.case.input, json)
    with stdout_kept():  # an allocator of somebody's own may print
        deployment = read_deployment(given)
        model = read_model(config) if saved is None else spec_of(saved.case)
        loaded = deploy_model(model, deployment, given, config)
        allocator = choose_allocator(allocator_name if saved is None else saved.allocator, loaded.spec)
        examination = examine(loaded.spec, allocator, loaded.inferred)
    outcome = None if saved is None else saved.outcome(examination)
    if json:
        document = document_of(examination)
        write_json(document if outcome is None else document | {"case": outcome})
    else:
        from .report import report_rank

        console = terminal()
        report_rank(console, examination)
        if outcome is not None:
            verb = "still breaks" if outcome["still_fails"] else "no longer breaks"
            console.print(f"\nThe case {verb} {', '.join(outcome['rules']) or 'any rule'}.", markup=False)
        print_report(console)
    return CLEAN if examination.status == "clean" else WRONG


def _check_trace(saved: SavedCase, trace: Trace, given: Given, json: bool) -> int:
    """Run the case of a trace, which says itself what it runs on."""
    from .trace_case import check_trace_case

    _refuse_options(given, "a trace, which has its spec with it")
    import_from_here()
    return check_trace_case(saved, trace, json)


def _refuse_options(given: Given, what: str) -> None:
    """Raise ``SpecError`` for the first option that changes a spec, given with a case that is ``what``."""
    extra = next((option for option, value in given.items() if value not in (None, False)), None)
    if extra is not None:
        raise SpecError(extra, f"the case is {what}: leave the option out")


def check_all_ranks(config: str, given: Given, allocator_name: str | None, json: bool) -> int:
    """Run ``check`` for all ranks; return the exit status."""
    with stdout_kept():
        deployment = read_deployment(given)
        loaded = deploy_model(read_model(config), msgspec.structs.replace(deployment, rank=0), given, config)
        count = loaded.spec.parallel.world_size
        if count > MAX_RANKS:
            raise SpecError("--all-ranks", f"found {count} ranks, needs at most {MAX_RANKS}; use --rank N")
        allocator = choose_allocator(allocator_name, loaded.spec)
        stages = []
        for ranks in watched(_alike(loaded.spec, allocator.by_stage), "ranks"):
            spec = msgspec.structs.replace(loaded.spec, rank=ranks[0])
            stages.append(StageExamination(ranks, examine(spec, allocator, loaded.inferred)))
    if json:
        write_bytes(_documents(stages))
    else:
        from .report_ranks import report_ranks

        console = terminal()
        report_ranks(console, stages)
        print_report(console)
    return CLEAN if all(stage.examination.status == "clean" for stage in stages) else WRONG


def _alike(spec: CacheSpec, by_stage: bool) -> list[tuple[int, ...]]:
    """Return the ranks in groups that an allocator treats alike."""
    ranks = range(spec.parallel.world_size)
    if not by_stage:
        return [(rank,) for rank in ranks]
    stages: dict[int, list[int]] = {}
    for rank in ranks:
        stages.setdefault(spec.parallel.coordinates(rank).pp_rank, []).append(rank)
    return [tuple(stage) for stage in stages.values()]


def _documents(stages: list[StageExamination]) -> Iterator[bytes]:
    """Yield the JSON text of all ranks in order, one stage in memory at a time."""
    yield b'{"ranks":['
    for stage in stages:  # the ranks of a stage are consecutive, and stages ascend
        document = document_of(stage.examination)
        body = {key: msgspec.Raw(msgspec.json.encode(value)) for key, value in document.items()}
        for rank in stage.ranks:
            body["spec"] = msgspec.Raw(encode_spec(msgspec.structs.replace(stage.examination.spec, rank=rank)))
            yield (b"," if rank else b"") + msgspec.json.encode(body)
    yield b"]}\n"
