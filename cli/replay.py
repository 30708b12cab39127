"""``kvsan replay``: cases on real memory."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import (
    AllocatorName,
    Json,
    KvDtype,
    KvLayout,
    LayoutName,
    Rank,
    Slots,
    StateDtype,
    StateSlots,
    TokensPerBlock,
)

_REPLAY = "Replay"

Kernels = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        metavar="KIND",
        help="Also run reference kernels: all, attention, skip-softmax, sparse, state or quantize.",
        rich_help_panel=_REPLAY,
    ),
]


def replay(
    cases: Annotated[
        list[str],
        typer.Argument(
            metavar="CASE_OR_DIR...",
            help="Saved cases or specs, folders of them, or a config.json.",
            show_default=False,
        ),
    ],
    device: Annotated[
        str, typer.Option("--device", metavar="cpu|cuda", help="Where the memory is.", rich_help_panel=_REPLAY)
    ] = "cpu",
    workers: Annotated[
        str, typer.Option("--workers", metavar="N", help="Child processes that replay.", rich_help_panel=_REPLAY)
    ] = "1",
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            metavar="BYTES",
            help="Memory of one case; larger ones lose slots: 256MiB.",
            rich_help_panel=_REPLAY,
        ),
    ] = None,
    static: Annotated[
        bool,
        typer.Option(
            "--static/--no-static", help="Compare with the verdict of the static rules.", rich_help_panel=_REPLAY
        ),
    ] = True,
    kernels: Kernels = None,
    sanitizer: Annotated[
        bool, typer.Option("--sanitizer", help="cuda: run under compute-sanitizer.", rich_help_panel=_REPLAY)
    ] = False,
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout", metavar="SECONDS", help="How long a case may go without an answer.", rich_help_panel=_REPLAY
        ),
    ] = "600",
    layout: LayoutName = None,
    rank: Rank = None,
    kv_dtype: KvDtype = None,
    state_dtype: StateDtype = None,
    tokens_per_block: TokensPerBlock = None,
    slots: Slots = None,
    state_slots: StateSlots = None,
    kv_layout: KvLayout = None,
    allocator: AllocatorName = None,
    json: Json = False,
) -> int:
    """Lay cases out in real memory, write every view, and compare every byte with the simulator."""
    from .replay_run import replay_cases

    given = {
        "--layout": layout,
        "--rank": rank,
        "--kv-dtype": kv_dtype,
        "--state-dtype": state_dtype,
        "--tokens-per-block": tokens_per_block,
        "--slots": slots,
        "--state-slots": state_slots,
        "--kv-layout": kv_layout,
    }
    options = {"--device": device, "--workers": workers, "--max-memory": max_memory, "--kernels": kernels}
    options["--timeout"] = timeout
    return replay_cases(cases, options, given, allocator, static=static, sanitizer=sanitizer, json=json)
