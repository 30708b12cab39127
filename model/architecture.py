"""What a model's files say about its caches, before anybody decides how to deploy it."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from .formats import ElementFormat
from .layers import Layer

SparseAlgorithm: TypeAlias = Literal["qsa", "dsa", "minimax_m3", "deepseek_v4", "glm_kpool", "rocket", "skip_softmax"]
SPARSE_ALGORITHMS: Final = ("qsa", "dsa", "minimax_m3", "deepseek_v4", "glm_kpool", "rocket", "skip_softmax")


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """The cached layers of a model and the formats that its files ask for.

    ``layers`` are in model order, ``draft_layers`` those of its multi-token-prediction or draft head. A format of
    None means
    that the files do not say. ``inferred`` lists, one sentence each, whatever was concluded rather than read.
    """

    name: str
    layers: tuple[Layer, ...]
    draft_layers: tuple[Layer, ...] = ()
    model_format: ElementFormat | None = None
    state_format: ElementFormat | None = None
    sparse_algorithm: SparseAlgorithm | None = None
    max_sequence_tokens: int | None = None
    inferred: tuple[str, ...] = ()
