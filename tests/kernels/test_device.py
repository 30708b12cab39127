"""Opening a device: which mode Triton is in is found out, whoever imported it first."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

OPEN = "from kvsan.kernels.device import open_device\nprint(open_device('cpu').kind)\n"


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(entry or "." for entry in sys.path)
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@needs_triton
def test_the_interpreter_is_chosen_without_help() -> None:
    assert run_python(OPEN).stdout == "cpu\n"


@needs_triton
def test_triton_imported_for_compiling_is_found_out() -> None:
    """Its own functions stay as they were decorated; a kernel that calls one would fail far from here."""
    ran = run_python("import triton\n" + OPEN)
    assert ran.returncode == 1
    assert "device: found Triton imported without TRITON_INTERPRET=1 before cpu was opened" in ran.stderr
