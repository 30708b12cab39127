"""The cache managers that may be held: which version they are, what they store, which allocator lays them out."""

from __future__ import annotations

from typing import Final

import msgspec

from .inputs import SelectionInputs


class Manager(msgspec.Struct, frozen=True):
    """A cache manager. ``roles`` are those it has buffers for beside K, V and their block scales.

    ``allocator`` is the one of ours that lays it out, empty where none does.
    """

    name: str
    kind: str
    roles: tuple[str, ...] = ()
    allocator: str = ""


_STATES: Final = ("ssm_state", "conv_state")

MANAGERS: Final[dict[str, Manager]] = {
    manager.name: manager
    for manager in (
        Manager("v1", "v1", (), "trtllm-v1"),
        Manager("v2", "v2", (), "trtllm-v2"),
        Manager("v1-dsa", "v1", ("index_key",), "trtllm-v1"),
        Manager("v2-dsa", "v2", ("index_key",), "trtllm-v2"),
        Manager("v1-rocket", "v1", ("kt_cache",)),
        Manager("v2-deepseek-v4", "v2", ("compressor", "indexer", "sliding")),
        Manager("v2-minimax-m3", "v2", ("index_key",)),
        Manager("v2-hybrid", "v2", _STATES, "trtllm-v2"),
        Manager("v2-hybrid-qsa", "v2", ("index_key", "qsa_index_position", *_STATES), "trtllm-v2-qsa-packed"),
        Manager("v2-hybrid-glm-kpool", "v2", ("index_key", *_STATES)),
        Manager("v1-hybrid-cpp", "v1", _STATES, "trtllm-v1"),
        Manager("v1-hybrid-python", "v1", _STATES),
    )
}
"""All managers by name; the name starts with the kind."""

_SPARSE_ROLES: Final[dict[str, tuple[str, ...]]] = {
    "none": (),
    "skip_softmax": (),
    "dsa": ("index_key",),
    "deepseek_v4": ("compressor", "indexer", "sliding"),
    "minimax_m3": ("index_key",),
    "qsa": ("index_key", "qsa_index_position"),
    "rocket": ("kt_cache",),
    "glm_kpool": ("index_key",),
}


def needed_roles(inputs: SelectionInputs) -> tuple[str, ...]:
    """Return the roles that the model stores beside K, V and block scales."""
    return _SPARSE_ROLES[inputs.sparse] + (_STATES if inputs.hybrid == "some" else ())
