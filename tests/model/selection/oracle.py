"""The selection once more, as nested branches: what the tables of rules are compared with.

Written from the description in ``docs/selection.md``, and sharing nothing with the code but the names of managers.
"""

from __future__ import annotations

from kvsan.model.selection import SelectionInputs

REFUSED = None


def selector(i: SelectionInputs, version: str) -> str | None:
    """Return the manager that the selector names, None where it refuses."""
    v2 = i.v2 == "true" or (i.v2 == "auto" and i.model_prefers_v2)
    transfers = not i.disaggregated or (i.transceiver_runtime, i.transceiver_backend) == ("python", "nixl")
    switched = i.py_mamba or i.mamba_preference in ("mixed", "cpp")
    if i.sparse == "glm_kpool":
        return "v2-hybrid-glm-kpool" if v2 and transfers and not switched else REFUSED
    if i.hybrid == "some":
        if i.sparse not in ("none", "skip_softmax", "qsa"):
            return REFUSED
        if v2:
            if switched or not transfers or (i.block_reuse and i.rebalance):
                return REFUSED
            return "v2-hybrid-qsa" if i.sparse == "qsa" else "v2-hybrid"
        if i.sparse == "qsa":
            return REFUSED
        if i.py_mamba or i.mamba_preference == "mixed":
            return REFUSED if i.block_reuse else "v1-hybrid-python"
        if i.mamba_preference == "cpp":
            return "v1-hybrid-cpp"
        if i.disaggregated and i.transceiver_runtime == "python":
            return REFUSED if i.block_reuse else "v1-hybrid-python"
        return "v1-hybrid-cpp"
    if i.sparse == "rocket":
        return REFUSED if i.block_reuse else "v1-rocket"
    if i.sparse == "dsa":
        return "v2-dsa" if v2 else "v1-dsa"
    if i.sparse == "deepseek_v4":
        return "v2-deepseek-v4"
    if i.sparse == "minimax_m3":
        return "v2-minimax-m3"
    if i.sparse == "qsa":
        return "v2-hybrid-qsa" if v2 else REFUSED
    if i.sparse == "skip_softmax" and version == "before-21553":
        return "v1"
    if i.sparse == "skip_softmax" and version == "after-21553":
        return "v2" if v2 else "v1"
    return "v2" if v2 or i.geometry == "variable" else "v1"


def lacks(i: SelectionInputs) -> bool:
    """Say whether V2 lacks a feature that is asked for."""
    return i.sleep or (i.beam_width > 1 and not i.v2_beams)


def held(i: SelectionInputs, version: str) -> str | None:
    """Return the manager held in the end, None where the engine refuses."""
    manager = selector(i, version)
    if manager is REFUSED or not manager.startswith("v2") or not lacks(i):
        return manager
    may_fall_back = i.sparse == "none" or (i.sparse == "skip_softmax" and version != "before-21553")
    bound = i.geometry == "variable" or i.fp4_mla or i.hybrid == "some"
    return "v1" if may_fall_back and not bound else REFUSED


def predicted(i: SelectionInputs, version: str) -> str:
    """Return the kind of manager that the seats are sized for."""
    if version != "consistent":
        return "v2" if i.v2 == "true" and not lacks(i) else "v1"
    manager = held(i, version)
    return "refused" if manager is REFUSED else manager[:2]


def seats(i: SelectionInputs, kind: str) -> int:
    """Return the seats of a manager of one kind."""
    if i.pp > 1:
        return i.max_batch * i.pp
    doubled = i.attention_dp and i.overlap and kind == "v2" and i.hybrid != "some" and not i.mrope_delta_cache
    return 2 * i.max_batch if doubled else i.max_batch


def index_rows(i: SelectionInputs) -> int:
    """Return the rows of the block table."""
    doubled = i.disaggregated or (i.overlap and i.pp == 1)
    return i.max_batch * i.pp * (2 if doubled else 1)
