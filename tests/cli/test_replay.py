"""``kvsan replay``: cases from files and folders, verdicts, and bad input in one line."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from kvsan.ci.cases import Case, FoundRule, save_case
from kvsan.ci.faults import fault_named
from kvsan.cli.replay_run import read_bytes
from kvsan.model.errors import SpecError
from kvsan.model.layers import AttentionLayer
from kvsan.model.spec import CacheSpec, encode_spec
from kvsan.sim.arena import Arena
from kvsan.sim.registry import allocate

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "examples" / "cases"
SPEC = CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=64),), tokens_per_block=1, slots=2)

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "triton")), reason="needs torch and triton"
)


def kvsan(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvsan", "replay", *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )


def test_shipped_cases_break_on_memory_what_they_break_on_paper() -> None:
    done = kvsan(str(CASES), "--json")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["device"] == "cpu"
    assert set(document["versions"]) >= {"torch", "triton"}
    names = sorted(path.name for path in CASES.glob("*.json"))
    assert [Path(case["case"]).name for case in document["cases"]] == names
    for case in document["cases"]:
        saved = msgspec.json.decode(Path(case["case"]).read_bytes(), type=Case)
        rules = {finding["rule"] for finding in case["findings"]}
        if case["status"] == "rejected":
            assert rules == {"rejected"}
            continue
        assert case["status"] == "findings"
        assert "replay-mismatch" not in rules
        assert case["digest"] == Arena.build(allocate(saved.input, saved.allocator)).digest()


def test_a_folder_of_all_sorts(tmp_path: Path) -> None:
    """A clean spec, a fault, a file that is no case and one that cannot be laid out: each gets its own status."""
    fault = fault_named("fault:canary")
    saved = Case(allocator=fault.name, input=fault.minimum, found=(FoundRule(rule="alias", message="x"),))
    save_case(saved, tmp_path)
    (tmp_path / "0clean.json").write_bytes(encode_spec(SPEC))
    (tmp_path / "1broken.json").write_text("{")
    foreign = Case(allocator="os:system", input=SPEC)
    (tmp_path / "2foreign.json").write_bytes(msgspec.json.encode(foreign))
    done = kvsan(str(tmp_path), "--json")
    assert done.returncode == 1
    cases = json.loads(done.stdout)["cases"]
    assert [case["status"] for case in cases] == ["clean", "refused", "refused", "findings"]
    assert cases[0]["digest"] == Arena.build(allocate(SPEC, "trtllm-v2")).digest()
    assert "code is never loaded because a file says so" in cases[2]["message"]
    assert {finding["rule"] for finding in cases[3]["findings"]} == {"alias", "op-address"}
    text = kvsan(str(tmp_path))
    assert text.returncode == 1
    assert "4 cases on cpu" in text.stdout
    assert "1 clean, 1 findings, 2 refused" in text.stdout
    assert text.stderr == ""


def test_a_clean_spec_ends_with_status_0_and_fewer_slots_are_told(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_bytes(encode_spec(msgspec.structs.replace(SPEC, slots=5000)))
    done = kvsan(str(path), "--max-memory", "64KiB", "--allocator", "trtllm-v1")
    assert done.returncode == 0, done.stderr
    assert "a replay in 65536 B holds fewer slots than asked for" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere: cannot be read"),
        ([str(CASES), "--device", "tpu"], "--device: found 'tpu', needs"),
        ([str(CASES), "--workers", "0"], "--workers: found '0', needs a whole number from 1 to 64"),
        ([str(CASES), "--max-memory", "much"], "--max-memory: found 'much', needs a whole number of bytes"),
        ([str(CASES), "--sanitizer"], "--sanitizer: watches CUDA kernels, needs --device cuda"),
        ([str(ROOT / "tests" / "cli")], "no case in"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], words: str) -> None:
    done = kvsan(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("64GiB", 64 << 30), ("3 MiB", 3 << 20), ("0", None), ("-1", None), ("9e9", None)]
)
def test_sizes_with_units(text: str, value: int | None) -> None:
    if value is not None:
        assert read_bytes("--max-memory", text) == value
        return
    with pytest.raises(SpecError, match="needs a whole number of bytes"):
        read_bytes("--max-memory", text)


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_interrupted_work_reports_what_it_has(tmp_path: Path) -> None:
    for number in range(120):
        (tmp_path / f"{number:03}.json").write_bytes(encode_spec(msgspec.structs.replace(SPEC, slots=1 + number % 7)))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvsan", "replay", str(tmp_path), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    time.sleep(9)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the machine was done before the interruption")
    assert process.returncode == 130, stderr
    if not stdout:  # interrupted before the device was open
        assert stderr.decode() == "kvsan: interrupted\n"
        return
    document = json.loads(stdout)
    assert document["interrupted"]
    assert len(document["cases"]) < 120


def test_checking_still_imports_no_torch() -> None:
    code = "import sys, kvsan.cli.replay, kvsan.cli.replay_run; print('torch' in sys.modules, 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
