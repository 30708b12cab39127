"""The options of ``kvsan peers`` that no other command has: how they look on the command line."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

_SOURCE = "Source"
_DESTINATION = "Destination, where it differs"


def _side(option: str, metavar: str, help: str, panel: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(option, metavar=metavar, help=help, rich_help_panel=panel)
    return info


Other: TypeAlias = Annotated[
    str | None,
    typer.Argument(metavar="[OTHER]", help="The destination's, where it is another file.", show_default=False),
]
Src: TypeAlias = Annotated[str | None, _side("--src", "NAME", "Parallel layout: tp1, tep4, adp2, tp2pp4.", _SOURCE)]
SrcPartition: TypeAlias = Annotated[
    str | None, _side("--src-pp-partition", "A,B,…", "Layers of each pipeline stage.", _SOURCE)
]
SrcDp: TypeAlias = Annotated[
    str | None, _side("--src-dp", "N", "The attention-DP rank that holds the request; else 0.", _SOURCE)
]
Dst: TypeAlias = Annotated[str | None, _side("--dst", "NAME", "Parallel layout.", _DESTINATION)]
DstPartition: TypeAlias = Annotated[
    str | None, _side("--dst-pp-partition", "A,B,…", "Layers of each pipeline stage.", _DESTINATION)
]
DstDp: TypeAlias = Annotated[
    str | None, _side("--dst-dp", "N", "The attention-DP rank that is given the request; else 0.", _DESTINATION)
]
DstKvDtype: TypeAlias = Annotated[str | None, _side("--dst-kv-dtype", "F", "KV dtype.", _DESTINATION)]
DstTokens: TypeAlias = Annotated[str | None, _side("--dst-tokens-per-block", "N", "Tokens of a page.", _DESTINATION)]
DstDraft: TypeAlias = Annotated[str | None, _side("--dst-draft", "MODE", "Draft layers.", _DESTINATION)]
DstKvLayout: TypeAlias = Annotated[str | None, _side("--dst-kv-layout", "ORDER", "Axes in a page.", _DESTINATION)]
DstAllocator: TypeAlias = Annotated[str | None, _side("--dst-allocator", "NAME", "Allocator.", _DESTINATION)]
Transfer: TypeAlias = Annotated[
    str | None, typer.Option("--transfer", metavar="NAME", help="A faulty transfer instead: fault:NAME.")
]
_REPLAY = "Replay on real memory"

Replay: TypeAlias = Annotated[
    bool, typer.Option("--replay", help="Carry the transfer out and compare every byte.", rich_help_panel=_REPLAY)
]
ReplayDevice: TypeAlias = Annotated[str | None, _side("--device", "cpu|cuda", "Where; else cpu.", _REPLAY)]
Processes: TypeAlias = Annotated[
    bool,
    typer.Option("--processes", help="A process for each rank: gloo on cpu, NCCL on cuda.", rich_help_panel=_REPLAY),
]
MaxMemory: TypeAlias = Annotated[
    str | None, _side("--max-memory", "BYTES", "Memory of all pools; else 256MiB.", _REPLAY)
]
Timeout: TypeAlias = Annotated[
    str | None, _side("--timeout", "SECONDS", "How long processes wait for one another; else 120.", _REPLAY)
]
Save: TypeAlias = Annotated[
    str | None, typer.Option("--save", metavar="DIR", help="Save the pair here as a case, if it does not fit or fails.")
]
Matrix: TypeAlias = Annotated[bool, typer.Option("--matrix", help="All pairs of --layouts with all --kv-dtypes.")]
Layouts: TypeAlias = Annotated[
    str | None, typer.Option("--layouts", metavar="A,B,…", help="Layouts of --matrix; else tp1,tp2,tep4,adp2,adp4.")
]
KvDtypes: TypeAlias = Annotated[
    str | None, typer.Option("--kv-dtypes", metavar="A,B,…", help="KV dtypes of --matrix; else bf16,fp8,nvfp4.")
]
