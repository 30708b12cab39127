"""The project's own rules, checked: each rule is a pure function from source text to the places that break it.

Every rule has a test over the files of the project and one that plants a fault, so that a rule which no longer catches
anything fails too. ``CONTRIBUTING.md`` says why each rule is there.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

import kvsan

MAX_LINE_CHARACTERS = 120
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70

NOT_PACKAGES = {"docs", "examples", "tests"}
"""Top-level folders whose Python files are no part of the package."""

MAY_IMPORT: dict[str, set[str]] = {
    "model": {"model"},
    "sim": {"model", "sim"},
    "kernels": {"model", "sim", "kernels"},
    "strategies": {"model", "sim", "strategies"},
    "ci": {"model", "sim", "kernels", "strategies", "ci"},
}
"""For each room, the rooms it may import from; ``cli`` and the root may import everything."""

EXACT_ROOMS = ("model", "sim", "kernels")
"""Rooms that compute sizes: no bare division, no floats (``kernels`` may compute with floats)."""

MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:" + "|".join(["home", "root", "work", "opt"]) + r")/[\w.]")

Place = tuple[int, str]
"""A line number and what is wrong there."""


# The rules: pure functions of a file's text.


def comments_of(text: str) -> dict[int, str]:
    """Return the comment of each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def excused(node: ast.expr | ast.stmt, comments: dict[int, str], word: str) -> bool:
    """Say whether a line of ``node`` carries the comment ``# word: why`` with a reason."""
    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return any(re.search(rf"#\s*{word}: \S", comments.get(line, "")) for line in lines)


def long_lines(text: str) -> Iterator[Place]:
    """Find lines of more than 120 characters."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE_CHARACTERS:
            yield number, f"{len(line)} characters, at most {MAX_LINE_CHARACTERS}"


def long_file(text: str) -> Iterator[Place]:
    """Find a file of more than 600 lines."""
    count = len(text.splitlines())
    if count > MAX_FILE_LINES:
        yield count, f"{count} lines, at most {MAX_FILE_LINES}: one noun per file, so split it"


def long_functions(text: str) -> Iterator[Place]:
    """Find functions of more than 70 lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {count} lines, at most {MAX_FUNCTION_LINES}"


def assertions(text: str) -> Iterator[Place]:
    """Find ``assert`` statements: with ``python -O`` they are gone, and the answer must be the same."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert vanishes under python -O: raise an error that names the thing and the value"


def is_path(node: ast.expr) -> bool:
    """Say whether an operand of ``/`` can only belong to a path: a string, or a path built from one."""
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return is_path(node.left) or is_path(node.right)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Path"


def bare_divisions(text: str) -> Iterator[Place]:
    """Find ``//`` and ``/`` on sizes: a division says what it intends (``model.arithmetic``)."""
    comments = comments_of(text)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.BinOp | ast.AugAssign):
            continue
        if isinstance(node.op, ast.FloorDiv) and not excused(node, comments, "floor"):
            yield node.lineno, "bare //: use exact_div, div_up or round_up, or say why with '# floor: why'"
        if isinstance(node.op, ast.Div):
            operands = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
            if not any(map(is_path, operands)) and not excused(node, comments, "path"):
                yield node.lineno, "bare /: sizes are whole numbers; if this joins paths, say so with '# path: why'"


def float_literals(text: str) -> Iterator[Place]:
    """Find float literals: a size is never a float."""
    comments = comments_of(text)
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, float | complex)
            and not excused(node, comments, "float")
        ):
            yield node.lineno, f"{node.value} is a float: sizes are whole numbers, or say why with '# float: why'"


def imported_modules(text: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield the absolute names imported by a module of ``package``, whether at load, lazily or for types.

    ``from kvsan import x`` yields ``kvsan.x``, so that importing a room by name counts as that room.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")
            prefix = base[: len(base) - (node.level - 1)] if node.level else []
            module = ".".join([*prefix, node.module] if node.module else prefix)
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "kvsan" else [module]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def upward_imports(text: str, package: str) -> Iterator[Place]:
    """Find imports that run upwards in the order of the folders; a thing that needs one is in the wrong room."""
    room = package.split(".")[1] if "." in package else ""
    allowed = MAY_IMPORT.get(room)
    if allowed is None:
        return
    for line, name in imported_modules(text, package):
        parts = name.split(".")
        if parts[0] == "kvsan" and (len(parts) == 1 or parts[1] not in allowed):
            yield line, f"{room}/ imports {name}, and may import only {', '.join(sorted(allowed))}"


def relative_imports(text: str) -> Iterator[Place]:
    """Find relative imports; in a root file they break every test of a clone named ``kvsan-main``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "relative import: write 'from kvsan.... import' here"


def machine_paths(text: str) -> Iterator[Place]:
    """Find absolute paths of somebody's machine."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := MACHINE_PATH.search(line):
            yield number, f"the path of one machine ({match.group()}...), which no other reader has"


def package_differences(packages: Iterable[str], files: Iterable[Path]) -> list[str]:
    """Return the packages that are listed without a folder, and the folders of code that are not listed.

    A folder of code without an ``__init__.py`` is refused too: mypy and the wheel would treat it unlike the others.
    """
    listed = {name for name in packages if name != "kvsan"}
    code = [PurePosixPath(file.as_posix()) for file in files if file.suffix == ".py"]
    folders = {file.parent for file in code if file.parts[0] not in NOT_PACKAGES and not file.parts[0].startswith(".")}
    folders.discard(PurePosixPath("."))
    found = {"kvsan." + ".".join(folder.parts) for folder in folders}
    missing_init = [folder for folder in folders if folder / "__init__.py" not in code]
    return (
        [f"pyproject.toml: packages lacks {name!r}" for name in sorted(found - listed)]
        + [f"pyproject.toml: packages lists {name!r}, which holds no code" for name in sorted(listed - found)]
        + [f"{folder}: has no __init__.py" for folder in sorted(missing_init)]
    )


def undocumented_rules(names: Iterable[str], document: str) -> list[str]:
    """Return the rules that have no heading of their own in ``document``."""
    headings = set(re.findall(r"^#+ +`?([\w-]+)", document, re.MULTILINE))
    return [name for name in names if name not in headings]


def unnamed_examples(examples: Iterable[PurePosixPath], texts: Iterable[str]) -> list[PurePosixPath]:
    """Return the examples whose name no text contains; a ``config.json`` goes by the name of its folder."""
    joined = "\n".join(texts)
    return [path for path in examples if (path.parent.name if path.name == "config.json" else path.name) not in joined]


def has_changelog_entry(version: str, changelog: str) -> bool:
    """Say whether the changelog has an entry with text for ``version``."""
    match = re.search(
        rf"^## \[?{re.escape(version)}(?!\d)\]?[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    return match is not None and re.search(r"^- ", match.group(1), re.MULTILINE) is not None


# The project, held to the rules.


@pytest.fixture(scope="module")
def texts(root: Path, project_files: tuple[Path, ...]) -> dict[Path, str]:
    """Return the text of each text file of the project."""
    found = {}
    for file in project_files:
        try:
            found[file] = (root / file).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
    return found


@pytest.fixture(scope="module")
def code(texts: dict[Path, str]) -> dict[Path, str]:
    """Return the text of each module of the package."""
    return {file: text for file, text in texts.items() if file.suffix == ".py" and file.parts[0] not in NOT_PACKAGES}


def package_of(file: Path) -> str:
    """Return the name of the package that a module's relative imports start from."""
    return ".".join(["kvsan", *file.parent.parts])


def complaints(file: Path, places: Iterable[Place]) -> list[str]:
    """Return the places as ``file:line: problem``."""
    return [f"{file.as_posix()}:{line}: {problem}" for line, problem in sorted(places)]


def verdict(found: Iterable[list[str]]) -> None:
    """Fail with all complaints, one a line."""
    if lines := [line for some in found for line in some]:
        pytest.fail("\n".join(lines), pytrace=False)


def test_lines_are_short(texts: dict[Path, str]) -> None:
    chosen = {file: text for file, text in texts.items() if file.suffix in (".py", ".toml") or file.parts[0] == ".ci"}
    verdict(complaints(file, long_lines(text)) for file, text in chosen.items())


def test_files_are_short(texts: dict[Path, str]) -> None:
    verdict(complaints(file, long_file(text)) for file, text in texts.items() if file.suffix == ".py")


def test_functions_are_short(code: dict[Path, str]) -> None:
    verdict(complaints(file, long_functions(text)) for file, text in code.items())


def test_nothing_depends_on_assertions(code: dict[Path, str]) -> None:
    verdict(complaints(file, assertions(text)) for file, text in code.items())


def test_divisions_say_what_they_intend(code: dict[Path, str]) -> None:
    chosen = {file: text for file, text in code.items() if file.parts[0] in EXACT_ROOMS}
    chosen.pop(Path("model/arithmetic.py"))
    verdict(complaints(file, bare_divisions(text)) for file, text in chosen.items())


def test_sizes_are_never_floats(code: dict[Path, str]) -> None:
    chosen = {file: text for file, text in code.items() if file.parts[0] in ("model", "sim")}
    verdict(complaints(file, float_literals(text)) for file, text in chosen.items())


def test_imports_run_downwards(code: dict[Path, str]) -> None:
    verdict(complaints(file, upward_imports(text, package_of(file))) for file, text in code.items())


def test_root_files_import_absolutely(code: dict[Path, str]) -> None:
    verdict(complaints(file, relative_imports(text)) for file, text in code.items() if len(file.parts) == 1)


def test_tests_import_absolutely(texts: dict[Path, str]) -> None:
    tests = {file: text for file, text in texts.items() if file.parts[0] == "tests" and file.suffix == ".py"}
    verdict(complaints(file, relative_imports(text)) for file, text in tests.items())


def test_conftest_files_live_under_tests(project_files: tuple[Path, ...]) -> None:
    assert [file for file in project_files if file.name == "conftest.py" and file.parts[0] != "tests"] == []


def test_no_file_names_a_place_on_one_machine(texts: dict[Path, str]) -> None:
    verdict(complaints(file, machine_paths(text)) for file, text in texts.items())


def test_every_package_is_listed(root: Path, project_files: tuple[Path, ...]) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    verdict([package_differences(settings["tool"]["setuptools"]["packages"], project_files)])


def test_every_rule_is_documented_and_tested(texts: dict[Path, str]) -> None:
    if Path("sim/rules/__init__.py") not in texts:
        pytest.skip("kvsan.sim.rules does not exist yet")
    names = [rule.name for rule in importlib.import_module("kvsan.sim.rules").RULES]
    tests = "\n".join(text for file, text in texts.items() if file.parts[0] == "tests")
    assert names
    assert undocumented_rules(names, texts.get(Path("docs/rules.md"), "")) == [], "needs a heading in docs/rules.md"
    assert [name for name in names if f'"{name}"' not in tests] == [], "named by no test"


def test_every_example_is_used_by_a_test(texts: dict[Path, str]) -> None:
    examples = [
        PurePosixPath(file.as_posix()) for file in texts if file.parts[0] == "examples" and file.suffix != ".md"
    ]
    tests = [text for file, text in texts.items() if file.parts[0] == "tests" and file.name != Path(__file__).name]
    assert unnamed_examples(examples, tests) == []


def test_the_changelog_has_an_entry_for_the_version(texts: dict[Path, str]) -> None:
    assert has_changelog_entry(kvsan.__version__, texts[Path("CHANGELOG.md")])


def test_examples_in_docstrings_are_true(code: dict[Path, str]) -> None:
    names = [".".join(["kvsan", *file.with_suffix("").parts]) for file, text in code.items() if ">>> " in text]
    modules = [importlib.import_module(name.removesuffix(".__init__")) for name in names]
    failed = [module.__name__ for module in modules if doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed]
    assert failed == []


# Faults planted for the rules above: each must be caught, and its sound neighbour must not.

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES

PLANTED = [
    (long_lines, "x = 1\n" + "#" * 121, 2),
    (long_lines, "#" * 120, None),
    (long_file, "x = 1\n" * 601, 601),
    (long_file, "x = 1\n" * 600, None),
    (long_functions, LONG_FUNCTION, 1),
    (long_functions, "class C:\n    async " + LONG_FUNCTION.replace("\n", "\n    "), 2),
    (long_functions, LONG_FUNCTION.removesuffix("    x = 1\n"), None),
    (assertions, "def f(x):\n    assert x", 2),
    (assertions, "'assert x'  # assert x", None),
    (bare_divisions, "pages = size // page", 1),
    (bare_divisions, "size = 1\nsize //= 2", 2),
    (bare_divisions, "half = size / 2", 1),
    (bare_divisions, "size /= 2", 1),
    (bare_divisions, "pages = size // page  # floor:", 1),
    (bare_divisions, "text = '# floor: a string is no comment'; pages = size // page", 1),
    (bare_divisions, "pages = size // page  # floor: whole pages only, the rest stays free", None),
    (bare_divisions, "pages = (\n    size // page  # floor: the rest stays free\n)", None),
    (bare_divisions, "file = folder / 'config.json'; other = Path(x) / y / z; third = x / f'{y}.json'", None),
    (bare_divisions, "file = folder / name  # path: both are", None),
    (bare_divisions, "'a // b'  # a // b", None),
    (float_literals, "size = 0.5", 1),
    (float_literals, "size = 1e3", 1),
    (float_literals, "share = 0.5  # float: a ratio for the report", None),
    (float_literals, "size = 1_000; text = '0.5'", None),
    (relative_imports, "def f():\n    from .model import x", 2),
    (relative_imports, "from kvsan.model import x", None),
    (machine_paths, "see\n" + "/" + "home/someone/file", 2),
    (machine_paths, "cd " + "/" + "root/file", 1),
    (machine_paths, "see https://example.com/home/page and docs/root/file", None),
]


@pytest.mark.parametrize(("rule", "text", "line"), PLANTED)
def test_planted_faults_are_caught(rule: Callable[[str], Iterable[Place]], text: str, line: int | None) -> None:
    assert [place[0] for place in rule(text)] == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("package", "text", "caught"),
    [
        ("kvsan.model", "from ..sim import layout", True),
        ("kvsan.model", "from .. import sim", True),
        ("kvsan.model", "from .. import __version__", True),
        ("kvsan.model", "import kvsan", True),
        ("kvsan.model", "def f():\n    import kvsan.sim.layout", True),
        ("kvsan.model", "importlib.import_module('kvsan.sim')", True),
        ("kvsan.model.huggingface", "from ...cli import main", True),
        ("kvsan.model.huggingface", "from ..errors import SpecError", False),
        ("kvsan.model", "import numpy\nfrom kvsanity import sim", False),
        ("kvsan.sim", "from ..ci import bench", True),
        ("kvsan.sim", "from kvsan import model", False),
        ("kvsan.sim.rules", "from ...model.errors import SpecError\nfrom ..layout import Layout", False),
        ("kvsan.strategies", "from ..kernels import buffers", True),
        ("kvsan.kernels", "from ..strategies import specs", True),
        ("kvsan.ci.bench", "from ...cli import main", True),
        ("kvsan.ci", "from ..strategies import specs", False),
        ("kvsan.cli", "from ..ci import bench", False),
        ("kvsan", "from kvsan.cli import main", False),
    ],
)
def test_planted_imports(package: str, text: str, caught: bool) -> None:
    assert bool(list(upward_imports(text, package))) == caught


def test_planted_packages() -> None:
    files = [Path("__init__.py"), Path("a/__init__.py"), Path("a/b/c.py"), Path("tests/x.py"), Path("docs/z.md")]
    assert package_differences(["kvsan", "kvsan.a", "kvsan.gone"], files) == [
        "pyproject.toml: packages lacks 'kvsan.a.b'",
        "pyproject.toml: packages lists 'kvsan.gone', which holds no code",
        "a/b: has no __init__.py",
    ]
    assert package_differences(["kvsan", "kvsan.a"], files[:2]) == []


def test_planted_documents() -> None:
    assert undocumented_rules(["alias", "stride"], "# Rules\n\n## `alias`\n\nNot stride.\n") == ["stride"]
    paths = [
        PurePosixPath("examples/a/config.json"),
        PurePosixPath("examples/b.json"),
        PurePosixPath("examples/c.json"),
    ]
    assert unnamed_examples(paths, ["folder / 'a'", "'b.json'"]) == [PurePosixPath("examples/c.json")]


@pytest.mark.parametrize(
    ("changelog", "found"),
    [
        ("# Changelog\n\n## [0.1.0] - unreleased\n\n### Added\n\n- All.\n", True),
        ("## 0.1.0\n- All.\n## 0.0.9\n", True),
        ("## [0.1.0]\n\n## [0.0.9]\n- Some.\n", False),
        ("## [0.1.01]\n- Some.\n", False),
    ],
)
def test_planted_changelogs(changelog: str, found: bool) -> None:
    assert has_changelog_entry("0.1.0", changelog) == found


# The tools.


def run_tool(tool: str, *arguments: str, root: Path) -> None:
    """Run ``python -m tool`` in ``root``; fail with its output on a complaint, skip where it is not installed."""
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed; it comes with: pip install -e '.[test]'")
    command = [sys.executable, "-m", tool, *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command[1:])}\n{done.stdout}{done.stderr}", pytrace=False)


def test_ruff_finds_nothing(root: Path) -> None:
    run_tool("ruff", "check", "--quiet", "--output-format=concise", ".", root=root)


def test_ruff_would_format_nothing_otherwise(root: Path) -> None:
    run_tool("ruff", "format", "--check", "--quiet", ".", root=root)


def test_mypy_finds_nothing(
    root: Path, project_files: tuple[Path, ...], pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """Types hold under mypy's strict rules.

    mypy must find the package by its name, and the root folder may have any; so it is shown a folder ``kvsan`` of links
    to the root's modules and folders. It lies in pytest's cache, because mypy's own cache is bound to its path.
    """
    cache = getattr(pytestconfig, "cache", None)
    folder = cache.mkdir("mypy") if cache else tmp_path
    package = folder / "kvsan"
    package.mkdir(exist_ok=True)
    parts = {file.parts[0] for file in project_files if file.suffix == ".py" and file.parts[0] not in NOT_PACKAGES}
    for link in package.iterdir():
        link.unlink()
    for name in sorted(parts):
        (package / name).symlink_to(root / name)
    options = ["--config-file", str(root / "pyproject.toml"), "--cache-dir", str(folder / "cache")]
    run_tool("mypy", *options, "-p", "kvsan", root=folder)
