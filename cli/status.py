"""Exit statuses."""

from __future__ import annotations

from typing import Final

CLEAN: Final = 0
WRONG: Final = 1
"""Findings, or a refused spec."""
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130
