"""The wheel holds the package and nothing else, the sdist all that its tests need, and the installed wheel works."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

import kvsan

Run = Callable[..., str]

EXAMPLE = "examples/qwen3.8-flash-next/config.json"
pytestmark = pytest.mark.slow


def _package_folders(root: Path) -> list[str]:
    """Return the packages of pyproject.toml as folders in a wheel."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return [name.replace(".", "/") for name in settings["tool"]["setuptools"]["packages"]]


def test_the_wheel_holds_every_package_and_the_type_marker(wheel: Path, root: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"{folder}/__init__.py" for folder in _package_folders(root)} | {"kvsan/py.typed", "kvsan/__main__.py"}
    assert sorted(wanted - names) == []


def test_the_wheel_holds_every_module(wheel: Path, root: Path, project_files: tuple[Path, ...]) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {Path(folder).relative_to("kvsan") for folder in _package_folders(root)}
    modules = {f"kvsan/{file.as_posix()}" for file in project_files if file.suffix == ".py" and file.parent in folders}
    assert sorted(modules - names) == []


def test_the_wheel_holds_nothing_but_the_package(wheel: Path, root: Path) -> None:
    folders = set(_package_folders(root))
    strangers = [
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/" not in name
        and (name.rpartition("/")[0] not in folders or not name.endswith((".py", "py.typed")))
    ]
    assert strangers == []


def test_the_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata_name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(metadata_name).decode())
    assert metadata["Version"] == kvsan.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    requires = metadata.get_all("Requires-Dist") or []
    core = {re.split(r"[^\w-]", line)[0] for line in requires if "extra ==" not in line}
    assert core == {"hypothesis", "islpy", "msgspec", "numpy", "rich", "typer"}
    assert set(metadata.get_all("Provides-Extra") or []) == {"gpu", "gpu-cuda13", "kernels", "test"}
    assert any(name.endswith("/LICENSE") for name in archive.namelist())


def test_the_sdist_holds_tests_examples_and_documents(sdist: Path, project_files: tuple[Path, ...]) -> None:
    left_out = [file.as_posix() for file in project_files if not (sdist / file).is_file()]
    assert left_out == [], "in the checkout and not in the sdist; see MANIFEST.in"


def test_the_installed_wheel_is_what_runs(installed: Path, run: Run, tmp_path: Path) -> None:
    found = run(sys.executable, "-c", "import kvsan; print(kvsan.__file__)", cwd=tmp_path, path=installed)
    assert Path(found.strip()).parent == installed / "kvsan"


def test_the_console_script(installed: Path, run: Run, tmp_path: Path) -> None:
    folder = installed / "bin" if (installed / "bin").is_dir() else installed / "Scripts"
    assert "check" in run(str(folder / "kvsan"), "--help", cwd=tmp_path, path=installed)


def test_the_module_runs(installed: Path, run: Run, tmp_path: Path) -> None:
    listed = json.loads(run(sys.executable, "-m", "kvsan", "rules", "--json", cwd=tmp_path, path=installed))
    assert "alias" in [rule["name"] for rule in listed["rules"]]


def test_the_main_job(installed: Path, sdist: Path, run: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvsan", "check", str(sdist / EXAMPLE), "--json"]
    assert json.loads(run(*command, cwd=tmp_path, path=installed))["status"] == "clean"
