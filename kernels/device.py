"""``Device``: where a replay takes its memory and runs its kernels, a CUDA GPU through CuPy or the host through NumPy.

Triton decides at the decoration of a kernel whether it compiles or interprets, by the environment variable
``TRITON_INTERPRET``. So the two kinds of device need two processes, and ``open_device`` settles which one this is.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..model.errors import SpecError, shown

DeviceKind = Literal["cpu", "cuda"]
EXTRAS: Final = {
    "torch": "pip install 'kvsan[kernels]'",
    "triton": "pip install 'kvsan[kernels]' (Linux)",
    "cupy": "pip install 'kvsan[gpu]', or 'kvsan[gpu-cuda13]' for CUDA 13",
}
_KERNELS: Final = f"{__package__}.probe.triton_kernels"


class RawMemory(Protocol):
    """Bytes somewhere: where they begin, how many there are, and what keeps them alive."""

    address: int
    size_bytes: int


class Device(Protocol):
    """Memory and launches of one kind of device.

    ``block_words`` and ``short_block_words`` are the words of a tile of long and of short items.
    """

    kind: DeviceKind
    name: str
    block_words: int
    short_block_words: int
    fold_block_words: int
    warps: int

    def allocate(self, size_bytes: int) -> RawMemory:
        """Return memory of unspecified content, its address a multiple of 256. Raises ``MemoryError``."""
        ...

    def allocate_host(self, size_bytes: int) -> RawMemory:
        """Return memory of the host that kernels reach at its address: pinned where the device is a GPU."""
        ...

    def upload(self, values: NDArray[Any]) -> Any:
        """Return a torch tensor on the device with the same values."""
        ...

    def download(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return a copy of the bytes at ``address``."""
        ...

    def download_many(self, places: list[tuple[int, int]]) -> list[NDArray[np.uint8]]:
        """Return copies of the bytes at several (address, bytes), waiting once."""
        ...

    def borrow(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return host memory at ``address`` as it is, without a copy; the host device alone can."""
        ...

    def write(self, address: int, values: NDArray[np.uint8]) -> None:
        """Copy ``values`` to ``address``."""
        ...

    def words(self, memory: RawMemory, width: int) -> Any:
        """Return ``memory`` as a torch tensor of integers of ``width`` bytes that shares its bytes, through DLPack.

        A last piece shorter than ``width`` is left out.
        """
        ...

    def synchronize(self) -> None:
        """Wait until everything that was launched is done."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes that can still be allocated."""
        ...


def open_device(kind: str) -> Device:
    """Return the device, or raise ``SpecError`` in one line that names what is missing and what to install."""
    if kind not in ("cpu", "cuda"):
        raise SpecError("device", f"found {shown(kind)}, needs cpu or cuda")
    for package in ("torch", "triton", *(("cupy",) if kind == "cuda" else ())):
        if importlib.util.find_spec(package) is None:
            raise SpecError("device", f"{kind} needs the package {package}, which is not installed: {EXTRAS[package]}")
    interpreted = kind == "cpu"
    if _KERNELS in sys.modules and interpreted != sys.modules[_KERNELS].INTERPRETED:
        raise SpecError(
            "device",
            f"found {kind} after a replay on {'cuda' if interpreted else 'cpu'} in the same process, "
            "needs a process of its own",
        )
    os.environ["TRITON_INTERPRET"] = "1" if interpreted else "0"
    if interpreted != _library_interpreted():
        how = "without" if interpreted else "with"
        raise SpecError(
            "device",
            f"found Triton imported {how} TRITON_INTERPRET=1 before {kind} was opened, "
            "needs the device to be opened first, or a process of its own",
        )
    if interpreted:
        require_interpreter(importlib.import_module("triton").__version__, np.__version__)
    module = importlib.import_module(f".memory_{kind}", __package__)
    device: Device = module.open_device()
    importlib.import_module(_KERNELS)
    return device


def require_interpreter(triton_version: str, numpy_version: str) -> None:
    """Raise ``SpecError`` for versions that do not go together: seen with 3.6 and 2.4, in every loop of a kernel."""
    if _release(triton_version) < (3, 7) and _release(numpy_version) >= (2, 4):
        found = f"found triton {triton_version} with numpy {numpy_version}, which its interpreter cannot run with"
        raise SpecError("device", f"{found}: pip install 'triton>=3.7', or 'numpy<2.4'")


def _release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) for one that has other words there."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def _library_interpreted() -> bool:
    """Say whether Triton's own functions, decorated when it was imported, are interpreted."""
    standard = importlib.import_module("triton.language.standard")
    compiled = importlib.import_module("triton.runtime.jit").JITFunction
    return not isinstance(standard.cdiv, compiled)
