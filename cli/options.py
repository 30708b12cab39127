"""The options that commands share: how they look on the command line.

All values arrive as text, and ``deployment`` reads them, so that one line says which option is wrong and why.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

_LAYOUT = "Parallel layout"
_CACHE = "Cache"
_MEMORY = "Memory"

Config: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="A model's config.json, its folder, a saved spec or case.", show_default=False
    ),
]
LayoutName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="NAME",
        help="tpN, tepN (TP N with EP N), adpN (TP N with attention-DP), with ppN or cpN behind: tp2pp4.",
        rich_help_panel=_LAYOUT,
    ),
]
Tp: TypeAlias = Annotated[
    str | None, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks.", rich_help_panel=_LAYOUT)
]
Pp: TypeAlias = Annotated[
    str | None, typer.Option("--pp", metavar="N", help="Pipeline stages.", rich_help_panel=_LAYOUT)
]
PpPartition: TypeAlias = Annotated[
    str | None,
    typer.Option("--pp-partition", metavar="A,B,…", help="Layers of each pipeline stage.", rich_help_panel=_LAYOUT),
]
Ep: TypeAlias = Annotated[
    str | None, typer.Option("--ep", metavar="N", help="Expert-parallel ranks.", rich_help_panel=_LAYOUT)
]
Cp: TypeAlias = Annotated[
    str | None, typer.Option("--cp", metavar="N", help="Context-parallel ranks.", rich_help_panel=_LAYOUT)
]
AttentionDp: TypeAlias = Annotated[
    bool, typer.Option("--attention-dp", help="Attention runs data-parallel.", rich_help_panel=_LAYOUT)
]
Rank: TypeAlias = Annotated[
    str | None, typer.Option("--rank", metavar="N", help="The rank to look at.", rich_help_panel=_LAYOUT)
]
AllRanks: TypeAlias = Annotated[bool, typer.Option("--all-ranks", help="Look at every rank.", rich_help_panel=_LAYOUT)]
KvDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        metavar="F",
        help="fp32, fp16, bf16, fp8, fp8_e5m2, int8 or nvfp4; else the model's own.",
        rich_help_panel=_CACHE,
    ),
]
StateDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--state-dtype", metavar="F", help="fp32, fp16 or bf16, for recurrent states.", rich_help_panel=_CACHE
    ),
]
TokensPerBlock: TypeAlias = Annotated[
    str | None,
    typer.Option("--tokens-per-block", metavar="N", help="Tokens of a page; else 32.", rich_help_panel=_CACHE),
]
DraftMode: TypeAlias = Annotated[
    str | None,
    typer.Option("--draft", metavar="MODE", help="Draft layers: none, folded or separate.", rich_help_panel=_CACHE),
]
KvLayout: TypeAlias = Annotated[
    str | None,
    typer.Option("--kv-layout", metavar="ORDER", help="Axes inside a page: HND or NHD.", rich_help_panel=_CACHE),
]
Alignment: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--alignment", metavar="BYTES", help="What the kernels need pages aligned to.", rich_help_panel=_CACHE
    ),
]
Slots: TypeAlias = Annotated[
    str | None, typer.Option("--slots", metavar="N", help="Slots of every pool; else 4.", rich_help_panel=_MEMORY)
]
Quota: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--quota", metavar="BYTES", help="Memory for all pools instead: 4GiB, 512MiB.", rich_help_panel=_MEMORY
    ),
]
StateSlots: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--state-slots", metavar="N", help="Slots of recurrent states; else as --slots.", rich_help_panel=_MEMORY
    ),
]
AllocatorName: TypeAlias = Annotated[
    str | None,
    typer.Option("--allocator", metavar="NAME", help="A name from `kvsan allocators`, auto, or module:function."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
