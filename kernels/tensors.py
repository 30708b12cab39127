"""torch's names for the storage containers of a page."""

from __future__ import annotations

import torch

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Signed integers by width in bytes."""


def integers_of(memory: torch.Tensor, width: int) -> torch.Tensor:
    """Return bytes as integers of ``width`` bytes that share them; a last piece shorter than that is left out."""
    return memory[: memory.numel() - memory.numel() % width].view(INTEGERS[width])
