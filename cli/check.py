"""``kvsan check``: one deployment of a model, laid out by one allocator."""

from __future__ import annotations

from .options import (
    Alignment,
    AllocatorName,
    AllRanks,
    AttentionDp,
    Config,
    Cp,
    DraftMode,
    Ep,
    Json,
    KvDtype,
    KvLayout,
    LayoutName,
    Pp,
    PpPartition,
    Quota,
    Rank,
    Slots,
    StateDtype,
    StateSlots,
    TokensPerBlock,
    Tp,
)


def check(
    config: Config,
    layout: LayoutName = None,
    tp: Tp = None,
    pp: Pp = None,
    pp_partition: PpPartition = None,
    ep: Ep = None,
    cp: Cp = None,
    attention_dp: AttentionDp = False,
    rank: Rank = None,
    all_ranks: AllRanks = False,
    kv_dtype: KvDtype = None,
    state_dtype: StateDtype = None,
    tokens_per_block: TokensPerBlock = None,
    slots: Slots = None,
    quota: Quota = None,
    state_slots: StateSlots = None,
    draft: DraftMode = None,
    kv_layout: KvLayout = None,
    alignment: Alignment = None,
    allocator: AllocatorName = None,
    json: Json = False,
) -> int:
    """Lay out one deployment of a model and check every address."""
    from .check_run import check_all_ranks, check_one_rank

    given = {
        "--layout": layout,
        "--tp": tp,
        "--pp": pp,
        "--pp-partition": pp_partition,
        "--ep": ep,
        "--cp": cp,
        "--attention-dp": attention_dp,
        "--rank": rank,
        "--all-ranks": all_ranks,
        "--kv-dtype": kv_dtype,
        "--state-dtype": state_dtype,
        "--tokens-per-block": tokens_per_block,
        "--slots": slots,
        "--quota": quota,
        "--state-slots": state_slots,
        "--draft": draft,
        "--kv-layout": kv_layout,
        "--alignment": alignment,
    }
    return (check_all_ranks if all_ranks else check_one_rank)(config, given, allocator, json)
