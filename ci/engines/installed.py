"""An installed engine: which interpreter has it, its one warm process, and what its errors mean.

``KVSAN_VLLM_PYTHON`` names the interpreter of vLLM's environment, ``KVSAN_SGLANG_PYTHON`` that of SGLang's; without it,
the one that runs kvsan is asked,
if it has the engine. Nothing of the engine is ever imported here.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec

from ...model.errors import SpecError, shown_path
from ...sim.rejection import Rejected
from .supervisor import EngineEnded, EngineProcess

SERVING = Path(__file__).with_name("children") / "serving.py"


class Installed(msgspec.Struct, frozen=True):
    """How an engine is found and started: ``package`` is what it is imported as, ``module`` what drives it in its
    process, ``recipe`` the script of this repository that installs it, ``explains`` the errors that refuse a spec where
    they have a message."""

    name: str
    package: str
    variable: str
    module: str
    recipe: str
    explains: tuple[str, ...] = ("ValueError", "NotImplementedError")


VLLM = Installed("vLLM", "vllm", "KVSAN_VLLM_PYTHON", "vllm_engine", ".ci/engine-vllm")
SGLANG = Installed(
    "SGLang",
    "sglang",
    "KVSAN_SGLANG_PYTHON",
    "sglang_engine",
    ".ci/engine-sglang",
    explains=(*VLLM.explains, "AssertionError"),  # its pools refuse by assertions, in words
)


def python_of(engine: Installed) -> str:
    """Return the interpreter that has ``engine``; raise ``SpecError`` saying how to get it where none is known."""
    named = os.environ.get(engine.variable)
    if named:
        return _program(engine.variable, named)
    if importlib.util.find_spec(engine.package) is None:
        raise SpecError(
            "engine",
            f"{engine.name} is not installed beside kvsan: {engine.recipe} installs it into an environment of its own; "
            f"set {engine.variable} to the python of one",
        )
    return sys.executable


@functools.cache
def _program(variable: str, named: str) -> str:
    """Return the program that ``variable`` names, looked for once: every question asks for it."""
    found = shutil.which(named)
    if found is None:
        raise SpecError("engine", f"{variable} names {shown_path(named)}, which is no program")
    return found


def process_for(engine: Installed, python: str) -> EngineProcess:
    """Return a process of ``engine`` by the interpreter ``python``, not yet started."""
    return EngineProcess((python, str(SERVING), engine.module))


@functools.cache
def _process(engine: Installed, python: str) -> EngineProcess:
    process = process_for(engine, python)
    atexit.register(process.close)
    return process


def warm_process(engine: Installed) -> EngineProcess:
    """Return the one process of ``engine`` in this process, started at its first question."""
    return _process(engine, python_of(engine))


def named(process: EngineProcess) -> str:
    """Return the engine's name and version as every message gives them; starts it."""
    if not process.greeting:
        process.start()
    return f"{process.greeting.get('engine', 'the engine')} {process.version}"


def ask(
    process: EngineProcess,
    request: dict[str, Any],
    expected: Rejected | None = None,
    explains: tuple[str, ...] = VLLM.explains,
) -> dict[str, Any]:
    """Return the engine's answer; raise ``Rejected`` for its refusal, its error, or the end of its process.

    ``expected`` is the refusal of its model, if any: what both refuse is no fault, unless the engine explains nothing.
    ``explains`` are its errors that refuse in words.
    """
    engine = named(process)
    try:
        answer = process.ask(request)
    except EngineEnded as end:
        raise Rejected(
            f"{engine}: {end}", "report the saved case to the engine", rule="unexplained-rejection"
        ) from None
    if "error" in answer:
        raise refusal_of(answer, engine, expected, explains)
    return answer


def refusal_of(
    answer: dict[str, object],
    engine: str,
    expected: Rejected | None = None,
    explains: tuple[str, ...] = VLLM.explains,
) -> Rejected:
    """Return what the engine raised as a refusal: no memory is no fault, an error without words explains nothing."""
    kind, message = str(answer["error"]), str(answer.get("message", ""))
    if kind == "ValueError" and "memory" in message:
        return Rejected(f"{engine}: {message}", "give a larger quota", supported=False)
    explained = kind in explains and bool(message)
    return Rejected(
        f"{engine} raised {kind}" + (f": {message}" if message else " and no message"),
        "report the saved case to the engine" if expected is None else expected.remedy,
        rule="rejected" if explained else "unexplained-rejection",
        supported=expected is None,
    )
