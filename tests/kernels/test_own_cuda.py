"""The worked example of a CUDA kernel: its source on the host, its refusal without a GPU, and itself on one."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("triton") is None:  # importing it here would settle too early that kernels are compiled
    pytest.skip("triton is not installed", allow_module_level=True)

from kvsan.kernels.device import Device  # noqa: E402
from kvsan.model.errors import SpecError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HOST = """
#include <cmath>
using std::exp;
#define __global__
#define __device__
static struct { int x; } blockIdx, blockDim, threadIdx;
"""
"""What C++ must be told to take the kernel for a function of one thread, whose number is ``threadIdx.x``."""
HOOK = """
extern "C" void stand_at(int thread) { threadIdx.x = thread; }
"""


@pytest.fixture
def folder(root: Path) -> Path:
    return (root / "examples" / "your-kernel" / "raw.py").parent


@pytest.fixture
def example(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("raw", folder / "raw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernel for the host")
def test_the_source_of_the_cuda_kernel_is_right_on_the_host(host: Device, example, folder, tmp_path) -> None:
    from kvsan.kernels.trials.kernels import run_trials
    from kvsan.kernels.trials.own import own_trial
    from kvsan.kernels.trials.shape import SMALL

    source, library = tmp_path / "raw.cpp", tmp_path / "raw.so"
    source.write_text(HOST + (folder / "raw.cu").read_text(encoding="utf-8") + HOOK, encoding="utf-8")
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    types = [ctypes.c_uint64] * 6 + [ctypes.c_double] * 2 + [ctypes.c_int32] * 10 + [ctypes.c_int64] * 10

    def decode(problem: Any, queries: Any, out: Any) -> None:
        threads, given, _kept = example.arguments(problem, queries, out)
        plain = [kind(value.item()) for kind, value in zip(types, given, strict=True)]
        for thread in range(threads):
            loaded.stand_at(thread)
            loaded.attend(*plain)

    found = run_trials(host, own_trial("decode", decode), range(40), SMALL, may_refuse=True)
    assert found.failures == ()
    assert set(found.relative_l2) == set(example.FORMATS)
    assert found.refused < found.trials == 40


def test_without_a_gpu_it_says_what_it_needs(host: Device, example) -> None:
    with pytest.raises(SpecError, match="needs a GPU"):
        example.decode(None, None, torch.empty(1))


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy is not installed")
def test_it_runs_on_a_gpu(gpu: Device, folder: Path) -> None:
    command = [sys.executable, "-m", "kvsan.kernels.trials", "--device", "cuda", "--own", "raw:decode"]
    done = subprocess.run([*command, "--shapes", "100"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (report,) = json.loads(done.stdout)["kernels"]
    assert report["failures"] == []
    assert 0 < report["refused"] < report["trials"]
