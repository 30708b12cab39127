"""The report for a person: everything is there, in 80 columns, and short however many layers there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvsan.cli.wording import compress, compress_layers, human_bytes, printable_line


def words_of(text: str) -> str:
    """Return ``text`` with its line breaks undone."""
    return " ".join(text.split())


def test_a_clean_rank(run, reference) -> None:
    ran = run("check", reference, "--tp", 2, "--rank", 1, "--kv-dtype", "fp8")
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line != line.rstrip() for line in lines)
    assert "\x1b" not in ran.out
    words = words_of(ran.out)
    for wanted in (
        "layout tp2, rank 1 of 2",
        "KV fp8, states fp32, 32 tokens per block, 4 slots",
        "allocator trtllm-v2-qsa-packed (the default)",
        "verdict ✓ clean",
        "196608 B 8192 B × 24",
        "98688 B of each slot are packed side planes",
        "layers 3, 7, …, 47 (12 layers): pages of 8192 B, index scale 24, mapping offsets 0–11",
        "✓ clean: no rule is broken",
    ):
        assert wanted in words


def test_a_refusal_says_what_why_and_what_to_do(run, reference) -> None:
    ran = run("check", reference, "--tp", 2, "--kv-dtype", "fp8", "--allocator", "trtllm-v2-qsa-legacy")
    words = words_of(ran.out)
    assert ran.status == 1
    assert "verdict ✗ refused" in words
    assert "what Layer 7's K page starts 24576 B into its pool slot" in words
    assert "why Layer 3's index_key page (1 head x 128 bf16 x 32 tokens = 8192 B) is as large as a K page" in words
    assert "remedy pack the side planes into one buffer" in words
    assert "(the default)" not in words


def test_findings_are_grouped_by_rule_and_counted(run, reference, own) -> None:
    ran = run("check", reference, "--allocator", f"{own}:moved")
    assert ran.status == 1
    lines = ran.out.splitlines()
    assert "  adjacency × 12" in lines
    assert "  alias × 20 or more" in lines
    assert "  • and 9 more findings (--json has them)" in lines
    assert len(lines) < 90
    assert "printed by an allocator" not in ran.out


def test_draft_pools_and_quota(run, reference) -> None:
    words = words_of(run("check", reference, "--draft", "separate", "--quota", "8GiB", "--kv-dtype", "fp8").out)
    assert "quota 8 GiB, 1 draft layer separate" in words
    assert "draft 0 0" in words
    assert "draft layer 48: pages of 16384 B" in words


def test_all_ranks_are_a_table(run, reference) -> None:
    ran = run("check", reference, "--layout", "tp2pp5", "--kv-dtype", "fp8", "--all-ranks")
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["2–3", "1", "10–19", "4", "7586176", "24960", "✓", "clean"] in rows
    assert ["8–9", "4", "39–47", "4", "6513024", "24960", "✓", "clean"] in rows
    legacy = run(
        "check",
        reference,
        "--layout",
        "tp2pp2",
        "--kv-dtype",
        "fp8",
        "--all-ranks",
        "--allocator",
        "trtllm-v2-qsa-legacy",
    )
    assert legacy.status == 1
    assert "Ranks 0–1" in words_of(legacy.out)
    assert "Layer 31's K page starts 24576 B" in words_of(legacy.out)


@pytest.mark.parametrize("options", [[], ["--layout", "tp4pp200", "--all-ranks"], ["--allocator", "trtllm-v1"]])
def test_a_thousand_layers_stay_short(run, tmp_path, options) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1000,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    ran = run("check", file, *options)
    assert ran.status == 0
    assert len(ran.out.splitlines()) < 30


def test_a_name_cannot_write_to_the_terminal(run, tmp_path) -> None:
    layer = {"kind": "attention", "kv_heads": 1, "head_dim": 64}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps({"kvsan": "spec", "model": "[red]x\x1b[31m\n[/]", "layers": [layer]}), encoding="utf-8")
    ran = run("check", file)
    assert ran.status == 0
    assert "\x1b" not in ran.out
    assert "model      [red]x\\x1b[31m [/], 1 layer" in ran.out


def test_signs_are_replaced_where_the_encoding_lacks_them(reference) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "kvsan", "check", str(reference)]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"verdict    ok clean" in done.stdout
    assert b"layers 3, 7, ..., 47 (12 layers)" in done.stdout


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([], ""),
        ([5], "5"),
        ([0, 1], "0–1"),
        (range(1000), "0–999"),
        ([3, 7, 11], "3, 7, 11"),
        (range(3, 4000, 4), "3, 7, …, 3999"),
        ([0, 1, 2, 4, 5, 6, 8, 9, 10, 12], "0–2, 4–6, …, 12"),
    ],
)
def test_numbers_are_compressed(numbers, words) -> None:
    assert compress(numbers) == words


def test_layers_that_are_not_all_named_are_counted() -> None:
    assert compress_layers([7, 3, 7]) == "layers 3, 7"
    assert compress_layers([0]) == "layer 0"
    assert compress_layers([0, 1]) == "layers 0–1 (2 layers)"


@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [
        (0, ""),
        (1023, ""),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (98688, "96.3 KiB"),
        (3 << 30, "3 GiB"),
        (1 << 60, "1048576 TiB"),
    ],
)
def test_sizes_get_the_unit_a_person_thinks_in(size_bytes, words) -> None:
    assert human_bytes(size_bytes) == words


def test_an_error_line_is_short_and_printable() -> None:
    line = printable_line("a\nb\x1b[0m" + "c" * 2000 + "end")
    assert len(line) <= 600
    assert line.isprintable()
    assert line.startswith("a b\\x1b[0mccc")
    assert line.endswith("end")
