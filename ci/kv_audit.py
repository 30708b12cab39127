"""``audit_kv``: every way in which a KV policy breaks rule ``kv-dtype``, each as the least that causes it.

Two small grids: all requests (what the user and the checkpoint ask for, which formats are not supported), and all
lists of at most two accuracy references beside a run in each format.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

from ..model.formats import KV_FORMATS, ElementFormat
from ..model.selection.kv_dtype import AccuracyReference, KvPolicy, KvRequest, decide_kv_format
from ..sim.rules.kv_dtype import check_kv_dtype
from .audit import Audit, Disagreement

_ASKED: Final = (None, *KV_FORMATS)
Situation = tuple[dict[str, Any], KvRequest, tuple[AccuracyReference, ...]]


def audit_kv(policy: KvPolicy) -> Audit:
    """Return how ``policy`` breaks rule ``kv-dtype``, over all requests and references."""
    found: list[Disagreement] = []
    points = 0
    for inputs, request, references in sorted(situations(), key=lambda situation: _size(situation[0])):
        points += 1
        decision = decide_kv_format(request, references, policy)
        broken = next(iter(check_kv_dtype(decision)), None)
        if broken is None or any(_contains(inputs, known.inputs) for known in found):
            continue
        found.append(
            Disagreement(
                check=broken.rule,
                inputs=inputs,
                selected="refused" if decision.effective is None else decision.effective.value,
                predicted=request.asked.value if decision.reference is None else decision.reference.measured_with.value,
                path=[f"{policy.name}: {broken.message}"],
                derived=True,
                source="derived",
                points=1,
            )
        )
    return Audit(policy.name, points, found)


def situations() -> Iterator[Situation]:
    """Yield every situation as the inputs that are not ordinary, the request and the references at hand."""
    for requested, checkpoint in itertools.product(_ASKED, repeat=2):
        for count in range(len(KV_FORMATS) + 1):
            for missing in itertools.combinations(KV_FORMATS, count):
                supported = tuple(kv_format for kv_format in KV_FORMATS if kv_format not in missing)
                request = KvRequest(requested=requested, checkpoint=checkpoint, supported=supported)
                yield _given(requested=requested, checkpoint=checkpoint, unsupported=missing), request, ()
    for requested, count in itertools.product(_ASKED, (1, 2)):
        for selectors in itertools.product(_ASKED, repeat=count):
            references = tuple(AccuracyReference(name=_name(kv), kv_format=kv) for kv in selectors)
            names = tuple(reference.name for reference in references)
            yield _given(requested=requested, references=names), KvRequest(requested=requested), references


def _name(selector: ElementFormat | None) -> str:
    return "without a selector" if selector is None else selector.value


def _given(**inputs: Any) -> dict[str, Any]:
    """Return the inputs that are given, formats by their names."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(member) for member in value]
        return value.value if isinstance(value, ElementFormat) else value

    return {name: plain(value) for name, value in inputs.items() if value not in (None, ())}


def _size(inputs: dict[str, Any]) -> int:
    return sum(len(value) if isinstance(value, list) else 1 for value in inputs.values())


def _contains(inputs: dict[str, Any], known: dict[str, Any]) -> bool:
    """Say whether ``inputs`` hold all of ``known``: lists at least its members."""

    def holds(name: str, value: Any) -> bool:
        return set(value) <= set(inputs.get(name, ())) if isinstance(value, list) else inputs.get(name) == value

    return all(holds(name, value) for name, value in known.items())
