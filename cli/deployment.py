"""From the text of the options to a ``Deployment`` and a spec, with errors that name the option.

``given`` maps an option to its text, True for a flag, None where it is not given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from ..model.architecture import Architecture
from ..model.errors import SpecError, require_choice, shown, shown_path, without_byte_order_mark
from ..model.formats import KV_FORMATS, STATE_FORMATS, ElementFormat, element_format
from ..model.loading import Deployment, LoadedSpec, deploy, parallel_layout, read_source
from ..model.parallel import ParallelLayout
from ..model.spec import MAX_SPEC_BYTES, CacheSpec
from .wording import printable_line

Given: TypeAlias = Mapping[str, str | bool | None]

_CONTRADICTIONS: Final = (
    ("--layout", "--tp", "both say how many ranks share the heads"),
    ("--layout", "--pp", "both say how many pipeline stages there are"),
    ("--layout", "--ep", "both say how experts are spread"),
    ("--layout", "--cp", "both say how many ranks share a sequence"),
    ("--layout", "--attention-dp", "both say whether attention runs data-parallel"),
    ("--rank", "--all-ranks", "one asks for a single rank and the other for all of them"),
    ("--slots", "--quota", "both say how many slots there are"),
    ("--state-slots", "--quota", "both say how many slots the recurrent states have"),
)

_OPTION_OF_FIELD: Final = {
    "layout": "--layout",
    "tp": "--tp",
    "pp": "--pp",
    "ep": "--ep",
    "cp": "--cp",
    "pp_partition": "--pp-partition",
    "rank": "--rank",
    "kv_format": "--kv-dtype",
    "state_format": "--state-dtype",
    "tokens_per_block": "--tokens-per-block",
    "slots": "--slots",
    "state_slots": "--state-slots",
    "quota_bytes": "--quota",
    "draft": "--draft",
    "draft.mode": "--draft",
    "draft.layers": "--draft",
    "kv_layout": "--kv-layout",
    "alignment_bytes": "--alignment",
}

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}

MAX_DIGITS: Final = 60
"""Longest number read; every range ends far below."""


def is_given(given: Given, option: str) -> bool:
    """Whether an option stands on the command line, with an empty text too."""
    return given.get(option) not in (None, False)


def refuse_contradictions(given: Given) -> None:
    """Raise ``SpecError`` for the first pair of options that contradict each other."""
    for one, other, why in _CONTRADICTIONS:
        if is_given(given, one) and is_given(given, other):
            raise SpecError("", f"{one} and {other} were both given, but {why}; give one of them")


def read_deployment(given: Given) -> Deployment:
    """Return the deployment that the options describe; raise ``SpecError`` naming the option that is wrong."""
    refuse_contradictions(given)
    draft, kv_layout = _text(given, "--draft"), _text(given, "--kv-layout")
    if draft is not None:
        require_choice("--draft", draft, ("none", "folded", "separate"))
    if kv_layout is not None:
        kv_layout = kv_layout.upper()
        require_choice("--kv-layout", kv_layout, ("HND", "NHD"))
    return Deployment(
        parallel=_read_parallel(given),
        rank=_whole(given, "--rank"),
        kv_format=_format(given, "--kv-dtype", KV_FORMATS),
        state_format=_format(given, "--state-dtype", STATE_FORMATS),
        tokens_per_block=_whole(given, "--tokens-per-block"),
        slots=_whole(given, "--slots"),
        state_slots=_whole(given, "--state-slots"),
        quota_bytes=_size(given, "--quota"),
        draft=draft,
        kv_layout=kv_layout,
        alignment_bytes=_size(given, "--alignment"),
    )


def _read_parallel(given: Given) -> ParallelLayout | None:
    tp, pp, ep, cp = (_whole(given, option) for option in ("--tp", "--pp", "--ep", "--cp"))
    partition = read_partition(_text(given, "--pp-partition"))
    attention_dp = True if given.get("--attention-dp") else None
    try:
        return parallel_layout(_text(given, "--layout"), tp, pp, ep, cp, attention_dp, partition)
    except SpecError as error:
        raise name_option(error, given, "") from None


def read_partition(text: str | None) -> tuple[int, ...] | None:
    """Return the layers of each pipeline stage that ``A,B,…`` gives."""
    if text is None:
        return None
    return tuple([read_whole("--pp-partition", entry, "whole numbers with commas between") for entry in _split(text)])


def read_list(option: str, text: str) -> list[str]:
    """Return the entries of a list with commas between; raise ``SpecError`` when one is empty."""
    entries = _split(text)
    if "" in entries:
        raise SpecError(option, f"found {shown(text)}, needs names with commas between")
    return entries


def _split(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",")]


def _text(given: Given, option: str) -> str | None:
    value = given.get(option)
    return value if isinstance(value, str) else None


def _whole(given: Given, option: str) -> int | None:
    text = _text(given, option)
    return None if text is None else read_whole(option, text)


def read_whole(option: str, text: str, needs: str = "a whole number") -> int:
    """Return the whole number that ``text`` writes; its range is for the spec to check."""
    if re.fullmatch(r"[+-]?[0-9]+", text.strip()) is None:
        raise SpecError(option, f"found {shown(text)}, needs {needs}")
    if len(text) > MAX_DIGITS:
        raise SpecError(option, f"found a number of {len(text)} characters, needs {needs} of at most {MAX_DIGITS}")
    return int(text)


def _size(given: Given, option: str) -> int | None:
    """Return a number of bytes, which may be followed by a unit."""
    text = _text(given, option)
    return None if text is None else read_size(option, text)


def read_size(option: str, text: str) -> int:
    """Return the number of bytes that ``text`` writes, with or without a unit."""
    match = re.fullmatch(r"([+-]?[0-9]+)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise SpecError(option, f"found {shown(text)}, needs bytes, such as 1048576, 512MiB or 4GiB")
    return read_whole(option, match[1], "bytes") * unit


def _format(given: Given, option: str, allowed: tuple[ElementFormat, ...]) -> ElementFormat | None:
    text = _text(given, option)
    return None if text is None else read_format(option, text, allowed)


def read_format(option: str, text: str, allowed: tuple[ElementFormat, ...]) -> ElementFormat:
    """Return the element format that ``text`` names, in the spelling of kvsan, torch or Hugging Face."""
    try:
        chosen = element_format(text, option)
    except SpecError:
        chosen = None
    if chosen is None or chosen not in allowed:
        raise SpecError(option, f"found {shown(text)}, needs one of {', '.join(each.value for each in allowed)}")
    return chosen


def name_option(error: SpecError, given: Given, source: str) -> SpecError:
    """Return ``error`` with the option that it comes from in the place of the field, else with the file ``source``."""
    option = _OPTION_OF_FIELD.get(error.field)
    if option is not None and is_given(given, option):
        return SpecError(option, error.problem)
    layout = given.get("--layout")
    if layout and error.field in ("tp", "pp", "ep", "cp", "pp_partition"):
        return SpecError("--layout", f"{shown(layout)}: {error.field}: {error.problem}")
    return SpecError(shown_path(source), str(error)) if source else error


def read_model(config: str) -> Architecture | CacheSpec:
    """Return what the file or folder ``config`` holds; raise ``SpecError`` naming it."""
    if not config:
        raise SpecError("CONFIG", "found an empty path, needs a model's config.json, its folder, or a saved spec")
    try:
        return read_source(config)
    except SpecError as error:
        _refuse_other_files_of_ours(config)
        names = shown_path(config), shown_path(Path(config, "config.json"))
        named = error.field in names or error.problem.endswith(tuple([f"(in {name})" for name in names]))
        raise (error if named else SpecError(names[0], str(error))) from None


def _refuse_other_files_of_ours(config: str) -> None:
    """Raise ``SpecError`` for a file that says it is one of ours, but no spec."""
    try:
        path = Path(config)
        if not path.is_file() or path.stat().st_size > MAX_SPEC_BYTES:
            return
        kind = msgspec.json.decode(without_byte_order_mark(path.read_bytes()), type=dict[str, Any]).get("kvsan", "spec")
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return
    if kind != "spec":
        found = f"a kvsan {kind}" if isinstance(kind, str) else f"kvsan: {shown(kind)}"
        needed = "a saved case with it as its input" if kind == "trace" else "a model's config.json or a saved spec"
        problem = f"found {printable_line(found)[:80]}, needs {needed}"
        raise SpecError(shown_path(config), problem)


def deploy_model(model: Architecture | CacheSpec, deployment: Deployment, given: Given, source: str) -> LoadedSpec:
    """Return the spec of one rank; raise ``SpecError`` naming the option, or the file, that is wrong."""
    try:
        return deploy(model, deployment)
    except SpecError as error:
        raise name_option(error, given, source) from None
