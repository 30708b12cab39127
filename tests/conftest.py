"""What all tests share: the files of the project, Hypothesis's profiles, and the skipping of GPU tests.

Profiles: ``ci`` (the default where the variable CI is set) draws the same examples every time; ``dev`` draws new ones
and remembers failures. ``pytest --hypothesis-profile NAME`` or KVSAN_PROFILE=NAME chooses.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

ROOT = Path(__file__).resolve().parent.parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts what runs in the background so, and the commands that tests interrupt would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

NO_PROJECT_FILES = {"build", "dist", "htmlcov", "node_modules", "site-packages", "venv", "__pycache__"}
"""Folders that a walk leaves out where git cannot say what belongs to the project; hidden ones are left out too."""

CUDA_PROBE = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
raise SystemExit(cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0)
"""


def _hypothesis_home() -> Path:
    """Return the folder of this user for Hypothesis's database, outside the working directory."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"kvsan-hypothesis-{user}"


set_hypothesis_home_dir(_hypothesis_home())
hypothesis.settings.register_profile("ci", derandomize=True, database=None, deadline=None, print_blob=False)
hypothesis.settings.register_profile("dev", deadline=None, print_blob=False)
hypothesis.settings.load_profile(os.environ.get("KVSAN_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


def pytest_report_header() -> str:
    """Say which kvsan the tests are about to test: this checkout or an installed one."""
    spec = importlib.util.find_spec("kvsan")
    return f"kvsan: {spec.origin if spec else 'not importable; install it with: pip install -e .'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu``, with the reason, where CUDA finds no device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    # A process of its own asks: one that has called cuInit can no longer use CUDA in the children it forks.
    probe = subprocess.run([sys.executable, "-c", CUDA_PROBE], capture_output=True, check=False)
    if probe.returncode != 0:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and this machine has none"))


def list_project_files(root: Path) -> tuple[Path, ...]:
    """Return the files that belong to the project, relative to ``root``: tracked, or new and not ignored.

    Outside a git checkout (an unpacked sdist, a downloaded ZIP) they are found by a walk.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (root / ".git").exists():
        listed = subprocess.run(command, capture_output=True, check=False)
        if listed.returncode == 0:
            names = sorted({os.fsdecode(name) for name in listed.stdout.split(b"\0") if name})
            return tuple(Path(name) for name in names if (root / name).is_file())
    found = []
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        folders[:] = [
            name
            for name in folders
            if name not in NO_PROJECT_FILES and not name.endswith(".egg-info") and (name == ".ci" or name[0] != ".")
        ]
        found += [here / name for name in files if not name.endswith((".pyc", ".whl", ".tar.gz"))]
    return tuple(sorted(found))


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the checkout, which is the package too."""
    return ROOT


@pytest.fixture(scope="session")
def project_files() -> tuple[Path, ...]:
    """Return the files of the project, relative to its root."""
    return list_project_files(ROOT)
