"""The tests run from a clone whose folder is no identifier, such as the ``kvsan-main`` of a downloaded ZIP.

pytest then loads the root ``__init__.py`` without a parent package; a relative import there would break every test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]
pytestmark = pytest.mark.slow

FAILING_PROPERTY = """
from hypothesis import given, strategies as st

@given(st.integers())
def test_planted(number):
    assert number < 10
"""


@pytest.fixture(scope="module")
def path(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a PYTHONPATH on which ``kvsan`` is the clone."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "kvsan").symlink_to(clone, target_is_directory=True)
    return folder


def test_kvsan_is_the_clone(clone: Path, path: Path, run: Run) -> None:
    found = run(sys.executable, "-c", "import kvsan; print(kvsan.__file__)", cwd=clone, path=path)
    assert Path(found.strip()).resolve() == (clone / "__init__.py").resolve()


def test_every_test_is_collected(clone: Path, path: Path, run: Run) -> None:
    collected = run(
        sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", cwd=clone, path=path
    )
    assert "tests/packaging/test_public_names.py::" in collected


def test_a_test_file_passes(clone: Path, path: Path, run: Run) -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/packaging/test_public_names.py"]
    assert "passed" in run(sys.executable, *command, cwd=clone, path=path)


def test_a_failing_property_leaves_nothing_in_the_working_directory(clone: Path, path: Path, run: Run) -> None:
    """Hypothesis remembers a failure; where, the tests decide, and it is not the checkout."""
    (clone / "tests" / "test_planted.py").write_text(FAILING_PROPERTY, encoding="utf-8")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=dev", "tests/test_planted.py"]
    assert "1 failed" in run(sys.executable, *command, cwd=clone, path=path, status=1)
    (clone / "tests" / "test_planted.py").unlink()
    assert not (clone / ".hypothesis").exists()
