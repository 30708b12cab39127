"""What campaigns over traces and over pairs have in common: their chunks, saved cases, the reduced case on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ..model.errors import SpecError
from ..model.spec import CacheSpec
from ..sim.cache.trace import Trace
from ..sim.transfer.pair import Pair
from .campaign import Options
from .cases import Case, add_case, case_files, encode_input, load_case, withdraw_case
from .ledger import SavedCases

Input = TypeVar("Input", CacheSpec, Trace, Pair)


def chunk_tasks(options: Options, started: float, size: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk, examples) of chunks of ``size`` while there is budget; ``started`` is a monotonic time."""
    left, chunk = options.examples, 0
    while left is None or left > 0:
        if options.seconds is not None and time.monotonic() - started >= options.seconds:
            return
        count = size if left is None else min(size, left)
        yield chunk, count
        chunk += 1
        left = None if left is None else left - count


def saved_cases_of(
    options: Options,
    kind: type[Input],
    rules_of: Callable[[Input, str], Iterable[str]],
    record: Callable[[bytes], None] = lambda judged: None,
) -> SavedCases:
    """Run the saved cases of the campaign's folder again, those of its allocator with an input of this ``kind``.

    ``rules_of`` gives the rules that an input breaks now with an allocator, and ``record`` is told each input before;
    a case fails while it breaks a rule that it was saved for, or, naming none, any; and where it cannot be judged.
    """
    run, failing, not_run, unreadable = [], [], [], []
    for path in case_files([options.cases] if options.cases is not None and options.cases.is_dir() else []):
        try:
            case = load_case(path)
        except SpecError:
            unreadable.append(path.name)
            continue
        if case.allocator != options.allocator or not isinstance(case.input, kind):
            not_run.append(path.name)
            continue
        record(encode_input(case.input))
        run.append(path.name)
        saved = {entry.rule for entry in case.found}
        try:
            rules = set(rules_of(case.input, case.allocator))
        except Exception:  # no layout, or one that nothing can be made of
            failing.append(path.name)
            continue
        if saved & rules if saved else rules:
            failing.append(path.name)
    return SavedCases(tuple(run), tuple(failing), tuple(not_run), tuple(unreadable))


def save_reduced(case: Case, rule: str, before: Iterable[str | None], folder: Path) -> str:
    """Save the reduced case of ``rule`` in place of those saved on the way (file names ``before``); return its path."""
    path = add_case(case, folder)
    for name in before:
        if name is not None and name != path.name:
            withdraw_case(folder / name, rule)
    return str(path)
