"""The three rule sets: ``before-21553``, ``after-21553`` and ``consistent``. ``docs/selection.md`` tells them in words.

Rules of one table are tried in order, and the first that applies decides.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from .inputs import KERNEL_ONLY, OWNERS
from .rules import CANDIDATE_KIND, Outcome, RuleSet, SelectionRule

_PULL: Final = "https://github.com/NVIDIA/TensorRT-LLM/pull/"
PR_SELECTION: Final = _PULL + "21553"
PR_SKIP_HYBRID: Final = _PULL + "15417"
PR_DSA_V2: Final = _PULL + "16060"
PR_HYBRID_V2: Final = _PULL + "16598"
PR_QSA: Final = _PULL + "20276"
ENGINE: Final = "https://github.com/NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/pyexecutor/_util.py"
KVSAN: Final = "docs/selection.md, consistent"

_FOREIGN_TO_HYBRIDS: Final = tuple(name for name in OWNERS if name not in ("qsa", "glm_kpool"))


def _rule(name: str, source: str, then: Outcome, **when: Any) -> SelectionRule:
    """Return a rule; a value of ``when`` that is no tuple stands for the tuple of it alone."""
    wanted = {fact: value if isinstance(value, tuple) else (value,) for fact, value in when.items()}
    return SelectionRule(name, wanted, then, source)


def _hold(manager: str) -> Outcome:
    return Outcome("hold", manager)


def _refuse(message: str, remedy: str) -> Outcome:
    return Outcome("refuse", "", message, remedy)


_KEEP: Final = Outcome("keep")
_PYTHON_NIXL: Final = (
    "use the Python transceiver with NIXL (--transceiver python-nixl), or serve without disaggregation"
)
_NO_REUSE_V1: Final = "switch block reuse off, or let the hybrid model run on V2"

_GLM_KPOOL: Final = (
    _rule(
        "glm-kpool-without-switches",
        ENGINE,
        _refuse(
            "the manager of glm_kpool cannot be replaced, and a Mamba manager switch asks for another",
            "unset TRTLLM_USE_PY_MAMBA and TLLM_MAMBA_MANAGER_PREFERENCE",
        ),
        sparse="glm_kpool",
        mamba_switch=True,
    ),
    _rule(
        "glm-kpool-needs-v2",
        ENGINE,
        _refuse("glm_kpool keeps its index keys in a V2 manager, and V2 is not selected", "switch V2 on (--v2)"),
        sparse="glm_kpool",
        asks_v2=False,
    ),
    _rule(
        "glm-kpool-disaggregated",
        ENGINE,
        _refuse(
            "glm_kpool moves its recurrent states over the Python transceiver with NIXL alone, and another is set",
            _PYTHON_NIXL,
        ),
        sparse="glm_kpool",
        disaggregated=True,
        python_nixl=False,
    ),
    _rule("glm-kpool", ENGINE, _hold("v2-hybrid-glm-kpool"), sparse="glm_kpool"),
)

_HYBRID: Final = (
    _rule(
        "hybrid-with-foreign-sparse",
        PR_SKIP_HYBRID,
        _refuse(
            "this sparse algorithm has a manager of its own, and a model with recurrent layers needs the hybrid one",
            "switch the sparse algorithm off, or use one that a hybrid model may have (skip_softmax, qsa)",
        ),
        recurrent=True,
        sparse=_FOREIGN_TO_HYBRIDS,
    ),
    _rule(
        "hybrid-v2-without-switches",
        PR_HYBRID_V2,
        _refuse(
            "V2 is asked for, and a Mamba manager switch asks for a V1 manager",
            "unset TRTLLM_USE_PY_MAMBA and TLLM_MAMBA_MANAGER_PREFERENCE, or switch V2 off (--no-v2)",
        ),
        recurrent=True,
        asks_v2=True,
        mamba_switch=True,
    ),
    _rule(
        "hybrid-v2-disaggregated",
        PR_HYBRID_V2,
        _refuse(
            "a disaggregated V2 hybrid manager needs the Python transceiver with NIXL, and another is set",
            _PYTHON_NIXL,
        ),
        recurrent=True,
        asks_v2=True,
        disaggregated=True,
        python_nixl=False,
    ),
    _rule(
        "hybrid-v2-reuse-and-rebalance",
        ENGINE,
        _refuse(
            "a V2 hybrid manager cannot rebalance its pools while blocks are reused",
            "switch block reuse or pool rebalancing off",
        ),
        recurrent=True,
        asks_v2=True,
        block_reuse=True,
        rebalance=True,
    ),
    _rule("hybrid-v2-qsa", PR_QSA, _hold("v2-hybrid-qsa"), recurrent=True, asks_v2=True, sparse="qsa"),
    _rule("hybrid-v2", PR_HYBRID_V2, _hold("v2-hybrid"), recurrent=True, asks_v2=True),
    _rule(
        "hybrid-qsa-needs-v2",
        PR_QSA,
        _refuse("qsa keeps its side planes in a V2 manager, and V2 is not selected", "switch V2 on (--v2)"),
        recurrent=True,
        sparse="qsa",
    ),
    _rule(
        "hybrid-python-without-reuse",
        ENGINE,
        _refuse("the Python Mamba manager does not reuse blocks, and block reuse is on", _NO_REUSE_V1),
        recurrent=True,
        wants_python_mamba=True,
        block_reuse=True,
    ),
    _rule("hybrid-python-switch", ENGINE, _hold("v1-hybrid-python"), recurrent=True, wants_python_mamba=True),
    _rule("hybrid-cpp-switch", ENGINE, _hold("v1-hybrid-cpp"), recurrent=True, mamba_preference="cpp"),
    _rule(
        "hybrid-python-transceiver-without-reuse",
        PR_HYBRID_V2,
        _refuse("the Python transceiver moves V1 hybrid caches only without block reuse, and it is on", _NO_REUSE_V1),
        recurrent=True,
        disaggregated=True,
        transceiver_runtime="python",
        block_reuse=True,
    ),
    _rule(
        "hybrid-python-transceiver",
        ENGINE,
        _hold("v1-hybrid-python"),
        recurrent=True,
        disaggregated=True,
        transceiver_runtime="python",
    ),
    _rule("hybrid-v1", ENGINE, _hold("v1-hybrid-cpp"), recurrent=True),
)

_REGISTRY: Final = (
    _rule(
        "rocket-without-reuse",
        ENGINE,
        _refuse("rocket keeps a cache beside the blocks and does not reuse them, and block reuse is on", _NO_REUSE_V1),
        sparse="rocket",
        block_reuse=True,
    ),
    _rule("rocket", ENGINE, _hold("v1-rocket"), sparse="rocket"),
    _rule("dsa-v2", PR_DSA_V2, _hold("v2-dsa"), sparse="dsa", asks_v2=True),
    _rule("dsa-v1", PR_DSA_V2, _hold("v1-dsa"), sparse="dsa"),
    _rule("deepseek-v4", ENGINE, _hold("v2-deepseek-v4"), sparse="deepseek_v4"),
    _rule("minimax-m3", ENGINE, _hold("v2-minimax-m3"), sparse="minimax_m3"),
    _rule("qsa-v2", PR_QSA, _hold("v2-hybrid-qsa"), sparse="qsa", asks_v2=True),
    _rule(
        "qsa-needs-v2",
        PR_QSA,
        _refuse("qsa keeps its side planes in a V2 manager, and V2 is not selected", "switch V2 on (--v2)"),
        sparse="qsa",
    ),
)

SKIP_SOFTMAX_ON_V1: Final = _rule("skip-softmax-on-v1", PR_SELECTION, _hold("v1"), sparse="skip_softmax")
SKIP_SOFTMAX_BY_FLAG: Final = (
    _rule("skip-softmax-asks-for-v2", PR_SELECTION, _hold("v2"), sparse="skip_softmax", asks_v2=True),
    SKIP_SOFTMAX_ON_V1,
)

_DENSE: Final = (
    _rule("dense-asks-for-v2", ENGINE, _hold("v2"), asks_v2=True),
    _rule("dense-variable-geometry", ENGINE, _hold("v2"), geometry="variable"),
    _rule("dense-v1", ENGINE, _hold("v1")),
)

_FALL_BACK: Final = _rule(
    "fall-back-to-v1",
    ENGINE,
    Outcome("fall back", "v1", "V2 of this build does not have a feature that is asked for: the model runs on V1"),
)


def _cannot_fall_back(name: str, source: str, what: str, **when: Any) -> SelectionRule:
    remedy = "switch the feature off (one beam, no sleep)"
    return _rule(name, source, _refuse(f"V2 lacks a feature that is asked for, and {what}", remedy), **when)


_WITHOUT_FALL_BACK: Final = (
    _cannot_fall_back(
        "variable-geometry-cannot-fall-back",
        ENGINE,
        "layers that differ in heads or head dim have no place in V1",
        geometry="variable",
    ),
    _cannot_fall_back("fp4-mla-cannot-fall-back", ENGINE, "V1 keeps no latent cache in NVFP4", fp4_mla=True),
    _cannot_fall_back("hybrid-cannot-fall-back", ENGINE, "V1 would not keep the recurrent states", recurrent=True),
)


def _validator(*sparse: str) -> tuple[SelectionRule, ...]:
    """Return the validator in which the ``sparse`` algorithms refuse to fall back."""
    return (
        _rule("v1-needs-no-check", ENGINE, _KEEP, **{CANDIDATE_KIND: "v1"}),
        _rule("v2-has-all-features", ENGINE, _KEEP, incompatible=False),
        _cannot_fall_back(
            "sparse-cannot-fall-back", PR_SELECTION, "the sparse algorithm keeps its V2 manager", sparse=sparse
        ),
        *_WITHOUT_FALL_BACK,
        _FALL_BACK,
    )


_FLAG_PREDICTOR: Final = (
    _rule("flag-and-features", PR_SELECTION, _hold("v2"), flag_is_true=True, incompatible=False),
    _rule("otherwise-v1", PR_SELECTION, _hold("v1")),
)

BEFORE_21553: Final = RuleSet(
    name="before-21553",
    summary="skip_softmax runs on V1 whatever is asked for, and the predictor looks at the flag and the features alone",
    selector=(*_GLM_KPOOL, *_HYBRID, *_REGISTRY, SKIP_SOFTMAX_ON_V1, *_DENSE),
    validator=_validator(*KERNEL_ONLY, *OWNERS),
    predictor=_FLAG_PREDICTOR,
    v2_beams=False,
)

AFTER_21553: Final = RuleSet(
    name="after-21553",
    summary="skip_softmax runs on V2 when V2 is asked for, and falls back as a dense model does; same predictor",
    selector=(*_GLM_KPOOL, *_HYBRID, *_REGISTRY, *SKIP_SOFTMAX_BY_FLAG, *_DENSE),
    validator=_validator(*OWNERS),
    predictor=_FLAG_PREDICTOR,
)

PREDICTS_GEOMETRY: Final = _rule(
    "variable-geometry-is-v2",
    KVSAN,
    _hold("v2"),
    geometry="variable",
    recurrent=False,
    owns_its_manager=False,
)
PREDICTS_ASKED: Final = _rule("v2-asked-for", KVSAN, _hold("v2"), asks_v2=True)

CONSISTENT: Final = RuleSet(
    name="consistent",
    summary="kernel-only algorithms are dense, and the predictor knows every reason that the selector knows",
    selector=(*_GLM_KPOOL, *_HYBRID, *_REGISTRY, *_DENSE),
    validator=_validator(*OWNERS),
    predictor=(
        _rule("algorithm-is-v1", KVSAN, _hold("v1"), sparse="rocket"),
        _rule("algorithm-is-v2", KVSAN, _hold("v2"), sparse=("deepseek_v4", "minimax_m3")),
        PREDICTS_GEOMETRY,
        _rule("falls-back-to-v1", KVSAN, _hold("v1"), incompatible=True),
        PREDICTS_ASKED,
        _rule("otherwise-v1", KVSAN, _hold("v1")),
    ),
)

DEFAULT_RULE_SET: Final = AFTER_21553


def edited(base: RuleSet, name: str, summary: str, **tables: Any) -> RuleSet:
    """Return a rule set that differs from ``base`` in the fields given."""
    return msgspec.structs.replace(base, name=name, summary=summary, **tables)


def without(table: tuple[SelectionRule, ...], *names: str) -> tuple[SelectionRule, ...]:
    """Return ``table`` without the rules called ``names``."""
    return tuple(rule for rule in table if rule.name not in names)


def before(table: tuple[SelectionRule, ...], name: str, *rules: SelectionRule) -> tuple[SelectionRule, ...]:
    """Return ``table`` with ``rules`` tried just before the rule called ``name``."""
    place = next(place for place, rule in enumerate(table) if rule.name == name)
    return (*table[:place], *rules, *table[place:])
