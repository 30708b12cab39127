"""From a path to the decoded JSON object, without trusting the file: its kind, size, encoding, nesting and numbers."""

from __future__ import annotations

import json
import os
import stat
from typing import Any, Final

import msgspec

from ..errors import SpecError, shown_path, without_byte_order_mark
from .fields import one_line

MAX_FILE_BYTES: Final = 64 << 20
"""Largest config file read, in bytes; real ones are a few kilobytes, the largest (long label lists) a few megabytes."""

_INFINITY_FIELDS: Final = ("time_step_limit",)
"""Fields that may hold a bare ``Infinity``. It is not JSON, but transformers wrote it (huggingface/transformers#42959),
so the published configs of Mamba-2 and Nemotron-H contain it there. No cache size depends on this field."""


class _NonFinite:
    """A ``NaN`` or ``Infinity`` literal met in a file."""

    def __init__(self, literal: str) -> None:
        self.literal = literal


def read_config(source: object) -> tuple[dict[str, Any], str]:
    """Return the config that ``source`` holds, and its file's name as messages show it (empty for a dict)."""
    if isinstance(source, dict):
        return source, ""
    if not isinstance(source, (str, os.PathLike)):
        raise SpecError("source", f"found {type(source).__name__[:60]}, needs a path or a decoded config")
    try:
        path = os.fsdecode(source)
    except Exception:  # whatever the path object raises when asked for its path
        raise SpecError("source", "a path object without a path, needs a config.json or its folder") from None
    name = shown_path(path)
    if not path:
        raise SpecError("source", "found an empty path, needs a config.json or its folder")
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            path = os.path.join(path, "config.json")
            if not os.path.lexists(path):
                raise SpecError(name, "a folder without a config.json, needs the model's config.json in it")
            name = shown_path(path)
        data = _read_bytes(path, name)
    except SpecError:  # a ValueError too
        raise
    except OSError as error:
        reason = (error.strerror or type(error).__name__)[:100].lower()
        raise SpecError(name, f"cannot be read ({reason}), needs a readable config.json or its folder") from None
    except ValueError:  # a null character or a lone surrogate in the path
        raise SpecError(name, "not a valid path, needs a config.json or its folder") from None
    return _decode(data, name), name


def _read_bytes(path: str, name: str) -> bytes:
    _require_plain(os.stat(path), name)
    # Non-blocking and checked again once open: the path may have become a FIFO, on which a plain open() waits forever.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        _require_plain(os.fstat(descriptor), name)
        data = file.read(MAX_FILE_BYTES + 1)  # files under /proc have size 0, and any file may grow
    if len(data) > MAX_FILE_BYTES:
        raise _too_large(len(data), name)
    return data


def _require_plain(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SpecError(name, "not a plain file, needs a config.json or its folder")
    if status.st_size > MAX_FILE_BYTES:
        raise _too_large(status.st_size, name)


def _too_large(size_bytes: int, name: str) -> SpecError:
    return SpecError(name, f"found {size_bytes} bytes or more, needs a config of at most {MAX_FILE_BYTES} bytes")


def _decode(data: bytes, name: str) -> dict[str, Any]:
    data = without_byte_order_mark(data)
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(name, f"not UTF-8 text (byte {error.start}), needs a JSON object") from None
    try:
        config = msgspec.json.decode(data)
    except RecursionError:
        raise SpecError(name, "nested too deeply, needs a JSON object as transformers writes it") from None
    except (msgspec.MsgspecError, ValueError) as error:
        if b"NaN" not in data and b"Infinity" not in data:
            reason = " ".join(str(error).split())[:100]
            raise SpecError(name, f"not JSON ({reason}), needs a JSON object") from None
        config = _decode_non_finite(data, name)
    if not isinstance(config, dict):
        raise SpecError(name, f"found {_json_kind(config)} at the top level, needs a JSON object")
    return config


def _decode_non_finite(data: bytes, name: str) -> object:
    """Decode a file with ``NaN`` or ``Infinity`` literals; refuse each but those of ``_INFINITY_FIELDS``."""
    try:
        config = json.loads(data, parse_constant=_NonFinite)
    except RecursionError:
        raise SpecError(name, "nested too deeply, needs a JSON object as transformers writes it") from None
    except ValueError as error:
        reason = " ".join(str(error).split())[:100]
        raise SpecError(name, f"not JSON ({reason}), needs a JSON object") from None
    pending: list[tuple[str, object]] = [("", config)]
    while pending:
        field, value = pending.pop()
        if isinstance(value, _NonFinite):
            literal_allowed = value.literal == "Infinity" and field.rpartition(".")[2] in _INFINITY_FIELDS
            if not literal_allowed:
                where = one_line(field)[-100:] or name
                raise SpecError(where, f"found {value.literal}, needs a finite number (in {name})")
        elif isinstance(value, dict):
            pending.extend((f"{field[-100:]}.{key}" if field else key, item) for key, item in value.items())
        elif isinstance(value, list):
            pending.extend((field, item) for item in value)
    return config


def _json_kind(value: object) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "no object")
