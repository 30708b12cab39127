"""Which kernels can be asked for, in a module that imports no torch."""

from __future__ import annotations

from typing import Final

KERNELS: Final = ("attention", "skip-softmax", "sparse", "state", "quantize")
"""What ``--kernels`` takes beside ``all``."""
