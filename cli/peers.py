"""``kvsan peers``: a cache that moves from the ranks of one deployment to those of another."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import AllocatorName, DraftMode, Json, KvDtype, KvLayout, StateDtype, TokensPerBlock

_SOURCE = "Source"
_DESTINATION = "Destination, where it differs"


def _side(option: str, metavar: str, help: str, panel: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(option, metavar=metavar, help=help, rich_help_panel=panel)
    return info


def peers(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A model's config.json, its folder, or a saved spec: the source.")
    ],
    other: Annotated[
        str | None,
        typer.Argument(metavar="[OTHER]", help="The destination's, where it is another file.", show_default=False),
    ] = None,
    src: Annotated[str | None, _side("--src", "NAME", "Parallel layout: tp1, tep4, adp2, tp2pp4.", _SOURCE)] = None,
    src_pp_partition: Annotated[
        str | None, _side("--src-pp-partition", "A,B,…", "Layers of each pipeline stage.", _SOURCE)
    ] = None,
    src_dp: Annotated[
        str | None, _side("--src-dp", "N", "The attention-DP rank that holds the request; else 0.", _SOURCE)
    ] = None,
    dst: Annotated[str | None, _side("--dst", "NAME", "Parallel layout.", _DESTINATION)] = None,
    dst_pp_partition: Annotated[
        str | None, _side("--dst-pp-partition", "A,B,…", "Layers of each pipeline stage.", _DESTINATION)
    ] = None,
    dst_dp: Annotated[
        str | None, _side("--dst-dp", "N", "The attention-DP rank that is given the request; else 0.", _DESTINATION)
    ] = None,
    dst_kv_dtype: Annotated[str | None, _side("--dst-kv-dtype", "F", "KV dtype.", _DESTINATION)] = None,
    dst_tokens_per_block: Annotated[
        str | None, _side("--dst-tokens-per-block", "N", "Tokens of a page.", _DESTINATION)
    ] = None,
    dst_draft: Annotated[str | None, _side("--dst-draft", "MODE", "Draft layers.", _DESTINATION)] = None,
    dst_kv_layout: Annotated[str | None, _side("--dst-kv-layout", "ORDER", "Axes in a page.", _DESTINATION)] = None,
    dst_allocator: Annotated[str | None, _side("--dst-allocator", "NAME", "Allocator.", _DESTINATION)] = None,
    kv_dtype: KvDtype = None,
    state_dtype: StateDtype = None,
    tokens_per_block: TokensPerBlock = None,
    draft: DraftMode = None,
    kv_layout: KvLayout = None,
    allocator: AllocatorName = None,
    transfer: Annotated[
        str | None, typer.Option("--transfer", metavar="NAME", help="A faulty transfer instead: fault:NAME.")
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="All pairs of --layouts with all --kv-dtypes.")] = False,
    layouts: Annotated[
        str | None,
        typer.Option("--layouts", metavar="A,B,…", help="Layouts of --matrix; else tp1,tp2,tep4,adp2,adp4."),
    ] = None,
    kv_dtypes: Annotated[
        str | None, typer.Option("--kv-dtypes", metavar="A,B,…", help="KV dtypes of --matrix; else bf16,fp8,nvfp4.")
    ] = None,
    json: Json = False,
) -> int:
    """Say whether a cache can move from one deployment to another, and prove that every byte arrives once.

    Without --matrix, --src and --dst name the two parallel layouts; all other options hold for both sides where the
    destination's own is not given.
    """
    from .peers_run import run_matrix, run_pair

    common = {
        "--kv-dtype": kv_dtype,
        "--state-dtype": state_dtype,
        "--tokens-per-block": tokens_per_block,
        "--draft": draft,
        "--kv-layout": kv_layout,
        "--allocator": allocator,
    }
    source = {"--layout": src, "--pp-partition": src_pp_partition, "--dp": src_dp}
    destination = {
        "--layout": dst,
        "--pp-partition": dst_pp_partition,
        "--dp": dst_dp,
        "--kv-dtype": dst_kv_dtype,
        "--tokens-per-block": dst_tokens_per_block,
        "--draft": dst_draft,
        "--kv-layout": dst_kv_layout,
        "--allocator": dst_allocator,
    }
    lists = {"--layouts": layouts, "--kv-dtypes": kv_dtypes}
    run = run_matrix if matrix else run_pair
    return run(config, other, common, source, destination, lists, transfer, json)
