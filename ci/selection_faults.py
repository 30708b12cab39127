"""The faults of manager selection and KV formats: what each breaks, the least that shows it, where it happened.

They belong to the table of ``ci.faults``, which lists them behind the faulty allocators. A minimum is a cause that
the exhaustive audit (``audit``, ``kv_audit``) finds: the inputs that are not ordinary, as JSON.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from ..model.selection.faulty import FAULTY_RULE_SETS
from ..model.selection.kv_dtype import FAULTY_POLICIES
from ..model.selection.rulesets import PR_SELECTION


class SelectionFault(msgspec.Struct, frozen=True, kw_only=True):
    """One faulty rule set, or faulty KV policy.

    ``rules`` must fire, ``follow`` may; ``minima_json`` are the known minima, the simplest first, ``code`` the number
    among the published faults, ``source`` where it happened, ``cause`` one line.
    """

    name: str
    kind: Literal["selection"] = "selection"
    code: str = ""
    rules: tuple[str, ...]
    follow: tuple[str, ...] = ()
    base: str = "consistent"
    cause: str
    source: str
    minima_json: tuple[bytes, ...]

    @property
    def minima(self) -> tuple[dict[str, Any], ...]:
        """The known minima, the simplest first."""
        return tuple([msgspec.json.decode(text, type=dict[str, Any]) for text in self.minima_json])

    @property
    def size(self) -> int:
        """The number of inputs of the simplest minimum."""
        return len(self.minima[0])


_CAUSES: Final = {entry.name: entry.summary for entry in FAULTY_RULE_SETS} | {
    entry.name: entry.summary for entry in FAULTY_POLICIES
}
_ENGINE_PULL: Final = "https://github.com/NVIDIA/TensorRT-LLM/pull/"


def _fault(name: str, *minima: bytes, **fields: Any) -> SelectionFault:
    return SelectionFault(name=name, cause=_CAUSES[name], minima_json=minima, **fields)


SELECTION_FAULTS: Final[tuple[SelectionFault, ...]] = (
    _fault(
        "fault:skip-softmax-pinned-to-v1",
        b'{"sparse":"skip_softmax","v2":"true"}',
        b'{"sparse":"skip_softmax","v2":"false","geometry":"variable"}',
        code="D2",
        rules=("manager",),
        follow=("follows-dense-rule",),
        source=PR_SELECTION,
    ),
    _fault(
        "fault:predictor-ignores-geometry",
        b'{"v2":"false","geometry":"variable"}',
        code="D2",
        rules=("manager",),
        source=f"{PR_SELECTION} (review)",
    ),
    _fault(
        "fault:registry-ignores-geometry",
        b'{"sparse":"skip_softmax","v2":"false","geometry":"variable"}',
        code="D2",
        rules=("follows-dense-rule",),
        follow=("manager",),
        source=f"{PR_SELECTION} (review)",
    ),
    _fault(
        "fault:predictor-reads-auto-as-v1",
        b'{"v2":"auto","model_prefers_v2":true}',
        rules=("manager",),
        source="planted: auto is resolved for the selector and not for the predictor",
    ),
    _fault(
        "fault:silent-fall-back",
        b'{"v2":"true","sleep":true}',
        rules=("manager",),
        source="planted: the warning of a fall-back dropped",
    ),
    _fault(
        "fault:owner-falls-back",
        b'{"sparse":"dsa","v2":"true","sleep":true}',
        rules=("manager",),
        source="planted: the refusal of algorithms that own their manager dropped",
    ),
    _fault(
        "fault:rows-for-disaggregation-alone",
        b'{"v2":"true","attention_dp":true}',
        rules=("manager",),
        source="planted: the older index rows beside the newer seats",
    ),
    _fault(
        "fault:estimates-of-asked-manager",
        b'{"v2":"true","sleep":true}',
        rules=("manager",),
        source="planted: estimates computed before the fall-back",
    ),
    _fault(
        "fault:kv-dtype-falls-back",
        b'{"unsupported":["bf16"]}',
        b'{"requested":"nvfp4","unsupported":["nvfp4"]}',
        rules=("kv-dtype",),
        source=f"{_ENGINE_PULL}18674",
    ),
    _fault(
        "fault:reference-without-kv-selector",
        b'{"requested":"fp8","references":["without a selector"]}',
        rules=("kv-dtype",),
        source="planted: a missing selector matches every KV format",
    ),
)
"""All of them."""
