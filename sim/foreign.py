"""What may be called as an allocator, decided without calling it."""

from __future__ import annotations

import functools
import inspect
import sys

from ..model.errors import SpecError, shown


def require_allocator(function: object, name: str) -> None:
    """Refuse, without calling it, what cannot be an allocator (``os:system``).

    An allocator is written in Python (a function, a method, or an object with ``__call__``), lies outside the standard
    library, and takes one positional argument.
    """
    needs = "needs a Python function that takes a CacheSpec and returns a Layout"
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    if inspect.isclass(inner):
        raise SpecError("allocator", f"{shown(name)} is a class, {needs}")
    home = str(getattr(inner, "__module__", None) or "builtins").partition(".")[0]
    if home in sys.stdlib_module_names:
        raise SpecError("allocator", f"{shown(name)} is part of Python's own library, {needs}")
    by_class = inspect.getattr_static(type(inner), "__call__", None)
    if not (inspect.isfunction(inner) or inspect.ismethod(inner) or inspect.isfunction(by_class)):
        raise SpecError("allocator", f"{shown(name)} is not written in Python, {needs}")
    try:
        inspect.signature(function).bind(None)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise SpecError("allocator", f"{shown(name)} cannot be called with one argument, {needs}") from None
