"""``kvsan select``: which cache manager a model gets, who predicts it, and by which rules."""

from __future__ import annotations

from .options import AttentionDp, Cp, Ep, Json, KvDtype, LayoutName, Pp, PpPartition, Quota, Rank, Tp
from .select_options import (
    V2,
    AuditName,
    Beam,
    ConfigOrNone,
    Disaggregated,
    Explain,
    Fp4Mla,
    Geometry,
    Hybrid,
    KvFormats,
    MambaPreference,
    MaxBatch,
    Mrope,
    Overlap,
    PrefersV2,
    PyMamba,
    Rebalance,
    References,
    Reuse,
    RuleSetName,
    Sleep,
    Sparse,
    Transceiver,
    V2Auto,
    V2Beams,
)


def select(
    config: ConfigOrNone = None,
    sparse: Sparse = None,
    hybrid: Hybrid = None,
    geometry: Geometry = None,
    fp4_mla: Fp4Mla = None,
    mrope_delta_cache: Mrope = False,
    model_prefers_v2: PrefersV2 = False,
    v2: V2 = None,
    v2_auto: V2Auto = False,
    beam: Beam = None,
    max_batch: MaxBatch = None,
    sleep: Sleep = False,
    overlap: Overlap = True,
    reuse: Reuse = False,
    rebalance: Rebalance = False,
    disaggregated: Disaggregated = False,
    transceiver: Transceiver = None,
    py_mamba: PyMamba = False,
    mamba_preference: MambaPreference = None,
    v2_beams: V2Beams = None,
    ruleset: RuleSetName = None,
    layout: LayoutName = None,
    tp: Tp = None,
    pp: Pp = None,
    pp_partition: PpPartition = None,
    ep: Ep = None,
    cp: Cp = None,
    attention_dp: AttentionDp = False,
    rank: Rank = None,
    quota: Quota = None,
    kv_dtype: KvDtype = None,
    kv_formats: KvFormats = None,
    references: References = None,
    audit: AuditName = None,
    explain: Explain = False,
    json: Json = False,
) -> int:
    """Say which cache manager a model gets, and whether everything was sized for it."""
    words = dict(locals())  # the options by name, as they were given
    from .select_run import audit_rule_set, select_manager

    return select_manager(config, words, explain, json) if audit is None else audit_rule_set(audit, words, json)
