"""The integer set library as the last resort: exact for any integers, but it may give up.

``islpy`` is imported inside the functions: whoever never needs it never pays for it. Sets are written as text, because
isl reads integers of any length there.
"""

from __future__ import annotations

from collections.abc import Sequence

from .equation import Term
from .views import SlotView, dims

#: Where isl gives up: a few seconds at most, since the operations of the hardest sets, on long integers, are slow.
OPERATION_LIMIT = 50_000


class Undecided(RuntimeError):
    """Neither the search nor isl answered within its limit; the limits count steps and ignore the clock."""


def least_cost(terms: Sequence[Term], target: int) -> int | None:
    """Return the least ``sum(stride * max(0, d))`` with ``sum(stride * d) == target``, or None; see ``equation``."""
    names, limits, costs, parts = _written(terms)
    return _least(["c", *names], [f"c = {_sum(costs)}", f"{_sum(parts)} = {target}", *limits])


def least_cost_of_distinct_slots(a: SlotView, b: SlotView, terms: Sequence[Term], target: int) -> int | None:
    """As ``least_cost``, with the slots of both sides as coordinates of their own that must differ.

    ``terms`` are the other coordinates, ``target`` counts from a's first byte to b's.
    """
    names, limits, costs, parts = _written(terms)
    slots = {}
    for name, view, sign in (("s", a, 1), ("t", b, -1)):
        last, stride = view.slot_count - 1, view.slot_stride_bytes
        # A negative stride counts the slots from the last one, which has the lowest address.
        slots[name] = name if stride >= 0 else f"{last} - {name}"
        limits.append(f"0 <= {name} <= {last}")
        parts.append(f"{sign * abs(stride)}{name}")
    costs.append(f"{abs(a.slot_stride_bytes)}s")
    rules = [f"c = {_sum(costs)}", f"{_sum(parts)} = {target}", *limits, f"{slots['s']} != {slots['t']}"]
    return _least(["c", "s", "t", *names], rules)


def least_element(
    view: SlotView, byte: int, *, other_slot_than: int | None = None, after: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """Return the least ``(slot, *index, byte_in_item)`` that contains ``byte``, or None.

    ``other_slot_than`` excludes a slot, ``after`` asks for the next one after that element.
    """
    shape = list(dims(view))
    names = [f"x{position}" for position in range(len(shape))]
    rules = [f"0 <= {name} < {count}" for name, (count, _) in zip(names, shape, strict=True)]
    rules.append(
        _sum([f"{stride}{name}" for name, (_, stride) in zip(names, shape, strict=True)])
        + f" = {byte - view.offset_bytes}"
    )
    if other_slot_than is not None:
        rules.append(f"{names[0]} != {other_slot_than}")
    if after is not None:
        later = (
            " and ".join(
                [*(f"{name} = {x}" for name, x in zip(names[:n], after, strict=False)), f"{names[n]} > {after[n]}"]
            )
            for n in range(len(names))
        )
        rules.append("(" + " or ".join(f"({rule})" for rule in later) + ")")
    found: list[int] = []
    for name in names:
        least = _least([name, *(other for other in names if other != name)], rules)
        if least is None:
            return None
        found.append(least)
        rules.append(f"{name} = {least}")
    return tuple(found)


def _written(terms: Sequence[Term]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Write the terms for isl: names, limits, costs, parts of the sum."""
    names: list[str] = []
    limits: list[str] = []
    costs: list[str] = []
    parts: list[str] = []
    for position, (stride, low, high, _) in enumerate(terms):
        d, p = f"d{position}", f"p{position}"
        names.append(d)
        limits.append(f"{low} <= {d} <= {high}")
        parts.append(f"{stride}{d}")
        if low >= 0:
            costs.append(f"{stride}{d}")
        elif high > 0:
            # p = max(0, d) at the least cost
            names.append(p)
            limits += [f"0 <= {p} <= {high}", f"{p} >= {d}"]
            costs.append(f"{stride}{p}")
    return names, limits, costs, parts


def _sum(parts: Sequence[str]) -> str:
    return " + ".join(parts) or "0"


def _least(names: Sequence[str], rules: Sequence[str]) -> int | None:
    """Return the least value of the first name, or None if no integer point satisfies the rules.

    Not by ``lexmin``, which fails on some of these sets ("affine expression involves some of the domain dimensions",
    in islpy 2026.2.2, from isl_domain_factor_templ.c): the minimum of one dimension is plain integer programming.
    """
    import islpy as isl

    context = isl.Context()
    context.set_max_operations(OPERATION_LIMIT)
    text = f"{{ [{', '.join(names)}] : {' and '.join(rules)} }}"
    try:
        least = isl.Set.read_from_str(context, text).dim_min_val(0)
    except isl.Error:  # where the limit is reached while the text is read, isl calls it a syntax error
        least = None
    if least is None:  # raised here, since isl's errors cannot be compared, and contexts of exceptions are
        problem = f"isl spent {OPERATION_LIMIT} operations on {len(names)} unknowns"
        raise Undecided(f"{problem}; simplify the strides of the views")
    return int(least.to_str()) if least.is_int() else None
