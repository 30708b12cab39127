"""``kvsan matrix``: the fifteen combinations of the reference model under both QSA policies, and the options."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LAYOUTS = ("tp1", "tp2", "tep4", "adp2", "adp4")
DTYPES = ("bf16", "fp8", "nvfp4")
LEGACY, PACKED = "trtllm-v2-qsa-legacy", "trtllm-v2-qsa-packed"
CELL_KEYS = [
    "layout",
    "kv_dtype",
    "allocator",
    "status",
    "index_scale",
    "mapping_offsets",
    "side_planes_bytes",
    "message",
]
REFUSED = {("fp8", "tp2"), ("fp8", "tep4"), ("nvfp4", "tp1"), ("nvfp4", "adp2"), ("nvfp4", "adp4")}
CAUSE = "Layer 7's K page starts 24576 B into its pool slot, which is not a multiple of one layer's K/V pages (16384 B)"
OPTIONS = ("--layouts", ",".join(LAYOUTS), "--kv-dtypes", ",".join(DTYPES), "--allocators", f"{LEGACY},{PACKED}")


def require_reference_cells(cells: list[dict[str, object]]) -> None:
    """Assert what TensorRT-LLM's arithmetic says of the reference model, for each of the thirty cells."""
    assert len(cells) == 30
    for cell in cells:
        assert list(cell) == CELL_KEYS
        combination = cell["kv_dtype"], cell["layout"]
        if cell["allocator"] == LEGACY and combination in REFUSED:
            assert cell["status"] == "rejected", combination
            assert str(cell["message"]).startswith(CAUSE)
            assert (cell["index_scale"], cell["mapping_offsets"], cell["side_planes_bytes"]) == (None, None, 0)
            continue
        assert (cell["status"], cell["message"]) == ("clean", None), combination
        assert (cell["index_scale"], cell["mapping_offsets"]) == (24, list(range(12)))
        packed = cell["allocator"] == PACKED and cell["kv_dtype"] != "bf16"
        assert cell["side_planes_bytes"] == (98688 if packed else 0)


def test_both_policies_on_the_reference_model(run, reference) -> None:
    ran = run("matrix", reference, *OPTIONS, "--json")
    assert (ran.status, ran.err, list(ran.document)) == (1, "", ["cells"])
    cells = ran.document["cells"]
    require_reference_cells(cells)
    order = [(cell["allocator"], cell["kv_dtype"], cell["layout"]) for cell in cells]
    assert order == [(policy, dtype, layout) for policy in (LEGACY, PACKED) for dtype in DTYPES for layout in LAYOUTS]


def test_python_without_assertions_gives_the_same_answer(reference) -> None:
    command = [sys.executable, "-O", "-m", "kvsan", "matrix", str(reference), *OPTIONS, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    require_reference_cells(json.loads(done.stdout)["cells"])


def test_a_clean_matrix_exits_with_0(run, reference) -> None:
    ran = run(
        "matrix", reference, "--layouts", "tp1,TP1,tp2", "--allocators", PACKED, "--kv-dtypes", "fp8,float8_e4m3fn"
    )
    assert ran.status == 0
    cells = run("matrix", reference, "--layouts", "tp1,TP1,tp2", "--kv-dtypes", "fp8,float8_e4m3fn", "--json").document[
        "cells"
    ]
    assert [(cell["layout"], cell["kv_dtype"], cell["allocator"]) for cell in cells] == [
        ("tp1", "fp8", PACKED),
        ("tp2", "fp8", PACKED),
    ]


def test_a_cell_is_as_bad_as_its_worst_stage(run, reference) -> None:
    # by 3 + 45 layers, the first stage has no layer with K pages and the second one has all twelve
    options = ["--layouts", "tp2pp2", "--kv-dtypes", "fp8", "--pp-partition", "3,45", "--json"]
    (cell,) = run("matrix", reference, *options, "--allocators", LEGACY).document["cells"]
    assert cell["status"] == "rejected"
    first = run("matrix", reference, *options, "--allocators", LEGACY, "--rank", 0)
    assert (first.status, first.document["cells"][0]["status"]) == (0, "clean")
    assert (first.document["cells"][0]["index_scale"], first.document["cells"][0]["mapping_offsets"]) == (None, [])
    (packed,) = run("matrix", reference, *options, "--allocators", PACKED).document["cells"]
    assert (packed["index_scale"], packed["mapping_offsets"], packed["side_planes_bytes"]) == (24, [*range(12)], 98688)


def test_findings_are_told_from_refusals(run, reference, own) -> None:
    ran = run("matrix", reference, "--layouts", "tp1", "--allocators", f"{PACKED},{own}:moved,{own}:bare", "--json")
    assert ran.status == 1
    assert [cell["status"] for cell in ran.document["cells"]] == ["clean", "findings", "rejected"]
    clean, broken, refused = ran.document["cells"]
    assert (clean["message"], refused["mapping_offsets"]) == (None, None)
    assert broken["message"]
    assert broken["mapping_offsets"] == list(range(12))


def test_the_report_is_a_grid_with_each_cause_once(run, reference) -> None:
    ran = run("matrix", reference, *OPTIONS)
    assert (ran.status, ran.err) == (1, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    lines = ran.out.splitlines()
    assert "30 cells: 25 clean, 5 refused" in lines[0]
    head = next(line for line in lines if "tp1" in line)
    assert head.split() == ["KV", *LAYOUTS]
    (fp8_legacy, fp8_packed) = [line for line in lines if line.split()[:1] == ["fp8"]]
    assert (fp8_legacy.count("✓ clean"), fp8_legacy.count("✗ refused")) == (3, 2)
    assert fp8_packed.count("✓ clean") == 5
    text = " ".join(ran.out.split())
    assert text.count(CAUSE) == 2
    assert f"✗ refused: {LEGACY}, fp8 tp2, tep4" in text
    assert f"✗ refused: {LEGACY}, nvfp4 tp1, adp2, adp4" in text
    assert "remedy pack the side planes into one buffer" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layouts", "tp1,,tp2"], "--layouts: found 'tp1,,tp2', needs names with commas between"),
        (["--layouts", "tp1,zz"], "--layouts: unknown parallel layout 'zz'"),
        (["--layouts", "tp0"], "--layouts: tp: found 0, needs a whole number from 1"),
        (["--layouts", "pp49"], "--layouts: tp1pp49: pp: found 49 pipeline stages for 48 layers"),
        (["--kv-dtypes", "int64"], "--kv-dtypes: found 'int64', needs one of fp32, fp16, bf16, fp8"),
        (["--allocators", "zz"], "--allocators: unknown allocator 'zz'"),
        (["--layouts", "tp2", "--rank", "2"], "--rank: found 2, needs a whole number from 0 to 1, for layout tp2"),
        (["--pp-partition", "24,24"], "--pp-partition: found 2 stages, and no layout has as many"),
        (["--layouts", "pp2", "--pp-partition", "24,25"], "--pp-partition: found 49 layers in all"),
        (["--slots", "1", "--quota", "1GiB"], "--slots and --quota were both given"),
        (["--state-dtype", "int8"], "--state-dtype: found 'int8', needs one of fp32, fp16, bf16"),
    ],
)
def test_bad_options_are_one_line(run, reference, options, message) -> None:
    ran = run("matrix", reference, *options, "--json")
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith(f"kvsan: {message}")
