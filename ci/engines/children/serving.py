"""The process that has an engine loaded: one JSON document in, one out, until the input ends.

Run by the interpreter of the engine's own environment: ``python serving.py MODULE``, where MODULE lies in this folder
or on the path and has ``load()``, which returns an engine with a ``greeting`` (its name and version) and an ``answer``
for each request. The greeting is the first line out. Whatever the engine raises is an answer: its type and message.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time


def main() -> None:
    """Load the engine, say so, and answer until the input ends."""
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder or ".") != here]
    sys.path.append(here)  # last: an engine's own modules come first
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the engine prints goes to the standard error
    engine = importlib.import_module(sys.argv[1]).load()
    answers.write(json.dumps(engine.greeting) + "\n")
    answers.flush()
    for line in sys.stdin:
        started = time.perf_counter()
        try:
            answer = engine.answer(json.loads(line))
        except Exception as error:  # the engine may raise anything; what it raised is what was asked for
            answer = {"error": type(error).__name__, "message": " ".join(str(error).split())[:500]}
        answer["seconds"] = time.perf_counter() - started
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
