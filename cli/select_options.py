"""The options of ``kvsan select``: the inputs of the selection, one option each. All numbers arrive as text."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

_MODEL = "Model"
_REQUEST = "Request"
_ENGINE = "Engine"
_FORMAT = "KV format"

ConfigOrNone: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help="A model's config.json, its folder, or a saved spec; without it, all inputs come from options.",
        show_default=False,
    ),
]
Sparse: TypeAlias = Annotated[
    str | None,
    typer.Option("--sparse", metavar="NAME", help="Sparse algorithm, or none.", rich_help_panel=_MODEL),
]
Hybrid: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--hybrid", metavar="no|zero|some", help="Recurrent layers of a hybrid model.", rich_help_panel=_MODEL
    ),
]
Geometry: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--geometry",
        metavar="uniform|variable",
        help="Whether layers differ in KV heads or head dim.",
        rich_help_panel=_MODEL,
    ),
]
Fp4Mla: TypeAlias = Annotated[
    bool | None, typer.Option("--fp4-mla/--no-fp4-mla", help="Latent cache in NVFP4.", rich_help_panel=_MODEL)
]
Mrope: TypeAlias = Annotated[
    bool, typer.Option("--mrope-delta-cache", help="The model keeps position deltas.", rich_help_panel=_MODEL)
]
PrefersV2: TypeAlias = Annotated[
    bool, typer.Option("--model-prefers-v2", help="What auto resolves to.", rich_help_panel=_MODEL)
]
V2: TypeAlias = Annotated[
    bool | None, typer.Option("--v2/--no-v2", help="The user's flag; else on.", rich_help_panel=_REQUEST)
]
V2Auto: TypeAlias = Annotated[
    bool, typer.Option("--v2-auto", help="Leave the flag to the model.", rich_help_panel=_REQUEST)
]
Beam: TypeAlias = Annotated[
    str | None, typer.Option("--beam", metavar="N", help="Beam width; else 1.", rich_help_panel=_REQUEST)
]
MaxBatch: TypeAlias = Annotated[
    str | None, typer.Option("--max-batch", metavar="N", help="Requests of a batch; else 8.", rich_help_panel=_REQUEST)
]
Sleep: TypeAlias = Annotated[bool, typer.Option("--sleep", help="The engine can sleep.", rich_help_panel=_REQUEST)]
Overlap: TypeAlias = Annotated[
    bool, typer.Option("--overlap/--no-overlap", help="Overlap scheduler.", rich_help_panel=_REQUEST)
]
Reuse: TypeAlias = Annotated[
    bool, typer.Option("--reuse/--no-reuse", help="Blocks are reused.", rich_help_panel=_REQUEST)
]
Rebalance: TypeAlias = Annotated[
    bool, typer.Option("--rebalance", help="Pools are rebalanced.", rich_help_panel=_REQUEST)
]
Disaggregated: TypeAlias = Annotated[
    bool, typer.Option("--disaggregated", help="Context and generation are apart.", rich_help_panel=_REQUEST)
]
Transceiver: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--transceiver",
        metavar="NAME",
        help="cpp-nixl (default), cpp-ucx, python-nixl or python-ucx.",
        rich_help_panel=_REQUEST,
    ),
]
PyMamba: TypeAlias = Annotated[
    bool, typer.Option("--py-mamba", help="TRTLLM_USE_PY_MAMBA=1 is set.", rich_help_panel=_REQUEST)
]
MambaPreference: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--mamba-preference",
        metavar="mixed|cpp",
        help="TLLM_MAMBA_MANAGER_PREFERENCE is set.",
        rich_help_panel=_REQUEST,
    ),
]
V2Beams: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--v2-beams/--no-v2-beams",
        help="Whether V2 decodes several beams; else as the rule set has it.",
        rich_help_panel=_ENGINE,
    ),
]
RuleSetName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--ruleset",
        metavar="NAME",
        help="before-21553, after-21553 (default), consistent or fault:NAME.",
        rich_help_panel=_ENGINE,
    ),
]
KvFormats: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--kv-formats", metavar="A,B,…", help="Formats that can be stored; else all.", rich_help_panel=_FORMAT
    ),
]
References: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--references",
        metavar="A,B,…",
        help="KV selectors of the accuracy references at hand; none: an entry without one.",
        rich_help_panel=_FORMAT,
    ),
]
AuditName: TypeAlias = Annotated[
    str | None,
    typer.Option("--audit", metavar="RULESET", help="List all disagreements of a rule set instead."),
]
Explain: TypeAlias = Annotated[bool, typer.Option("--explain", help="Show every rule consulted, with its source.")]
