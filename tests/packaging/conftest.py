"""Builds shared by the packaging tests: a clean copy of the tree, an sdist, a wheel, and the wheel installed.

Nothing is fetched: the copy is built by the setuptools of this environment, and installed without dependencies.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

Run = Callable[..., str]
"""Runs a program away from the checkout and returns its stdout: ``_run`` below."""


def _run(*command: str, cwd: Path, path: Path | None = None, status: int = 0) -> str:
    """Run ``command`` in ``cwd`` with ``path`` as the only PYTHONPATH, and return its stdout.

    Fails the test, showing all output, unless the exit status is ``status``.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "PYTHON", "COV_"))}
    env = kept | {"COLUMNS": "120", "PYTHONDONTWRITEBYTECODE": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )
    shown = f"{' '.join(command)}\nexit status {done.returncode}, expected {status}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == status, shown
    return done.stdout


def copy_project(root: Path, files: tuple[Path, ...], target: Path) -> Path:
    """Copy ``files`` of ``root`` to ``target``, as a fresh clone would have them, and return ``target``."""
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / file, target / file)
    return target


@pytest.fixture(scope="session")
def run() -> Run:
    """Return the function that runs a program away from the checkout."""
    return _run


@pytest.fixture(scope="session")
def clone(root: Path, project_files: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clean copy of the checkout in a folder named as a downloaded ZIP unpacks: no identifier."""
    return copy_project(root, project_files, tmp_path_factory.mktemp("clone") / "kvsan-main")


def _build(kind: str, source: Path, target: Path) -> Path:
    if importlib.util.find_spec("setuptools") is None or int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools >= 77 is not installed, and the build must not fetch it")
    target.mkdir()
    _run(sys.executable, "-c", f"import setuptools.build_meta as b; b.build_{kind}({str(target)!r})", cwd=source)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="session")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the sdist of the project, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    source = shutil.copytree(clone, folder / "source")  # a build leaves files behind, and the clone is shared
    with tarfile.open(_build("sdist", source, folder / "dist")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built from the sdist as an index's users would have it built."""
    folder = tmp_path_factory.mktemp("wheel")
    return _build("wheel", shutil.copytree(sdist, folder / "source"), folder / "dist")


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder into which pip has installed the wheel; its dependencies are those of this environment."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed in this environment")
    folder = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(folder / "site")]
    _run(sys.executable, "-m", "pip", "install", *options, str(wheel), cwd=folder)
    return folder / "site"
