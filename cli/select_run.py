"""What ``kvsan select`` does once its options are known: one configuration, or the audit of a rule set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ..model.architecture import Architecture
from ..model.errors import SpecError, require_choice
from ..model.formats import KV_FORMATS, ElementFormat
from ..model.loading import Deployment
from ..model.parallel import ParallelLayout
from ..model.selection import (
    CONSISTENT,
    DEFAULT_RULE_SET,
    AccuracyReference,
    Decision,
    KvDecision,
    KvRequest,
    RuleSet,
    SelectionInputs,
    decide_kv_format,
    inputs_of,
    priced,
    rule_set_named,
)
from ..model.selection import select as decide
from ..model.selection.kv_dtype import FAULTY_POLICIES, SOUND_POLICY, KvPolicy
from ..model.spec import CacheSpec
from ..sim.finding import Finding
from ..sim.rules.follows_dense import check_follows_dense
from ..sim.rules.kv_dtype import check_kv_dtype
from ..sim.rules.manager import check_manager
from .deployment import deploy_model, read_deployment, read_format, read_list, read_model, read_whole
from .output import print_report, terminal, write_json
from .status import CLEAN, WRONG

_OPTIONS_OF_FIELDS: Final = {
    "beam_width": "--beam",
    "max_batch": "--max-batch",
    "sparse": "--sparse",
    "hybrid": "--hybrid",
    "geometry": "--geometry",
    "mamba_preference": "--mamba-preference",
    "pp": "--pp",
}
_DEPLOYMENT: Final = ("layout", "tp", "pp", "pp_partition", "ep", "cp", "attention_dp", "rank", "quota", "kv_dtype")
_SWITCHES: Final = (
    "mrope_delta_cache",
    "model_prefers_v2",
    "sleep",
    "overlap",
    "rebalance",
    "disaggregated",
    "py_mamba",
)
_NO_SELECTOR: Final = "none"


class Selected(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with what the rules say of it; ``explained`` asks for every rule that was consulted."""

    decision: Decision
    kv: KvDecision
    findings: tuple[Finding, ...]
    model: str
    explained: bool

    @property
    def status(self) -> str:
        """The verdict in one word."""
        if self.decision.refusal is not None or self.kv.refusal is not None:
            return "rejected"
        return "findings" if self.findings else "clean"


def select_manager(config: str | None, words: Mapping[str, Any], explain: bool, json: bool) -> int:
    """Decide one configuration and report it; return the exit status."""
    ruleset, policy = _rule_set(words["ruleset"])
    given = {f"--{name.replace('_', '-')}": words[name] for name in _DEPLOYMENT}
    deployment = read_deployment(given)
    if config is None and (stray := next((name for name in ("rank", "quota") if words[name] is not None), None)):
        raise SpecError(f"--{stray}", "given without CONFIG, needs a model that it can be asked of")
    model = None if config is None else read_model(config)
    spec = None if config is None or model is None else deploy_model(model, deployment, given, config).spec
    inputs = _inputs(words, ruleset, spec, deployment)
    decision = decide(inputs, ruleset)
    if spec is not None:
        decision = priced(decision, spec)
    kv = decide_kv_format(_kv_request(words, model, deployment), _references(words["references"], model), policy)
    dense = decide(msgspec.structs.replace(inputs, sparse="none"), ruleset)
    findings = (*check_manager(decision), *check_follows_dense(decision, dense), *check_kv_dtype(kv))
    name = "" if spec is None else spec.model
    selected = Selected(decision=decision, kv=kv, findings=findings, model=name, explained=explain)
    if json:
        write_json(_document(selected))
    else:
        from .report_select import report_selected

        console = terminal()
        report_selected(console, selected)
        print_report(console)
    return CLEAN if selected.status == "clean" else WRONG


def audit_rule_set(name: str, words: Mapping[str, Any], json: bool) -> int:
    """List the disagreements of a rule set, or of a KV policy; return 1 when there is one."""
    from ..ci.audit import audit
    from ..ci.kv_audit import audit_kv

    _refuse_beside_audit(words)
    ruleset, policy = _rule_set(name, "--audit")
    result = audit(ruleset) if policy is SOUND_POLICY else audit_kv(policy)
    if json:
        keys = ("check", "inputs", "selected", "predicted", "path", "derived")
        rows = [{key: getattr(row, key) for key in keys} for row in result.disagreements]
        write_json({"ruleset": result.ruleset, "points": result.points, "disagreements": rows})
    else:
        from .report_select import report_audit

        console = terminal()
        report_audit(console, result)
        print_report(console)
    return WRONG if result.disagreements else CLEAN


def _refuse_beside_audit(words: Mapping[str, Any]) -> None:
    """Raise ``SpecError`` for an input given beside --audit, which goes over all of them."""
    for name, value in words.items():
        if name in ("audit", "json") or value in (None, False) or (name == "overlap" and value):
            continue
        option = "CONFIG" if name == "config" else f"--{name.replace('_', '-')}"
        raise SpecError("", f"--audit and {option} were both given, but --audit goes over all inputs; give one of them")


def _rule_set(name: str | None, option: str = "--ruleset") -> tuple[RuleSet, KvPolicy]:
    """Return the rule set called ``name``; the name of a faulty KV policy stands for it beside sound rules."""
    if name is None:
        return DEFAULT_RULE_SET, SOUND_POLICY
    policy = next((entry for entry in FAULTY_POLICIES if entry.name == name), None)
    return (CONSISTENT, policy) if policy is not None else (rule_set_named(name, option), SOUND_POLICY)


def _inputs(
    words: Mapping[str, Any], ruleset: RuleSet, spec: CacheSpec | None, deployment: Deployment
) -> SelectionInputs:
    """Return the inputs of the selection; an option wins over what the model says."""
    changes: dict[str, Any] = {name: words[name] for name in _SWITCHES}
    changes["block_reuse"] = words["reuse"]
    changes["v2"] = _flag(words["v2"], words["v2_auto"])
    changes["v2_beams"] = ruleset.v2_beams if words["v2_beams"] is None else words["v2_beams"]
    for option in ("sparse", "hybrid", "geometry", "fp4_mla", "mamba_preference"):
        if words[option] is not None:
            changes[option] = words[option]
    for option, field in (("beam", "beam_width"), ("max_batch", "max_batch")):
        if words[option] is not None:
            changes[field] = read_whole(_OPTIONS_OF_FIELDS[field], words[option])
    if words["transceiver"] is not None:
        require_choice("--transceiver", words["transceiver"], ("cpp-nixl", "cpp-ucx", "python-nixl", "python-ucx"))
        changes["transceiver_runtime"], _, changes["transceiver_backend"] = words["transceiver"].partition("-")
    parallel = deployment.parallel or ParallelLayout()
    try:
        if spec is not None:
            return inputs_of(spec, **changes)
        return SelectionInputs(attention_dp=parallel.attention_dp, pp=parallel.pp, **changes)
    except SpecError as error:
        raise SpecError(_OPTIONS_OF_FIELDS.get(error.field, error.field), error.problem) from None


def _flag(v2: bool | None, auto: bool) -> str:
    if auto and v2 is not None:
        raise SpecError(
            "", "--v2-auto and --v2 or --no-v2 were both given, but the flag has one value; give one of them"
        )
    return "auto" if auto else ("false" if v2 is False else "true")


def _kv_request(words: Mapping[str, Any], model: Architecture | CacheSpec | None, deployment: Deployment) -> KvRequest:
    supported: tuple[ElementFormat, ...] = KV_FORMATS
    if words["kv_formats"] is not None:
        names = read_list("--kv-formats", words["kv_formats"])
        supported = tuple(dict.fromkeys(read_format("--kv-formats", name, KV_FORMATS) for name in names))
    requested = deployment.kv_format
    if isinstance(model, CacheSpec) and requested is None:
        requested = model.kv_format
    return KvRequest(requested=requested, model_format=_model_format(model), supported=supported)


def _model_format(model: Architecture | CacheSpec | None) -> ElementFormat:
    known = model.model_format if isinstance(model, Architecture) else None
    return known if known in KV_FORMATS else ElementFormat.BF16


def _references(text: str | None, model: Architecture | CacheSpec | None) -> tuple[AccuracyReference, ...]:
    """Return the references at hand, each named by its KV selector."""
    if text is None:
        return ()
    references = []
    for name in read_list("--references", text):
        selector = None if name == _NO_SELECTOR else read_format("--references", name, KV_FORMATS)
        label = "without a KV selector" if selector is None else selector.value
        references.append(AccuracyReference(name=label, model_format=_model_format(model), kv_format=selector))
    return tuple(references)


def _document(selected: Selected) -> dict[str, Any]:
    decision, kv = selected.decision, selected.kv
    held = decision.held
    document = {
        "ruleset": decision.ruleset,
        "status": selected.status,
        "inputs": decision.inputs,
        "manager": decision.manager,
        "predicted": decision.predicted,
        "asked": decision.asked,
        "warning": decision.warning,
        "refusal": decision.refusal,
        "seats": decision.seats,
        "index_rows": decision.index_rows,
        "numbers": decision.numbers,
        "allocator": held.allocator or None if held is not None else None,
        "kv_dtype": {
            "requested": kv.request.asked.value,
            "effective": None if kv.effective is None else kv.effective.value,
            "refusal": kv.refusal,
            "reference": None if kv.reference is None else kv.reference.name,
        },
        "path": [step.words for step in decision.path],
        "findings": [
            {"rule": found.rule, "message": found.message, "remedy": found.remedy} for found in selected.findings
        ],
    }
    return document | {"consulted": decision.consulted} if selected.explained else document
