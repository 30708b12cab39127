"""``kvsan peers``: a cache that moves from the ranks of one deployment to those of another."""

from __future__ import annotations

from .options import AllocatorName, Config, DraftMode, Json, KvDtype, KvLayout, StateDtype, TokensPerBlock
from .peers_options import (
    Dst,
    DstAllocator,
    DstDp,
    DstDraft,
    DstKvDtype,
    DstKvLayout,
    DstPartition,
    DstTokens,
    KvDtypes,
    Layouts,
    Matrix,
    MaxMemory,
    Other,
    Processes,
    Replay,
    ReplayDevice,
    Save,
    Src,
    SrcDp,
    SrcPartition,
    Timeout,
    Transfer,
)


def peers(
    config: Config,
    other: Other = None,
    src: Src = None,
    src_pp_partition: SrcPartition = None,
    src_dp: SrcDp = None,
    dst: Dst = None,
    dst_pp_partition: DstPartition = None,
    dst_dp: DstDp = None,
    dst_kv_dtype: DstKvDtype = None,
    dst_tokens_per_block: DstTokens = None,
    dst_draft: DstDraft = None,
    dst_kv_layout: DstKvLayout = None,
    dst_allocator: DstAllocator = None,
    kv_dtype: KvDtype = None,
    state_dtype: StateDtype = None,
    tokens_per_block: TokensPerBlock = None,
    draft: DraftMode = None,
    kv_layout: KvLayout = None,
    allocator: AllocatorName = None,
    transfer: Transfer = None,
    save: Save = None,
    replay: Replay = False,
    device: ReplayDevice = None,
    processes: Processes = False,
    max_memory: MaxMemory = None,
    timeout: Timeout = None,
    matrix: Matrix = False,
    layouts: Layouts = None,
    kv_dtypes: KvDtypes = None,
    json: Json = False,
) -> int:
    """Say whether a cache can move from one deployment to another, and prove that every byte arrives once.

    Without --matrix, --src and --dst name the two parallel layouts; all other options hold for both sides where the
    destination's own is not given. CONFIG may be the saved case of a pair, which has all of that with it.
    """
    words = dict(locals())  # the options by name, as they were given
    from .peers_run import run_matrix, run_pair

    return (run_matrix if matrix else run_pair)(config, other, words, json)
