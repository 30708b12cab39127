"""The process that has an engine loaded: one JSON document in, one out, until the input ends.

Run by the interpreter of the engine's own environment: ``python serving.py MODULE``, where MODULE lies in this folder
or on the path and has ``load()``, which returns an engine with a ``greeting`` (its name and version) and an ``answer``
for each request. The greeting is the first line out. Whatever the engine raises is an answer: its type and message.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def coding() -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Return what writes and reads JSON: msgspec where the engine's environment has it, which is ten times as fast."""
    try:
        import msgspec
    except ImportError:
        return (lambda document: json.dumps(document).encode()), json.loads
    return msgspec.json.encode, msgspec.json.decode


def main() -> None:
    """Load the engine, say so, and answer until the input ends."""
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder or ".") != here]
    sys.path.append(here)  # last: an engine's own modules come first
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the engine prints goes to the standard error
    engine = importlib.import_module(sys.argv[1]).load()
    encode, decode = coding()
    gc.collect()
    gc.freeze()  # what an engine imports stays: half of the time of an answer would go into looking it over again
    answers.write(encode(engine.greeting) + b"\n")
    answers.flush()
    for line in sys.stdin.buffer:
        started = time.perf_counter()
        try:
            answer = engine.answer(decode(line))
        except Exception as error:  # the engine may raise anything; what it raised is what was asked for
            answer = {"error": type(error).__name__, "message": " ".join(str(error).split())[:500]}
        answer["seconds"] = time.perf_counter() - started
        answers.write(encode(answer) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
