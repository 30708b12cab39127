"""From a model's Hugging Face ``config.json`` to its ``Architecture``.

    >>> from kvsan.model.huggingface import read_architecture
    >>> read_architecture("examples/qwen3.8-flash-next").sparse_algorithm  # doctest: +SKIP
    'qsa'

Both spellings of a config load: the one published with the model (``torch_dtype``, ``hybrid_override_pattern``, ...)
and the one that transformers writes today (``dtype``, ``layer_types``, ...). transformers itself is never imported.
Nothing is guessed in silence: a conclusion is a sentence in ``Architecture.inferred``, and a field that is known to
change the cache in a way that is not understood is refused by name. All bad input is a ``SpecError`` of one line.
"""

from __future__ import annotations

import os
from typing import Any

from ..architecture import Architecture
from ..errors import SpecError
from .families import architecture_of
from .reading import read_config

__all__ = ["read_architecture"]


def read_architecture(source: str | os.PathLike[Any] | dict[str, Any]) -> Architecture:
    """Return the cached layers that ``source`` describes: a ``config.json``, its folder, or the decoded config.

    Raises ``SpecError`` naming the field, what was found, what is needed and (when there is one) the file.
    """
    config, file = read_config(source)
    try:
        return architecture_of(config)
    except SpecError as error:
        if not file:
            raise
        raise SpecError(error.field, f"{error.problem} (in {file})") from None
