"""The one table of the faults that kvsan ships: what each breaks, its smallest case, and where it happened.

    >>> fault = fault_named("fault:heads-floor")
    >>> fault.rules, fault.base, fault.size
    (('head-map',), 'trtllm-v2', 3)
    >>> [(layer.kv_heads, fault.minimum.parallel.name) for layer in fault.minimum.layers]
    [(3, 'tp2')]

A minimum is the simplest spec (``simplicity``) on which the fault's rule fires, found by exhaustive enumeration
(``minima``) and kept here as the JSON text of a spec, defaults left out.
"""

from __future__ import annotations

import json
from typing import Final, Literal

import msgspec

from ..model.errors import SpecError, shown
from ..model.spec import CacheSpec, decode_spec
from ..sim.allocators.faulty import base_of
from ..sim.cache.names import layout_allocator
from ..sim.cache.trace import Trace
from ..sim.checking import check
from ..sim.registry import Allocator, allocate, resolve
from ..sim.rejection import Rejected
from ..sim.rules import RULES
from ..sim.verdict import judge
from .selection_faults import SELECTION_FAULTS, SelectionFault
from .simplicity import size
from .transfer_faults import TRANSFER_FAULTS, TransferFault

_TRTLLM: Final = "https://github.com/NVIDIA/TensorRT-LLM"
_VLLM: Final = "https://github.com/vllm-project/vllm"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One faulty allocator, or one faulty running cache (``kind`` is ``trace``, and its minimum is one).

    ``rules`` must fire: all of them, or any one where ``needs`` is ``any``; ``follow`` are further rules that may fire
    with them. ``minimum_json`` is the simplest spec on which ``rules`` fire, ``source`` where the fault happened,
    ``code`` its number among the published ones (empty for planted mutations), and ``cause`` one line.
    """

    name: str
    kind: Literal["layout", "trace"] = "layout"
    code: str = ""
    rules: tuple[str, ...]
    needs: Literal["all", "any"] = "all"
    follow: tuple[str, ...] = ()
    cause: str
    source: str
    minimum_json: bytes

    @property
    def base(self) -> str:
        """The sound allocator that it varies, or whose layout and rules it runs."""
        return layout_allocator(self.name) if self.kind == "trace" else base_of(self.name)

    @property
    def minimum(self) -> CacheSpec:
        """The simplest spec on which the fault's rules fire."""
        return decode_spec(self.minimum_json)

    @property
    def size(self) -> int:
        """Layers plus buffers of the minimum, operations where it is a trace."""
        return len(self.trace.operations) if self.kind == "trace" else size(self.minimum)

    @property
    def trace(self) -> Trace:
        """The simplest trace on which the fault's rules fire, of a fault of kind ``trace``."""
        return msgspec.json.decode(self.minimum_json, type=Trace)


def _spec(fields: str) -> bytes:
    """Return the JSON text of a spec of one token per block; ``fields`` are those that differ from the defaults."""
    return f'{{"kvsan":"spec","tokens_per_block":1,{fields}}}'.encode()


_ATTENTION: Final = '{"kind":"attention","kv_heads":1,"head_dim":128}'
_LATENT: Final = '{"kind":"latent","latent_dim":128}'
_INDEX: Final = '{"role":"index_key","dim":128,"format":"bf16"}'
_POSITION: Final = '{"role":"qsa_index_position","dim":128,"format":"bf16"}'


def _sparse(*planes: str) -> str:
    return f'{{"kind":"attention","kv_heads":1,"head_dim":128,"side_planes":[{",".join(planes)}]}}'


def _trace(layers: str, operations: str, *, tokens: int = 1, slots: int = 1) -> bytes:
    """Return the JSON text of a trace; an operation is a name and its arguments, those left out 0."""
    spec = f'{{"kvsan":"spec","tokens_per_block":{tokens},"slots":{slots},"layers":[{layers}]}}'
    listed = [[kind, *map(int, arguments)] for kind, *arguments in map(str.split, operations.split(";"))]
    return f'{{"kvsan":"trace","spec":{spec},"operations":{json.dumps(listed)}}}'.encode()


_LATENT_WINDOW: Final = '{"kind":"latent","latent_dim":128,"window":%d}'
_CONVOLUTION: Final = '{"kind":"recurrent","algorithm":"short_conv","heads":1,"conv_kernel":%d}'
_SCALED: Final = '{"kind":"attention","kv_heads":1,"head_dim":128,"kv_format":"nvfp4"}'

FAULTS: Final[tuple[Fault, ...]] = (
    Fault(
        name="fault:canary",
        rules=("alias",),
        follow=("adjacency", "op-address"),
        cause="every V page lies on its K page",
        source="planted: the campaign that does not find it is broken itself",
        minimum_json=_spec(f'"slots":1,"layers":[{_ATTENTION}]'),
    ),
    Fault(
        name="fault:coalesce-by-size",
        code="D1",
        rules=("index-scale",),
        follow=("op-address", "alias", "bounds", "stride"),
        cause="an index page as large as a K page joins the K/V pool, and the mapping offset is rounded down",
        source=f"{_TRTLLM}/pull/20904",
        minimum_json=_spec(f'"slots":1,"layers":[{_sparse(_INDEX)},{_ATTENTION}]'),
    ),
    Fault(
        name="fault:bare-assert",
        code="D1",
        rules=("unexplained-rejection",),
        cause="the same collision is noticed by an assertion that names nothing",
        source=f"{_TRTLLM}/pull/20904",
        minimum_json=_spec(f'"slots":1,"layers":[{_sparse(_INDEX)},{_ATTENTION}]'),
    ),
    Fault(
        name="fault:dense-plane-pitch",
        code="D3",
        rules=("stride",),
        follow=("op-address", "alias"),
        cause="a view steps from slot to slot by one K page, although K and V of all layers interleave",
        source=f"{_VLLM}/pull/37228",
        minimum_json=_spec(f'"slots":2,"layers":[{_ATTENTION}]'),
    ),
    Fault(
        name="fault:v-is-k-plus-one",
        code="D5",
        rules=("sentinel",),
        cause="the V index of a missing page is the invalid K index -1 plus one: page 0",
        source=f"{_TRTLLM}/pull/10659, {_TRTLLM}/pull/12188",
        minimum_json=_spec(f'"slots":1,"layers":[{_ATTENTION}]'),
    ),
    Fault(
        name="fault:block-size-from-dim1",
        code="D11",
        rules=("record-layout",),
        cause="a 4-bit kernel takes axis 1 for the block size; in a head-major page that is the head count",
        source=f"{_VLLM}/issues/49012, {_VLLM}/pull/53681",
        minimum_json=_spec('"slots":1,"kv_format":"nvfp4","layers":[{"kind":"attention","kv_heads":4,"head_dim":128}]'),
    ),
    Fault(
        name="fault:drop-role-from-plane",
        rules=("bounds",),
        follow=("budget", "alias"),
        cause="the packed page is sized without its last role, whose view then runs into the next slot",
        source="planted: a role dropped from the packed plane",
        minimum_json=_spec(f'"slots":1,"layers":[{_sparse(_INDEX, _POSITION)}]'),
    ),
    Fault(
        name="fault:layer-ordinal-off-by-one",
        rules=("index-scale",),
        follow=("op-address", "bounds", "alias"),
        cause="mapping offsets count the layers from one, so every layer reads its successor",
        source="planted: off by one in the layer ordinal",
        minimum_json=_spec(f'"slots":1,"layers":[{_LATENT}]'),
    ),
    Fault(
        name="fault:swap-kv-lanes",
        rules=("op-address",),
        follow=("alias",),
        cause="the attention op takes K where V is and V where K is",
        source="planted: K and V lanes swapped",
        minimum_json=_spec(f'"slots":1,"layers":[{_ATTENTION}]'),
    ),
    Fault(
        name="fault:scale-is-pairs",
        rules=("index-scale",),
        follow=("op-address", "stride", "alias"),
        cause="the index scale counts K/V pairs per slot, and indices are multiplied by pages",
        source="planted: scale in pairs instead of pages",
        minimum_json=_spec(f'"slots":1,"layers":[{_ATTENTION}]'),
    ),
    Fault(
        name="fault:ledger-tokens",
        rules=("op-address",),
        follow=("index-scale", "record-layout", "bounds", "adjacency", "alias", "stride"),
        cause="under context parallelism the op sizes a page by the ledger's tokens, cp times the physical ones",
        source="planted: ledger tokens instead of physical tokens",
        minimum_json=_spec(f'"slots":1,"parallel":{{"cp":2}},"layers":[{_LATENT}]'),
    ),
    Fault(
        name="fault:heads-floor",
        rules=("head-map",),
        cause="KV heads per rank are rounded down, so the last heads are on no rank",
        source="planted: floor instead of ceiling",
        minimum_json=_spec('"slots":1,"parallel":{"tp":2},"layers":[{"kind":"attention","kv_heads":3,"head_dim":128}]'),
    ),
    Fault(
        name="fault:scale-pool-uses-data-scale",
        rules=("index-scale",),
        follow=("op-address", "adjacency", "bounds", "stride", "alias"),
        cause="the scale pool is walked in units of data pages, eight times its own",
        source="planted: the scale pool with the data pool's scale",
        minimum_json=_spec(f'"slots":1,"kv_format":"nvfp4","layers":[{_LATENT}]'),
    ),
    Fault(
        name="fault:v-offset-from-k-only",
        rules=("adjacency",),
        follow=("op-address", "alias"),
        cause="the distance from K to V is that of a K-only cache: 0 pages, so V is K",
        source="planted: V offset from a K-only layer",
        minimum_json=_spec(f'"slots":1,"layers":[{_ATTENTION}]'),
    ),
    Fault(
        name="fault:global-id-for-extras",
        rules=("op-address",),
        follow=("bounds", "alias"),
        cause="side planes are looked up by the layer's number in the model: wrong on every stage but the first",
        source="planted: global instead of local layer ids for extra buffers",
        minimum_json=_spec(
            f'"slots":1,"parallel":{{"pp":2}},"rank":1,"layers":[{{"kind":"uncached"}},{_sparse(_INDEX)}]'
        ),
    ),
    Fault(
        name="fault:clear-pitch-is-span",
        kind="trace",
        code="D4",
        rules=("alias",),
        cause="a fresh page is cleared at its slot number times its own size, and the slots are further apart",
        source=f"{_VLLM}/pull/50276, {_VLLM}/pull/43990",
        minimum_json=_trace(_ATTENTION, "admit 0 2", slots=2),
    ),
    Fault(
        name="fault:clear-span-is-slab",
        kind="trace",
        code="D4",
        rules=("bounds",),
        follow=("alias",),
        cause="a fresh page is cleared from its own start over a whole slot, so the last slot's clear leaves the pool",
        source=f"{_VLLM}/pull/52709",
        minimum_json=_trace(_ATTENTION, "admit 0 1"),
    ),
    Fault(
        name="fault:block-id-is-slot",
        kind="trace",
        code="D6",
        rules=("namespace",),
        follow=("bounds",),
        cause="the page table takes a block's id, and its memory went to another slot in a swap with the host",
        source=f"{_TRTLLM}/pull/13124",
        minimum_json=_trace(_LATENT, "admit 0 1;step 1;complete;free 0;offload;admit 0 1;step 1"),
    ),
    Fault(
        name="fault:copy-two-planes",
        kind="trace",
        code="D7",
        rules=("bounds", "alias"),
        needs="any",
        cause="a partial block of a K-only cache is copied with the bytes of K and V",
        source=f"{_TRTLLM}/pull/4943",
        minimum_json=_trace(_LATENT, "admit 0 2;step 1;complete;fork 0 2", tokens=3, slots=2),
    ),
    Fault(
        name="fault:free-at-output",
        kind="trace",
        code="D8",
        rules=("in-flight",),
        cause="a request's pages are handed out again while a dispatched step still writes them",
        source=f"{_VLLM}/pull/45357",
        minimum_json=_trace(_LATENT, "admit 0 1;step 1;free 0;admit 0 1"),
    ),
    Fault(
        name="fault:window-map-not-cleared",
        kind="trace",
        code="D9",
        rules=("conservation",),
        follow=("refcount",),
        cause="window pages are freed through a map from full pages, whose entries outlive the pages",
        source="https://github.com/sgl-project/sglang/pull/25805, https://github.com/sgl-project/sglang/pull/27586",
        minimum_json=_trace(f"{_LATENT},{_LATENT_WINDOW % 1}", "admit 0 1;free 0;admit 0 2;free 0", slots=4),
    ),
    Fault(
        name="fault:short-chunk-writes-source",
        kind="trace",
        code="D10",
        rules=("refcount",),
        follow=("freshness",),
        cause="a chunk shorter than the convolution window stores its state in the snapshot that it read",
        source=f"{_VLLM}/pull/56196",
        minimum_json=_trace(_CONVOLUTION % 4, "admit 0 1;step 1;complete;commit 0;admit 1 2;step 2", slots=3),
    ),
    Fault(
        name="fault:one-host-table",
        kind="trace",
        code="D12",
        rules=("in-flight",),
        follow=("freshness",),
        cause="a step's page table is filled anew while the step before, still in flight, reads it",
        source=f"{_TRTLLM}/pull/15546, {_TRTLLM}/pull/15607",
        minimum_json=_trace(_LATENT, "admit 0 2;step 1 1;step 1", slots=2),
    ),
    Fault(
        name="fault:window-end-off-by-one",
        kind="trace",
        rules=("window",),
        cause="a window's block is dropped one token before its last token is out of the window",
        source="planted: window end off by one",
        minimum_json=_trace(_LATENT_WINDOW % 2, "admit 0 2;step 1 1;step 1", slots=2),
    ),
    Fault(
        name="fault:partial-copy-forgets-scales",
        kind="trace",
        rules=("freshness",),
        cause="a partial block is copied in the data pool alone, and its block scales stay behind",
        source="planted: copy on write of one pool of the slot",
        minimum_json=_trace(_SCALED, "admit 0 1;step 1;complete;fork 0 2", tokens=2, slots=2),
    ),
    Fault(
        name="fault:key-without-lora",
        kind="trace",
        rules=("cache-key",),
        cause="the key of a published block holds its tokens, and not the adapter that they were computed under",
        source=f"{_VLLM}/pull/3263, {_VLLM}/issues/30931",
        minimum_json=_trace(_LATENT, "admit 0 1;step 1;complete;commit 0;admit 1 2 8"),
    ),
    Fault(
        name="fault:hit-not-held",
        kind="trace",
        rules=("refcount",),
        cause="a hit is counted as held after eviction made room, which may have taken it",
        source=f"{_VLLM}/pull/10507, {_VLLM}/pull/11565",
        minimum_json=_trace(_CONVOLUTION % 2, "admit 0 1;step 1;complete;commit 0;admit 1 2", slots=2),
    ),
    Fault(
        name="fault:padding-writes-slot-zero",
        kind="trace",
        rules=("sentinel",),
        follow=("freshness",),
        cause="the invalid index of a padding row is clamped to slot 0, which a request may hold",
        source="https://github.com/lightseekorg/tokenspeed/pull/700, https://github.com/sgl-project/sglang/pull/36885",
        minimum_json=_trace(_CONVOLUTION % 2, "admit 0 1;step 1 0 1", slots=2),
    ),
    Fault(
        name="fault:partial-allocation-kept",
        kind="trace",
        rules=("conservation",),
        cause="an allocation that fails half way keeps the slots that it took",
        source="https://github.com/ovg-project/kvcached/issues/364",
        minimum_json=_trace(_LATENT, "admit 0 2"),
    ),
    Fault(
        name="fault:published-before-written",
        kind="trace",
        rules=("freshness",),
        follow=("refcount", "in-flight"),
        cause="a block can be found before the step that fills it has run",
        source=f"{_VLLM}/pull/56525",
        minimum_json=_trace(_LATENT, "admit 0 1;step 1;commit 0"),
    ),
    Fault(
        name="fault:snapshot-is-live-state",
        kind="trace",
        rules=("refcount",),
        follow=("freshness",),
        cause="the live recurrent state is published in place of a copy, and then updated",
        source=f"{_VLLM}/pull/57908",
        minimum_json=_trace(_CONVOLUTION % 2, "admit 0 2;step 1 1;complete;commit 0;step 1"),
    ),
    Fault(
        name="fault:store-before-compute",
        kind="trace",
        rules=("in-flight",),
        follow=("freshness",),
        cause="a page is copied to the host before the step that writes it has run",
        source=f"{_VLLM}/pull/46278",
        minimum_json=_trace(_LATENT, "admit 0 1;step 1;suspend 0;offload"),
    ),
    Fault(
        name="fault:stale-key-after-eviction",
        kind="trace",
        rules=("refcount",),
        cause="an evicted page keeps its key, and a later request takes it for its own",
        source=f"{_VLLM}/pull/4761, https://github.com/ovg-project/kvcached/issues/362",
        minimum_json=_trace(_LATENT, "admit 0 3;step 1;complete;commit 0;free 0;admit 0 1;admit 1 2", slots=3),
    ),
    Fault(
        name="fault:rewind-leaves-table",
        kind="trace",
        rules=("namespace",),
        follow=("bounds", "freshness"),
        cause="a rewind drops a block and leaves its slot in the request's row of the table",
        source=f"{_TRTLLM}/issues/16448",
        minimum_json=_trace(_LATENT, "admit 0 1;extend 0 2;rewind 0 2;extend 0 1;step 1", slots=3),
    ),
)
"""All faulty allocators, the canary first; those of selection and of transfers are behind them in ``ALL_FAULTS``."""

ALL_FAULTS: Final[tuple[Fault | SelectionFault | TransferFault, ...]] = (*FAULTS, *SELECTION_FAULTS, *TRANSFER_FAULTS)
"""The whole table; ``kind`` tells what a fault varies."""

CANARY: Final = "fault:canary"


def fault_named(name: str) -> Fault:
    """Return the fault called ``name``; raise ``SpecError`` listing them for any other name."""
    for fault in FAULTS:
        if fault.name == name:
            return fault
    known = ", ".join(fault.name for fault in FAULTS)
    raise SpecError("fault", f"unknown fault {shown(name)}, needs one of {known}")


def rules_fired(spec: CacheSpec, allocator: str | Allocator) -> frozenset[str]:
    """Return the rules that an allocator breaks on ``spec``, unjustified refusals included."""
    return frozenset(finding.rule for finding in judge(spec, allocator).faults)


def detects(fault: Fault, fired: frozenset[str]) -> bool:
    """Say whether the rules that fired are those that the fault must be caught by."""
    holds = all if fault.needs == "all" else any
    return holds(rule in fired for rule in fault.rules)


def shows(fault: Fault, spec: CacheSpec) -> bool:
    """Say whether the fault's rules fire on ``spec``; no other rule is asked."""
    try:
        layout = allocate(spec, resolve(fault.name))
    except Rejected as rejection:
        blamed = rejection.supported or rejection.rule != "rejected"
        return blamed and detects(fault, frozenset({rejection.rule}))
    asked = tuple([rule for rule in RULES if rule.name in fault.rules])
    return detects(fault, frozenset(finding.rule for finding in check(layout, rules=asked, limit=1)))


def shows_trace(fault: Fault, trace: Trace) -> bool:
    """Say whether a fault of kind ``trace`` is caught by its rules on ``trace``."""
    from ..sim.cache.run import run_trace

    return detects(fault, frozenset(run_trace(trace, fault.name).rules))


def triggers(fault: Fault, spec: CacheSpec) -> bool:
    """Say whether the fault shows on ``spec`` and its base has no finding there: it is clean, or refuses."""
    if not shows(fault, spec):
        return False
    base = judge(spec, resolve(fault.base))
    return base.status != "findings" and not any(finding.rule in fault.rules for finding in base.faults)
