"""Everything that needs a GPU, run from a checkout, and a report of it in Markdown.

    python -m kvsan.ci.gpu_suite --out report.md

runs ``pytest -m gpu``, ``kvsan bench replay`` and ``kvsan bench transfer``, each in a process of its own, and writes
the GPU's name, the driver, the versions and the numbers. The exit status is 0 when the tests pass and the benches run,
1 otherwise, 2 where there is no GPU, no checkout or no place for the report. kvsan need not be installed, only found
(PYTHONPATH).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

ROOT: Final = Path(__file__).resolve().parent.parent
TAIL_LINES: Final = 30
"""Lines of a failed command that the report shows."""
VERSIONS: Final = "import json; from kvsan.ci.replay.child import versions; print(json.dumps(versions('cuda')))"
QUERY: Final = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


class Ran(msgspec.Struct, frozen=True):
    """A command that has ended: its exit status (None: it could not start), what it said, and how long it took."""

    status: int | None
    out: str
    err: str
    seconds: float


class Counts(msgspec.Struct, frozen=True):
    """The counts of a test run."""

    passed: int
    failed: int
    skipped: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite and write the report; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvsan.ci.gpu_suite", description="Tests and bench on a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="where the report is written")
    parser.add_argument("--memory", default="64GiB", help="the pool that the passes of the bench go over")
    parser.add_argument("--layouts", default="6000", help="small layouts that the bench replays")
    parser.add_argument("--transfer-memory", default="24GiB", help="memory that the transfers of the bench take")
    given = parser.parse_args(arguments)
    gpu = run(QUERY)
    if gpu.status != 0:
        return _complain("nvidia-smi finds no NVIDIA GPU, and this suite needs one")
    if not (ROOT / "tests").is_dir():
        return _complain(f"{ROOT} has no tests: run this from a checkout")
    versions = run((sys.executable, "-c", VERSIONS))
    if versions.status != 0:
        return _complain(f"torch, triton or cupy cannot be loaded: {last_line(versions.err)}")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        options = ("-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={results}")
        tested = run((sys.executable, "-m", "pytest", *options, str(ROOT / "tests")))
        tests = counts(results)
    bench = ("bench", "replay", "--device", "cuda", "--memory", given.memory, "--layouts", given.layouts, "--json")
    benched = run((sys.executable, "-m", "kvsan", *bench))
    transfer = ("bench", "transfer", "--device", "cuda", "--memory", given.transfer_memory, "--json")
    moved = run((sys.executable, "-m", "kvsan", *transfer))
    text = report(gpu.out, json.loads(last_line(versions.out)), tested, tests, benched, moved)
    try:
        given.out.write_text(text, encoding="utf-8")
    except OSError as error:
        sys.stdout.write(text)
        return _complain(f"{given.out}: {error.strerror or error}")
    return 0 if tested.status == 0 and tests.passed and benched.status == moved.status == 0 else 1


def run(command: Sequence[str]) -> Ran:
    """Run ``command`` in the checkout, where kvsan is found as here."""
    started = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return Ran(None, "", str(error), 0.0)
    return Ran(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


def counts(results: Path) -> Counts:
    """Return the counts in a JUnit report; all are 0 where there is none."""
    try:
        suites = list(xml.parse(results).getroot().iter("testsuite"))
    except (OSError, xml.ParseError):
        return Counts(0, 0, 0)
    total, failures, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return Counts(total - failures - errors - skipped, failures + errors, skipped)


def report(gpus: str, versions: dict[str, str], tested: Ran, tests: Counts, benched: Ran, moved: Ran) -> str:
    """Return the report as Markdown. ``gpus`` is a line ``name, driver, memory`` for each GPU."""
    lines = ["# GPU suite", "", "| GPU | driver | memory |", "|---|---|---|"]
    lines += ["| " + " | ".join(part.strip() for part in line.split(",")) + " |" for line in gpus.splitlines()]
    lines += ["", ", ".join(f"{name} {version}" for name, version in versions.items()), "", "## Tests", ""]
    lines.append(
        f"`pytest -m gpu`: {tests.passed} passed, {tests.failed} failed, {tests.skipped} skipped "
        f"in {tested.seconds:.0f} s (status {tested.status})"
    )
    if tested.status != 0:
        lines += _quoted(tested)
    for name, ran, tables in (("replay", benched, _bench_lines), ("transfer", moved, _transfer_lines)):
        lines += ["", f"## `kvsan bench {name}`", ""]
        if ran.status == 0:
            lines += tables(json.loads(ran.out))
        else:
            lines += [f"failed with status {ran.status}", *_quoted(ran)]
    return "\n".join([*lines, ""])


def _transfer_lines(found: dict[str, Any]) -> list[str]:
    """Return the table of the bench of transfers."""
    return [
        "| pair | copies | blocks | bytes | ms | plain copy, ms | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *[
            f"| {each['source']} to {each['destination']} | {each['copies']:,} | {each['blocks']:,} "
            f"| {each['bytes']:,} | {each['ms']:.2f} | {each['plain_ms']:.2f} | {each['of_plain_copy']:.2f} |"
            for each in found["pairs"]
        ],
    ]


def _bench_lines(found: dict[str, Any]) -> list[str]:
    """Return the tables of the bench's document."""
    bandwidth, throughput = found["bandwidth"], found["throughput"]
    lines = [
        (
            f"Pool of {bandwidth['pool_bytes']:,} B, {bandwidth['views']:,} views; a device-to-device copy in the "
            f"same run moves {bandwidth['ceiling_gb_per_s']:,.0f} GB/s (read plus written)."
        ),
        "",
        "| pass | bytes | ms | GB/s | of the copy |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each['name']} | {each['bytes']:,} | {each['ms']:.2f} | {each['gb_per_s']:,.0f} "
        f"| {each['of_ceiling']:.3f} |"
        for each in bandwidth["passes"]
    ]
    return [
        *lines,
        "",
        (
            f"{throughput['layouts']:,} small layouts ({throughput['mean_bytes']:,.0f} B on average, "
            f"{throughput['findings']} with findings): {throughput['per_second']:,.0f} per second; view by view in "
            f"torch {throughput['baseline_per_second']:,.0f} per second over {throughput['baseline_layouts']:,} of "
            f"them ({throughput['baseline_findings']} wrong): {throughput['speedup']:.1f} times as many."
        ),
    ]


def _quoted(ran: Ran) -> list[str]:
    said = [line for line in (ran.out + ran.err).splitlines() if line.strip()]
    return ["", "```text", *said[-TAIL_LINES:], "```"]


def last_line(text: str) -> str:
    """Return the last line with text, empty where there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _complain(message: str) -> int:
    sys.stderr.write(f"gpu_suite: {message}\n")
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
