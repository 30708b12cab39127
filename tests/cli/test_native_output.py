"""What an allocator writes to descriptor 1, past Python, is no output of ours, whatever command runs it."""

from __future__ import annotations

import ctypes
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvsan.ci.cases import Case, save_case
from kvsan.cli.output import stdout_kept, terminal, written_at_once
from kvsan.model.spec import AttentionLayer, CacheSpec

LOUD = """
import ctypes
import os

import kvsan

library = ctypes.CDLL(None)


def allocate(spec):
    os.write(1, b"by a system call\\n")
    library.printf(b"by the C library\\n")  # which buffers it, long after the call
    os.system("echo by a process")
    print("by Python")
    if spec.slots == 3:
        raise KeyError("slots")
    return kvsan.allocate(spec, "trtllm-v2")
"""
PRINTED = {f"by {way}" for way in ("a system call", "the C library", "a process", "Python")}

SPEC = CacheSpec(layers=(AttentionLayer(kv_heads=1, head_dim=64),), slots=3)
GRID = {"kv_formats": ["bf16"], "heads": 1, "head_dims": [64], "tokens_per_block": [1], "tp": [1], "index_dims": [64]}

COMMANDS = {
    "check": ["check", "spec.json", "--allocator", "loud:allocate"],
    "check --all-ranks": ["check", "spec.json", "--allocator", "loud:allocate", "--all-ranks"],
    "check CASE": ["check", "case.json", "--allocator", "loud:allocate"],
    "matrix": ["matrix", "spec.json", "--layouts", "tp1,tp2", "--allocators", "loud:allocate"],
    "fuzz": ["fuzz", "--allocator", "loud:allocate", "--max-examples", "2"],
    "sweep": ["sweep", "--allocator", "loud:allocate", "--grid", "grid.json"],
    "shrink": ["shrink", "case.json", "--allocator", "loud:allocate"],
}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the C library goes by another name")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with a loud allocator and something for every command to work on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud.py").write_text(LOUD)
    (tmp_path / "grid.json").write_text(json.dumps(GRID))
    layer = {"kind": "attention", "kv_heads": 1, "head_dim": 64}
    (tmp_path / "spec.json").write_text(json.dumps({"kvsan": "spec", "layers": [layer]}))
    save_case(Case(allocator="loud:allocate", input=SPEC), tmp_path).rename("case.json")
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_the_document_is_alone_on_the_standard_output(folder: Path, root: Path, name: str, monkeypatch) -> None:
    (folder / "library").mkdir()
    (folder / "library" / "kvsan").symlink_to(root)
    monkeypatch.setenv("PYTHONPATH", str(folder / "library"))
    command = [sys.executable, "-m", "kvsan", *COMMANDS[name], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.count("\n") == 1
    assert isinstance(json.loads(done.stdout), dict)
    assert set(done.stderr.splitlines()) == PRINTED


def run_with(descriptors: str, folder: Path, root: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a check in a shell, the standard output or error closed as ``descriptors`` says."""
    command = f'"{sys.executable}" -m kvsan check spec.json --allocator loud:allocate --json {descriptors}'
    (folder / "library").mkdir()
    (folder / "library" / "kvsan").symlink_to(root)
    environment = {**os.environ, "PYTHONPATH": str(folder / "library")}
    return subprocess.run(["sh", "-c", command], capture_output=True, check=False, env=environment)


def test_without_a_standard_error_it_is_dropped(folder: Path, root: Path) -> None:
    done = run_with("2>&-", folder, root)
    assert done.returncode == 0
    assert json.loads(done.stdout)["status"] == "clean"
    assert done.stderr == b""


def test_without_a_standard_output_nothing_else_is_written_there(folder: Path, root: Path) -> None:
    done = run_with(">&-", folder, root)
    assert done.returncode in (0, 1), "an allocator whose own system call fails is refused"
    assert done.stdout == b""
    assert b"Traceback" not in done.stderr


def test_the_standard_output_is_back_afterwards(capfd: pytest.CaptureFixture[str]) -> None:
    for error in (None, KeyboardInterrupt):
        try:
            with stdout_kept():
                os.write(1, b"inside\n")
                ctypes.CDLL(None).printf(b"inside\n")
                if error is not None:
                    raise error
        except KeyboardInterrupt:
            pass
        os.write(1, b"outside\n")
    out, err = capfd.readouterr()
    assert (out, err) == ("outside\n" * 2, "inside\n" * 4)


def test_it_leaves_no_descriptor_open() -> None:
    before = os.listdir("/dev/fd")
    for _ in range(5):
        with stdout_kept():
            pass
    assert os.listdir("/dev/fd") == before


def test_a_standard_output_that_is_closed_or_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for output in (None, io.StringIO(), closed):
        monkeypatch.setattr(sys, "stdout", output)
        with stdout_kept():
            print("dropped, or on the standard error")
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("COLUMNS", "80")
            terminal().print("a report")


def test_what_is_held_back_is_as_the_terminal_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "ascii"

        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with written_at_once():
        assert sys.stdout.isatty()
        assert sys.stdout.encoding == "ascii"
        print("✓ help")
        assert screen.getvalue() == ""
    assert screen.getvalue() == "ok help\n"
    assert terminal().is_terminal
