"""What ``kvsan replay`` is to replay: from paths on the command line to jobs for its children.

A file that is named must be good, or nothing runs. A bad one in a folder is an entry of its own, and the others run.
Allocators of ours run in the child; one of somebody's own and an installed engine run here, so that their code never
meets the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ..ci.cases import case_files
from ..ci.replay.messages import LayoutJob, Outcome, SpecJob, TraceJob
from ..ci.replay.supervisor import Item
from ..model.errors import SpecError, shown, shown_path
from ..model.loading import Deployment
from ..model.spec import encode_spec
from ..sim.cache.names import layout_allocator
from ..sim.cache.trace import Trace
from ..sim.registry import ALLOCATORS, resolve
from ..sim.rejection import Rejected
from ..sim.transfer.pair import Pair
from .allocator_choice import AUTO, choose_allocator, import_from_here
from .deployment import Given, deploy_model, read_deployment, read_model
from .examination import laid_out
from .saved_case import read_saved_case

OURS: Final = frozenset([entry.name for entry in ALLOCATORS if entry.kind != "installed"])
"""Allocators that the child runs itself; an installed engine is asked by this process, which has it warm."""


class Source(msgspec.Struct, frozen=True):
    """One case: where it is, and whether the command line names it (or only its folder)."""

    path: str
    named: bool


class Prepared(msgspec.Struct, frozen=True):
    """A case that has been read: the allocator that it runs with, None where it could not be read."""

    source: Source
    allocator: str | None
    item: Item


def sources_of(paths: Sequence[str]) -> list[Source]:
    """Return the cases at ``paths``; raise ``SpecError`` naming a path where there is none.

    A folder is one case where it is a model's (it has a config.json), else all the JSON files in it.
    """
    found: list[Source] = []
    for path in paths:
        if not path:
            raise SpecError("CASE_OR_DIR", "found an empty path, needs a saved case, a folder of them, or a model's")
        try:
            folder = Path(path).is_dir()
            files = [str(file) for file in case_files([Path(path)])] if folder else [path]
            model = folder and (Path(path) / "config.json").is_file()
        except (OSError, ValueError) as error:
            raise SpecError(shown_path(path), getattr(error, "strerror", None) or str(error)) from None
        if not folder or model:
            found.append(Source(path, True))
            continue
        if not files:
            raise SpecError(shown_path(path), "no case in this folder, needs files that end in .json")
        found += [Source(file, False) for file in files]
    return found


def prepare(sources: Sequence[Source], given: Given, allocator: str | None) -> Iterator[Prepared]:
    """Yield the cases ready to be replayed, those in folders when they are asked for.

    Raises ``SpecError`` before the first one for a file named on the command line that is bad.
    """
    deployment = read_deployment(given)
    if allocator is not None and allocator != AUTO and layout_allocator(allocator) not in OURS:
        allocator_named(allocator)
    named = [_read(source, deployment, given, allocator) if source.named else None for source in sources]
    return _prepared(sources, named, deployment, given, allocator)


def allocator_named(name: str) -> None:
    """Raise ``SpecError`` unless ``name`` is an allocator; for one that is not ours, its module is imported."""
    import_from_here()
    try:
        resolve(name)
    except SpecError as error:
        raise SpecError("--allocator", error.problem) from None


def _prepared(
    sources: Sequence[Source],
    named: list[Prepared | None],
    deployment: Deployment,
    given: Given,
    allocator: str | None,
) -> Iterator[Prepared]:
    for source, ready in zip(sources, named, strict=True):
        if ready is None:
            try:
                ready = _read(source, deployment, given, allocator)
            except SpecError as error:
                ready = Prepared(source, None, Outcome(status="bad-input", message=str(error)))
        yield ready


def _trace_job(trace: Trace, allocator: str) -> TraceJob:
    """Return the job of a trace; the child knows its running cache by the allocator's name."""
    base = layout_allocator(allocator)
    if base not in OURS:
        raise SpecError("--allocator", f"found {shown(allocator)}, and traces run on the caches of kvsan alone")
    return TraceJob(trace, allocator)


def _read(source: Source, deployment: Deployment, given: Given, allocator: str | None) -> Prepared:
    """Return one case, ready to be replayed; raise ``SpecError`` for what cannot be."""
    saved = read_saved_case(source.path, allocator)
    model = read_model(source.path) if saved is None else saved.case.input
    if isinstance(model, Pair):
        raise SpecError(shown_path(source.path), "the case of a pair of deployments, use: kvsan peers CASE --replay")
    if isinstance(model, Trace):
        name = "" if saved is None else saved.allocator
        return Prepared(source, name, _trace_job(model, name))
    spec = deploy_model(model, deployment, given, source.path).spec
    chosen = choose_allocator(allocator if saved is None else saved.allocator, spec)
    if chosen.name in OURS:
        return Prepared(source, chosen.name, SpecJob(encode_spec(spec), chosen.name))
    try:
        layout = laid_out(spec, chosen)
    except Rejected as rejection:
        return Prepared(source, chosen.name, Outcome.rejected(rejection))
    try:
        msgspec.msgpack.encode(layout)
    except Exception as error:  # whole numbers of more than 64 bits
        problem = f"{chosen.name}: returned a layout that cannot be replayed ({type(error).__name__}: {error})"
        raise SpecError("--allocator", problem) from None
    return Prepared(source, chosen.name, LayoutJob(layout))
