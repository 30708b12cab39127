"""``check_tensors``: the rules of a layout, asked of live tensors. ``assert_no_alias`` is the same for a unit test.

    import kvsan

    kvsan.assert_no_alias({"layers.0.key": key, "layers.0.value": value})

Nothing is read or written in the tensors' memory, and no library is imported: shapes, strides, addresses and storages
are all that counts, so tensors on a GPU or on the meta device are checked as quickly as any.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from ...model.errors import SpecError, shown
from ..finding import Finding, Where
from ..overlap import Undecided, smallest_collision, smallest_self_collision
from ..overlap.elements import certain, least_element
from .candidates import meeting_pairs, runs_of
from .contract import TensorContract, names
from .one import alignment_problems, bounds_problems, int32_problems, stride_problems
from .reading import read_tensors
from .view import TensorView, byte_set, described, label

FINDINGS_PER_RULE = 20
"""Findings that one rule reports: a mistake in a layer repeats in every layer."""


def check_tensors(
    tensors: object,
    *,
    exclusive: Iterable[str] | None = None,
    contract: TensorContract | None = None,
    limit: int = FINDINGS_PER_RULE,
) -> list[Finding]:
    """Return what is wrong with ``tensors``, a dict from names to tensors (or lists of tensors) of any library.

    ``exclusive`` names those that must share no byte with any other of ``tensors``; None means all of them, an empty
    list none. Rules: ``alias`` (two tensors share a byte, or two elements of one do), ``bounds`` (a tensor leaves its
    storage), ``alignment``, and what ``contract`` adds. At most ``limit`` findings of each rule. Empty tensors have no
    bytes, and nothing to find. Raises ``SpecError``, one line, for anything that is no tensor, for unknown names, and
    where it is beyond what can be decided whether two tensors share a byte.
    """
    views = read_tensors(tensors)
    contract = TensorContract() if contract is None else contract
    if type(contract) is not TensorContract:
        raise SpecError("contract", f"found {shown(contract)}, needs a kvsan.TensorContract")
    alone = _exclusive(views, exclusive)
    _require_known(views, "contract.self_overlap", contract.self_overlap)
    for number, group in enumerate(contract.shared):
        _require_known(views, f"contract.shared[{number}]", group)
    filled = [view for view in views if not view.empty]
    findings: list[Finding] = []
    for found in (
        itertools.chain(_shared_bytes(filled, alone, contract), _self_overlaps(filled, contract)),
        bounds_problems(filled),
        alignment_problems(filled, contract),
        int32_problems(filled, contract),
        stride_problems(filled, contract),
    ):
        findings += itertools.islice(found, limit)
    return findings


def assert_no_alias(
    tensors: object, *, exclusive: Iterable[str] | None = None, contract: TensorContract | None = None
) -> None:
    """Raise ``AssertionError`` with every ``alias`` finding of ``check_tensors``; return None where there is none."""
    found = [finding for finding in check_tensors(tensors, exclusive=exclusive, contract=contract)
             if finding.rule == "alias"]  # fmt: skip
    if found:
        raise AssertionError("\n".join(f"{finding.rule}: {finding.message}" for finding in found))


def _exclusive(views: tuple[TensorView, ...], exclusive: Iterable[str] | None) -> frozenset[str]:
    if exclusive is None:
        return frozenset(view.name for view in views)
    wanted = names("exclusive", exclusive)
    _require_known(views, "exclusive", wanted)
    known = {view.name for view in views}
    return frozenset(view.name for view in views if view.name in wanted or _family(view.name, known) in wanted)


def _family(name: str, known: set[str]) -> str:
    """Return the name that a list of tensors was given under; ``name`` itself for a tensor of its own."""
    return name.rpartition("[")[0] if name.endswith("]") else name


def _require_known(views: tuple[TensorView, ...], field: str, wanted: Iterable[str]) -> None:
    known = {view.name for view in views}
    known |= {_family(name, known) for name in known}
    for name in wanted:
        if name not in known:
            raise SpecError(field, f"found {shown(name)}, which none of the {len(views)} tensors is called")


def _shared_bytes(views: list[TensorView], alone: frozenset[str], contract: TensorContract) -> Iterator[Finding]:
    """Yield pairs of tensors of which one is exclusive, with the smallest byte that they share."""
    meant = {frozenset(pair) for group in contract.shared for pair in itertools.combinations(group, 2)}
    spaces: dict[str, list[int]] = {}
    for place, view in enumerate(views):
        spaces.setdefault(view.space, []).append(place)
    for places in spaces.values():
        for one, other in meeting_pairs([runs_of(place, byte_set(views[place])) for place in places]):
            first, second = sorted((one, other), key=lambda runs: runs.place)
            left, right = views[first.place], views[second.place]
            if not (left.name in alone or right.name in alone) or frozenset((left.name, right.name)) in meant:
                continue
            try:
                found = smallest_collision(first.view(), second.view())
            except Undecided as error:
                pair = f"{label(left.name)} and {label(right.name)}"
                raise SpecError("tensors", f"alias cannot be decided for {pair}: {error}") from None
            if found is not None:
                yield _pair_finding(left, right, found.byte)


def _pair_finding(left: TensorView, right: TensorView, byte: int) -> Finding:
    elements = []
    for view in (left, right):
        element = certain(least_element(byte_set(view), byte)[0], byte)
        elements.append(f"element {element[1:-1]} of {label(view.name)}")
    return Finding(
        rule="alias",
        message=f"{described(left)} and {described(right)} share byte {_byte(left, byte)}: {' and '.join(elements)}",
        remedy="give each bytes of its own (compare storage offsets and strides), or, where sharing is meant, leave "
        "them out of exclusive or name both in contract.shared",
        where=(_where(left, byte, byte + 1), _where(right, byte, byte + 1)),
    )


def _self_overlaps(views: list[TensorView], contract: TensorContract) -> Iterator[Finding]:
    """Yield tensors of which two elements share a byte."""
    for view in views:
        if view.name in contract.self_overlap:
            continue
        try:
            found = smallest_self_collision(byte_set(view))
        except Undecided as error:
            raise SpecError("tensors", f"alias cannot be decided for {label(view.name)}: {error}") from None
        if found is not None:
            yield Finding(
                rule="alias",
                message=f"{described(view)} overlaps itself: elements {found.index_a} and {found.index_b} share byte "
                f"{_byte(view, found.byte)}",
                remedy="step by at least one element on every axis (an expanded axis has stride 0), or, where it is "
                "meant, name the tensor in contract.self_overlap",
                where=(_where(view, found.byte, found.byte + 1),),
            )


def _byte(view: TensorView, byte: int) -> str:
    """Return a byte as a message counts it: from the storage's first where that is known, else its address."""
    return f"{byte:#x}" if view.storage is None else f"{byte - view.storage[0]} of the storage of {label(view.name)}"


def _where(view: TensorView, first: int, end: int) -> Where:
    return Where(tensor=view.name, first_byte=first, last_byte=end - 1)
