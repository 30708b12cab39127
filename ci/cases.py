"""Saved cases: one JSON file holds an input, the allocator's name and what was found, and can be run again years later.

A case is canonical (keys sorted, no spaces), named by a hash of what makes it (schema, allocator, input), and written
atomically, so a file is either whole or absent. Loading one never runs code and never takes unbounded memory: the text
is bounded before it is read, every field is validated, and an allocator of the user's own (``module:function``) is only
resolved when the user names it as well.

Versions: ``version`` is the schema of the file. Older versions are migrated on load, one step at a time
(``_MIGRATIONS``); a newer one is refused in one line.

The schema is published as ``docs/case.schema.json``, which this writes anew:

    python -m kvsan.ci.cases > docs/case.schema.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from ..model.errors import SpecError, shown, shown_path, without_byte_order_mark
from ..model.spec import CacheSpec, one_line
from ..sim.cache.trace import Trace
from ..sim.rules import RULES
from ..sim.transfer.pair import Pair

CASE_VERSION: Final = 1
MAX_CASE_BYTES: Final = 16 << 20

CaseInput: TypeAlias = CacheSpec | Trace | Pair
"""What a case can be about: a spec, a trace of a running cache, or a pair of deployments."""

Migration = Callable[[dict[str, Any]], dict[str, Any]]
_MIGRATIONS: Final[dict[int, Migration]] = {}
"""From a version to the next one: each takes and returns the decoded JSON object."""


class FoundRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule that the case breaks, and the first message."""

    rule: str
    message: str


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kvsan", tag="case"):
    """An input with the allocator that fails on it and what was found; ``input`` is a spec, a trace, or a pair.

    With a pair ``allocator`` is one that lays out both sides, ``fault:NAME`` of a faulty transfer, or ``transfer``.
    """

    version: int = CASE_VERSION
    allocator: str
    input: CaseInput
    found: tuple[FoundRule, ...] = ()

    @property
    def digest(self) -> str:
        """The case's identity: 128 bits over schema, allocator and input, as 32 hex digits."""
        what = msgspec.json.encode([f"case/{self.version}", self.allocator, self.input], order="sorted")
        return hashlib.blake2b(what, digest_size=16).hexdigest()

    @property
    def file_name(self) -> str:
        """The name under which the case is saved."""
        return f"{self.digest}.json"


_DECODER: Final = msgspec.json.Decoder(Case)
_INPUT_DECODER: Final = msgspec.json.Decoder(CaseInput)


def encode_input(value: CaseInput) -> bytes:
    """Return the canonical JSON text of a case's input."""
    return msgspec.json.encode(value, order="sorted")


def decode_input(text: bytes) -> CaseInput:
    """Return the spec, trace or pair in ``text``; raise ``SpecError`` for anything else."""
    try:
        return _INPUT_DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError("input", str(error)) from None


def spec_of(case: Case) -> CacheSpec:
    """Return the spec that a case is about; raise ``SpecError`` for a case of another kind."""
    if not isinstance(case.input, CacheSpec):
        what = "a trace of a running cache" if isinstance(case.input, Trace) else "a pair of deployments"
        raise SpecError("input", f"found {what}, needs the case of a spec")
    return case.input


def encode_case(case: Case) -> bytes:
    """Return the canonical JSON text of ``case``, ending in a newline."""
    return msgspec.json.encode(case, order="sorted") + b"\n"


def decode_case(text: bytes) -> Case:
    """Return the case in ``text``; raise ``SpecError``, one line, for anything but a case of a known version."""
    if len(text) > MAX_CASE_BYTES:
        raise SpecError("", f"a case of {len(text)} B, needs at most {MAX_CASE_BYTES} B")
    text = without_byte_order_mark(text)
    try:
        document = msgspec.json.decode(text)
        if not isinstance(document, dict) or document.get("kvsan") != "case":
            raise SpecError("", 'not a saved case, needs a JSON object with "kvsan": "case"')
        version = document.get("version")
        if type(version) is not int or version < 1:
            raise SpecError("version", f"found {shown(version)}, needs a whole number from 1 to {CASE_VERSION}")
        if version > CASE_VERSION:
            raise SpecError(
                "version", f"found {shown(version)}, and this kvsan reads up to {CASE_VERSION}: use a newer one"
            )
        if version == CASE_VERSION:
            return _DECODER.decode(text)
        return msgspec.convert(_migrated(document, version), Case)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError("", one_line(str(error))) from None
    except RecursionError:
        raise SpecError("", "the JSON is nested too deeply") from None


def _migrated(document: dict[str, Any], version: int) -> dict[str, Any]:
    """Return the decoded JSON of an older version in today's; a step that cannot read it is bad input, not a bug."""
    for step in range(version, CASE_VERSION):
        migrate = _MIGRATIONS.get(step)
        if migrate is None:
            raise SpecError("version", f"found {version}, and this kvsan reads no version before {step + 1}")
        try:
            document = migrate(document) | {"version": step + 1}
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"not a case of version {step}, it cannot be migrated ({type(error).__name__}: {error})"
            raise SpecError("", one_line(problem)) from None
    return document


def load_case(path: Path) -> Case:
    """Return the case saved at ``path``; raise ``SpecError`` naming the file for anything else.

    A rule that nobody knows is refused: a case that waits for it could never fail.
    """
    case = _read_case(path)
    known = [rule.name for rule in RULES]
    for entry in case.found:
        if entry.rule not in known:
            problem = f"found: unknown rule {shown(entry.rule)}, needs names from `kvsan rules`, or a newer kvsan"
            raise SpecError(shown_path(path), problem)
    return case


def _read_case(path: Path) -> Case:
    name = shown_path(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise SpecError(name, "not a file, needs a saved case")
        if found.st_size > MAX_CASE_BYTES:
            raise SpecError(name, f"a file of {found.st_size} B, needs at most {MAX_CASE_BYTES} B")
        with path.open("rb") as file:
            return decode_case(file.read(MAX_CASE_BYTES + 1))  # it may have grown, or be larger than it says
    except OSError as error:
        raise SpecError(name, error.strerror or type(error).__name__) from None
    except SpecError as error:
        raise error if error.field == name else SpecError(name, str(error)) from None


def save_case(case: Case, folder: Path) -> Path:
    """Write ``case`` into ``folder`` under its own name, whole or not at all, and return the path.

    Raises ``SpecError`` when the folder cannot be made or written.
    """
    target = folder / case.file_name
    temporary = folder / f".case-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(encode_case(case))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise SpecError(str(folder), f"cannot save a case: {error.strerror or type(error).__name__}") from None
    return target


def add_case(case: Case, folder: Path) -> Path:
    """Save ``case``, or add its rules to the case of the same name that is there already; return the path.

    What is there stays as it is, byte for byte, when it names all of the rules.
    """
    target = folder / case.file_name
    with _alone_in(folder):
        with contextlib.suppress(SpecError):  # none there, or none that can be read
            held = _read_case(target)
            rules = {entry.rule for entry in held.found}
            new = tuple(entry for entry in case.found if entry.rule not in rules)
            if held.digest == case.digest:
                if not new:
                    return target
                found = sorted(held.found + new, key=lambda entry: entry.rule)
                case = msgspec.structs.replace(held, found=tuple(found))
        return save_case(case, folder)


def withdraw_case(path: Path, rule: str) -> None:
    """Take ``rule`` from the case at ``path``, and the file away when no other rule is left."""
    with _alone_in(path.parent), contextlib.suppress(SpecError):  # gone already
        held = _read_case(path)
        found = tuple(entry for entry in held.found if entry.rule != rule)
        if found == held.found:
            return
        if found:
            save_case(msgspec.structs.replace(held, found=found), path.parent)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes that change cases in ``folder`` waiting, so that of two rules added at once none is lost.

    Where a system or a file system has no such locks, changes are merely unlikely to meet.
    """
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def require_folder(folder: Path, field: str) -> None:
    """Raise ``SpecError`` for ``field`` unless cases can be saved in ``folder``, which need not exist yet."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise SpecError(field, f"{folder}: {error.strerror or type(error).__name__}") from None
    if not there.is_dir():
        raise SpecError(field, f"{folder} is not a folder" if there == folder else f"{there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SpecError(field, f"{there} cannot be written")


def case_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the case files among ``paths``: files as they are, folders by the JSON files in them, in order of name."""
    for path in paths:
        if path.is_dir():
            yield from sorted(path.glob("*.json"))
        else:
            yield path


def case_allocator(case: Case, given: str | None) -> str:
    """Return the allocator to run ``case`` with.

    A name that would import code (``module:function``) counts only when the user gave it too; otherwise ``SpecError``.
    """
    if given is not None:
        return given
    if ":" in case.allocator and not case.allocator.startswith("fault:"):
        raise SpecError(
            "allocator",
            f"the case names {shown(case.allocator)}, and code is never loaded because a file says so: "
            f"give --allocator {case.allocator} if you trust it",
        )
    return case.allocator


def schema() -> str:
    """Return the JSON schema of a case file, as published."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A saved case of kvsan"}
    return json.dumps(dialect | _unwrapped(msgspec.json.schema(Case)), indent=1, sort_keys=True) + "\n"


def _unwrapped(node: Any) -> Any:
    """Return a schema with each description on one line, however the docstring that it comes from is wrapped."""
    if isinstance(node, list):
        return [_unwrapped(member) for member in node]
    if not isinstance(node, dict):
        return node
    found = {key: _unwrapped(value) for key, value in node.items()}
    if isinstance(found.get("description"), str):
        found["description"] = " ".join(found["description"].split())
    return found


if __name__ == "__main__":
    sys.stdout.write(schema())
