"""``kvsan matrix``: every layout with every KV dtype, laid out by every allocator."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import (
    Alignment,
    Config,
    DraftMode,
    Json,
    KvLayout,
    PpPartition,
    Quota,
    Rank,
    Slots,
    StateDtype,
    StateSlots,
    TokensPerBlock,
)


def matrix(
    config: Config,
    layouts: Annotated[
        str, typer.Option("--layouts", metavar="A,B,…", help="Parallel layouts: tp1,tep4,adp2,tp2pp4.")
    ] = "tp1,tp2,tp4,tp8",
    kv_dtypes: Annotated[
        str | None, typer.Option("--kv-dtypes", metavar="A,B,…", help="KV dtypes; else the model's own.")
    ] = None,
    allocators: Annotated[
        str | None, typer.Option("--allocators", metavar="A,B,…", help="Allocators; else the model's default.")
    ] = None,
    rank: Rank = None,
    pp_partition: PpPartition = None,
    state_dtype: StateDtype = None,
    tokens_per_block: TokensPerBlock = None,
    slots: Slots = None,
    quota: Quota = None,
    state_slots: StateSlots = None,
    draft: DraftMode = None,
    kv_layout: KvLayout = None,
    alignment: Alignment = None,
    json: Json = False,
) -> int:
    """Check every combination of layouts, KV dtypes and allocators.

    A cell looks at every pipeline stage and reports the worst; --rank restricts it to one rank. --pp-partition counts
    for the layouts with as many stages.
    """
    from .matrix_run import run_matrix

    given = {
        "--rank": rank,
        "--pp-partition": pp_partition,
        "--state-dtype": state_dtype,
        "--tokens-per-block": tokens_per_block,
        "--slots": slots,
        "--quota": quota,
        "--state-slots": state_slots,
        "--draft": draft,
        "--kv-layout": kv_layout,
        "--alignment": alignment,
    }
    return run_matrix(config, given, layouts, kv_dtypes, allocators, json)
