"""Allocators by name, and ``allocate``: from a spec to a layout.

Names resolve lazily: asking for one allocator imports that one. A name is one of the shipped ones,
``module:function`` for anybody's own
(given by the user, never taken from a file), or a name in the entry-point group ``kvsan.allocators``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

import msgspec

from ..model.errors import SpecError, shown
from ..model.layers import INDEX_POSITION, paged_part
from ..model.spec import CacheSpec, one_line
from .allocators.faulty import FAULTY
from .foreign import require_allocator
from .layout import Layout
from .rejection import Rejected

Allocator: TypeAlias = Callable[[CacheSpec], Layout]
ENTRY_POINT_GROUP: Final = "kvsan.allocators"


class AllocatorEntry(msgspec.Struct, frozen=True):
    """A row of the table: ``target`` is ``module:function`` below this package; ``kind`` is ``engine`` (a model),
    ``installed`` (an engine's own code, in a process of its own), ``fault`` or ``plugin``."""

    name: str
    summary: str
    kind: str
    target: str


_OURS: Final = "kvsan."
"""How the modules of the shipped allocators begin."""

_TRTLLM = "kvsan.sim.allocators.trtllm.allocators"
_VLLM = "kvsan.sim.allocators.vllm.allocators"
_SGLANG = "kvsan.sim.allocators.sglang.allocators"
_INSTALLED_VLLM = "kvsan.ci.engines.vllm"
_INSTALLED_SGLANG = "kvsan.ci.engines.sglang"

ALLOCATORS: Final = (
    AllocatorEntry(
        "trtllm-v1",
        "TensorRT-LLM KVCacheManager: a pool per window and KV head count, recurrent states layer by layer",
        "engine",
        f"{_TRTLLM}:allocate_v1",
    ),
    AllocatorEntry(
        "trtllm-v2",
        "TensorRT-LLM KVCacheManagerV2: buffers of one size share a pool, life cycles of equal slots share a group",
        "engine",
        f"{_TRTLLM}:allocate_dense",
    ),
    AllocatorEntry(
        "trtllm-v2-qsa-legacy",
        "the V2 QSA manager before packing: every side plane is a buffer of its own",
        "engine",
        f"{_TRTLLM}:allocate_qsa_legacy",
    ),
    AllocatorEntry(
        "trtllm-v2-qsa-packed",
        "the V2 QSA manager that packs side planes when one could match a K, V or scale page for any head count",
        "engine",
        f"{_TRTLLM}:allocate_qsa_packed",
    ),
    AllocatorEntry(
        "trtllm-v2-qsa-packed-rank-local",
        "the packed QSA manager with the match asked for this rank's head count alone",
        "engine",
        f"{_TRTLLM}:allocate_qsa_packed_rank_local",
    ),
    AllocatorEntry(
        "vllm-e1",
        "vLLM up to 0.19: a tensor per place in a group, shared by one layer of each group, all K before all V",
        "engine",
        f"{_VLLM}:allocate_e1",
    ),
    AllocatorEntry(
        "vllm-e2",
        "vLLM 0.25: as e1, block by block",
        "engine",
        f"{_VLLM}:allocate_e2",
    ),
    AllocatorEntry(
        "vllm-e2-packed",
        "vLLM 0.25, packed: one allocation whose blocks hold the pages of all places",
        "engine",
        f"{_VLLM}:allocate_e2_packed",
    ),
    AllocatorEntry(
        "vllm-e3",
        "vLLM 0.33: one allocation that all groups overlay, layers outermost, K and V side by side",
        "engine",
        f"{_VLLM}:allocate_e3",
    ),
    AllocatorEntry(
        "vllm-e3-block-outermost",
        "vLLM 0.33 with blocks outermost: a block is one run of bytes",
        "engine",
        f"{_VLLM}:allocate_e3_block_outermost",
    ),
    AllocatorEntry(
        "sglang",
        "SGLang 0.5: a buffer per layer and role over token slots, states layer by layer, a pool for windowed layers",
        "engine",
        f"{_SGLANG}:allocate_sglang",
    ),
    AllocatorEntry(
        "sglang-envelope",
        "SGLang 0.5 with enveloped states: one entry holds all states of a request",
        "engine",
        f"{_SGLANG}:allocate_envelope",
    ),
    AllocatorEntry(
        "sglang-speculative",
        "SGLang 0.5 with draft tokens: states after each of three, with convolution windows that overlap",
        "engine",
        f"{_SGLANG}:allocate_speculative",
    ),
    AllocatorEntry(
        "sglang-unified",
        "SGLang 0.5 with one buffer: tokens of all layers from its low end up, states from its high end down",
        "engine",
        f"{_SGLANG}:allocate_unified",
    ),
    AllocatorEntry(
        "vllm",
        "the installed vLLM's own planner and views, layers outermost",
        "installed",
        f"{_INSTALLED_VLLM}:allocate_vllm",
    ),
    AllocatorEntry(
        "vllm-block-outermost",
        "the installed vLLM's own planner and views, blocks outermost",
        "installed",
        f"{_INSTALLED_VLLM}:allocate_block_outermost",
    ),
    AllocatorEntry(
        "vllm-lhbnc",
        "the installed vLLM's own planner and views, pages scattered by heads over a layer",
        "installed",
        f"{_INSTALLED_VLLM}:allocate_lhbnc",
    ),
    AllocatorEntry(
        "vllm-bhlnc",
        "the installed vLLM's own planner and views, pages scattered by heads over a block",
        "installed",
        f"{_INSTALLED_VLLM}:allocate_bhlnc",
    ),
    AllocatorEntry(
        "vllm-kernel-blocks",
        "the installed vLLM's own planner and views, blocks seen by kernels as blocks of 16 tokens",
        "installed",
        f"{_INSTALLED_VLLM}:allocate_kernel_blocks",
    ),
    AllocatorEntry(
        "sglang-engine",
        "the installed SGLang's own pools, states layer by layer",
        "installed",
        f"{_INSTALLED_SGLANG}:allocate_sglang",
    ),
    AllocatorEntry(
        "sglang-engine-envelope",
        "the installed SGLang's own pools, states of a request in one entry",
        "installed",
        f"{_INSTALLED_SGLANG}:allocate_envelope",
    ),
    AllocatorEntry(
        "sglang-engine-speculative",
        "the installed SGLang's own pools, with states after each of three draft tokens",
        "installed",
        f"{_INSTALLED_SGLANG}:allocate_speculative",
    ),
    AllocatorEntry(
        "sglang-engine-unified",
        "the installed SGLang's own unified buffer, tokens and states from its two ends",
        "installed",
        f"{_INSTALLED_SGLANG}:allocate_unified",
    ),
    *[AllocatorEntry(fault.name, fault.summary, "fault", fault.target) for fault in FAULTY],
)


def resolve(name: str) -> Allocator:
    """Return the allocator called ``name``, without calling it.

    ``module:function`` imports the module: pass only names that a user gave. Raises ``SpecError`` listing the known
    names, or saying why it cannot be loaded or is no allocator (``foreign``), or how to get an engine that is not
    installed.
    """
    for entry in ALLOCATORS:
        if entry.name == name:
            function = _import(entry.target)
            if entry.kind == "installed":
                cast(Any, function).ready()
            return function
    if name.startswith("fault:"):
        faults = ", ".join(entry.name for entry in ALLOCATORS if entry.kind == "fault")
        raise SpecError("allocator", f"unknown allocator {shown(name)}, needs one of {faults}")
    if ":" in name:
        return _import_foreign(name, name)
    for plugin in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if plugin.name == name:
            return _import_foreign(plugin.value, name)
    raise SpecError("allocator", f"unknown allocator {shown(name)}, needs one of {_known()}, or module:function")


def is_shipped(name: str) -> bool:
    """Say whether ``name`` is one of the table's: an engine's allocator, or a fault of one."""
    return any(entry.name == name for entry in ALLOCATORS)


def is_installed(name: str) -> bool:
    """Say whether ``name`` stands for an engine's own code."""
    return any(entry.name == name and entry.kind == "installed" for entry in ALLOCATORS)


def is_foreign(name: str) -> bool:
    """Say, without importing anything, whether ``name`` is somebody else's code: ``module:function`` or a plugin."""
    if is_shipped(name) or name.startswith("fault:"):
        return False
    return ":" in name or any(
        plugin.name == name for plugin in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    )


def _known() -> str:
    """Return the names for an error message; of an installed engine's variants the first stands for all."""
    models = [entry.name for entry in ALLOCATORS if entry.kind == "engine"]
    installed = dict.fromkeys(entry.target.partition(":")[0] for entry in ALLOCATORS if entry.kind == "installed")
    first = [next(entry.name for entry in ALLOCATORS if entry.target.startswith(f"{one}:")) for one in installed]
    return ", ".join([*models, *first, "fault:NAME"])


def _import(target: str) -> Allocator:
    module_name, _, function_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may fail in any way while it loads
        raise SpecError(
            "allocator", f"cannot import {shown(module_name)}: {type(error).__name__}: {message_of(error)}"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise SpecError("allocator", f"module {module_name} has no function {shown(function_name)}")
    return cast(Allocator, function)


def _import_foreign(target: str, name: str) -> Allocator:
    function = _import(target)
    require_allocator(function, name)
    return function


def default_allocator(spec: CacheSpec) -> str:
    """Return the allocator that a spec is checked with when none is named: packed for QSA models, else plain V2."""
    if spec.sparse_algorithm == "qsa":
        return "trtllm-v2-qsa-packed"
    planes = (plane for layer in map(paged_part, spec.layers) if layer is not None for plane in layer.side_planes)
    return "trtllm-v2-qsa-packed" if any(plane.role == INDEX_POSITION for plane in planes) else "trtllm-v2"


def allocate(spec: CacheSpec, allocator: str | Allocator | None = None) -> Layout:
    """Return the layout that ``allocator`` (a name, a function, or None for the default) gives ``spec``.

    The layout is judged against ``spec``: one that names no spec is given it, and one of another spec is refused.
    Raises ``Rejected`` for a refusal. Any other exception (those of native code and test tools too, which are no
    ``Exception``) explains nothing to the user of an engine and becomes a ``Rejected`` of rule
    ``unexplained-rejection``. Raises ``SpecError`` for an answer that is no layout of ``spec``.
    """
    function = resolve(allocator or default_allocator(spec)) if not callable(allocator) else allocator
    try:
        layout = function(spec)
    except (Rejected, SpecError, KeyboardInterrupt):
        raise
    except BaseException as error:
        text = message_of(error)
        raise Rejected(
            f"the allocator refused with {type(error).__name__}" + (f": {text}" if text else " and no message"),
            "let the allocator raise kvsan.Rejected with the cause and the way out",
            rule="unexplained-rejection",
        ) from error
    if not isinstance(layout, Layout):
        raise SpecError("allocator", f"returned {shown(layout)}, needs a kvsan.Layout")
    if not str(getattr(function, "__module__", "")).startswith(_OURS):
        _check_answer(layout)
    if layout.spec is None:
        return msgspec.structs.replace(layout, spec=spec)
    if layout.spec is not spec and layout.spec != spec:
        raise SpecError("allocator", "returned a layout of another spec, needs one of the spec that it was given")
    return layout


def _check_answer(layout: Layout) -> None:
    """Refuse a layout with values of the wrong type, which only somebody else's allocator answers with."""
    from .values import check_values

    try:
        check_values(layout)
    except SpecError as error:
        raise SpecError("allocator", f"returned a layout that cannot be checked: {error}") from None


def message_of(error: BaseException) -> str:
    """Return an exception's text on one line, empty where it has none or cannot say it."""
    try:
        return one_line(str(error))
    except Exception:
        return ""
