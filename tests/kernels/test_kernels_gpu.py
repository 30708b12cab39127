"""The reference kernels on a GPU: 500 fuzzed shapes for each, within 40 compiled variants."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_500_shapes_of_every_kernel() -> None:
    # a process of its own, because in this one other tests may have chosen the interpreter
    workers = max(1, min(8, os.cpu_count() or 1))
    command = [sys.executable, "-m", "kvsan.kernels.trials", "--device", "cuda", "--shapes", "500"]
    command += ["--workers", str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    report = json.loads(done.stdout)
    for kernel in report["kernels"]:
        assert kernel["trials"] == 500
        assert kernel["failures"] == [], kernel
        assert all(count <= 40 for count in kernel["variants"].values()), kernel["variants"]
        assert kernel["variants"], "nothing was compiled"
    assert done.returncode == 0
