"""A layout's values: every field holds what its annotation says, and pages add up.

Nothing keeps an allocator of somebody's own from answering with a float, a NumPy integer or a list; rules would compute
with it, or fail somewhere deep inside. The shipped allocators are not asked: their types are checked before they run.

All values of one field are looked at together, by the types that occur among them (``_fit``); only where one does not
fit are they gone through one by one, to name it (``_require``).
"""

from __future__ import annotations

import itertools
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from ..model.errors import SpecError, require_int, shown
from ..model.formats import ElementFormat
from ..model.spec import CacheSpec
from .layout import Layout
from .page import Page, strided_page

MAX_WHOLE: Final = (1 << 127) - 1
"""Largest size or offset, in whatever unit, and with a minus the smallest: specs go up to pools of 2^100 B."""
MAX_TEXT_CHARACTERS: Final = 1000
"""Longest role, manager or note."""

_COUNTS: Final = ("slot_count", "cell_count", "shape")
"""Fields whose numbers cannot be negative, whatever a rule may have to say of them."""


def check_values(layout: Layout) -> None:
    """Raise ``SpecError``, naming the field, the value found and the value needed, for the first value that is wrong.

    The spec is not looked at: it was validated when it was made.
    """
    for field in _FIELDS[Layout]:
        value = getattr(layout, field.name)
        if field.name != "spec" and not _fit((value,), field.type, field.name):
            _require(f"layout.{field.name}", value, field.type)
    if layout.spec is not None and type(layout.spec) is not CacheSpec:
        raise SpecError("layout.spec", f"found {shown(layout.spec)}, needs a CacheSpec or None")


def _fit(values: Sequence[Any], hint: Any, name: str) -> bool:
    """Whether all ``values`` of a field called ``name`` are what the annotation ``hint`` says, all at once."""
    found = set(map(type, values))
    if not found:
        return True
    if hint is int:
        return found == {int} and min(values) >= _least(name) and max(values) <= MAX_WHOLE
    if hint is str:
        return found == {str} and all(_text_problem(text) is None for text in set(values))
    if hint is bool or hint is ElementFormat:
        return found == {hint}
    arguments = typing.get_args(hint)
    if types.NoneType in arguments:
        return _fit([value for value in values if value is not None], arguments[0], name)
    if arguments:
        return found == {tuple} and _tuples_fit(values, arguments, name)
    if found != {hint}:
        return False
    distinct = list({id(value): value for value in values}.values())
    columns = zip(*map(msgspec.structs.astuple, distinct), strict=True)
    fit = all(_fit(column, field.type, field.name) for column, field in zip(columns, _FIELDS[hint], strict=True))
    return fit and (hint is not Page or all(_page_problem(page) is None for page in set(distinct)))


def _tuples_fit(values: Sequence[tuple[Any, ...]], arguments: tuple[Any, ...], name: str) -> bool:
    if arguments[-1] is Ellipsis:
        return _fit([*itertools.chain.from_iterable(values)], arguments[0], name)
    if set(map(len, values)) != {len(arguments)}:
        return False
    columns = zip(*values, strict=True)
    return all(_fit(column, hint, name) for column, hint in zip(columns, arguments, strict=True))


def _least(name: str) -> int:
    return 0 if name in _COUNTS else -MAX_WHOLE


def _require(path: str, value: Any, hint: Any) -> None:
    """Raise ``SpecError`` unless ``value`` is what ``hint``, an annotation of a layout's struct, says."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is int:
        require_int(path, value, _least(path.rpartition(".")[2].partition("[")[0]), MAX_WHOLE)
    elif hint is str:
        _raise_for(path, _text_problem(value))
    elif hint is bool:
        if type(value) is not bool:
            raise SpecError(path, f"found {shown(value)}, needs True or False")
    elif origin in (types.UnionType, typing.Union):
        if value is not None:
            _require(path, value, next(each for each in arguments if each is not types.NoneType))
    elif origin is tuple:
        _require_tuple(path, value, arguments)
    elif hint is ElementFormat:
        if type(value) is not ElementFormat:
            raise SpecError(path, f"found {shown(value)}, needs an ElementFormat")
    else:
        if type(value) is not hint:
            raise SpecError(path, f"found {shown(value)}, needs a {hint.__name__}")
        for field in _FIELDS[hint]:
            _require(f"{path}.{field.name}", getattr(value, field.name), field.type)
        if hint is Page:
            _raise_for(path, _page_problem(value))


def _raise_for(path: str, problem: str | None) -> None:
    if problem is not None:
        raise SpecError(path, problem)


def _text_problem(value: Any) -> str | None:
    """Say what is wrong with a text: none at all, endless, or with lone surrogates, which have no UTF-8."""
    if type(value) is not str:
        return f"found {shown(value)}, needs a text"
    if len(value) > MAX_TEXT_CHARACTERS:
        return f"found {len(value)} characters, needs at most {MAX_TEXT_CHARACTERS}"
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"found {shown(value)}, needs a text that UTF-8 can write"
    return None


def _require_tuple(path: str, value: Any, arguments: tuple[Any, ...]) -> None:
    if type(value) is not tuple:
        raise SpecError(path, f"found {shown(value)}, needs a tuple")
    open_ended = arguments[-1] is Ellipsis
    if not open_ended and len(value) != len(arguments):
        raise SpecError(path, f"found {len(value)} entries, needs {len(arguments)}")
    hints: Iterable[Any] = (arguments[0] for _ in value) if open_ended else arguments
    for number, (member, hint) in enumerate(zip(value, hints, strict=True)):
        _require(f"{path}[{number}]", member, hint)


def _page_problem(page: Page) -> str | None:
    """Say where a page's axes do not match, or where it says something else of its bytes than its strides do."""
    counts = len(page.axes), len(page.shape), len(page.stride_bytes)
    if len(set(counts)) > 1:
        return "found {} axes, {} sizes and {} strides, needs as many of each".format(*counts)
    if page.stride_bytes and min(page.stride_bytes) < 0:
        return f"found a stride of {min(page.stride_bytes)} B, needs at least 0 B"
    real = strided_page(page.format, page.axes, page.shape, page.stride_bytes)
    if page.span_bytes != real.span_bytes:
        return f"found a span of {page.span_bytes} B, and its strides reach over {real.span_bytes} B"
    if page.dense and not real.dense:
        return "found a page called dense, and its strides leave gaps or overlap"
    return None


def _fields_of(kind: type[msgspec.Struct]) -> dict[type[msgspec.Struct], tuple[msgspec.structs.FieldInfo, ...]]:
    """Return the fields of a struct and of all structs inside it."""
    found = {kind: msgspec.structs.fields(kind)}
    for field in found[kind]:
        for inner in (field.type, *typing.get_args(field.type)):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct) and inner is not CacheSpec:
                found |= _fields_of(inner)
    return found


_FIELDS: Final = _fields_of(Layout)
