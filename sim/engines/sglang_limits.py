"""The ledger's entries for SGLang; ``limits`` says what an entry means."""

from __future__ import annotations

from ...model.arithmetic import round_up
from ...model.layers import AttentionLayer, paged_part, recurrent_part
from ...model.rank import manager_layers
from ...model.spec import CacheSpec
from ..allocators.sglang.pools import states_of
from .entry import Entry

_ALL = ("sglang-engine", "sglang-engine-envelope", "sglang-engine-speculative", "sglang-engine-unified")
_POOLS = _ALL[:3]
_ENTRIES = ("sglang-engine-envelope", "sglang-engine-unified")
_RELEASES = ("0.5.23",)


def key_dim_unlike_head_dim(spec: CacheSpec) -> bool:
    """Whether a KDA layer's key dim is not its value dim."""
    states = [part for part in map(recurrent_part, spec.layers) if part is not None]
    return any(part.algorithm == "kda" and part.state_dim != part.head_dim for part in states)


def value_dim_in_a_hybrid(spec: CacheSpec) -> bool:
    """Whether full layers with V of another dim than K share a rank with layers that have no pages."""
    for manager in manager_layers(spec):
        paged = [(layer.index, part) for layer in manager.layers if (part := paged_part(layer.layer)) is not None]
        full = [(index, part) for index, part in paged if part.window is None]
        unequal = any(isinstance(part, AttentionLayer) and part.head_dim != part.value_dim for _, part in full)
        gaps = bool(full) and full[-1][0] - full[0][0] >= len(full)
        if unequal and len(full) == len(paged) and (gaps or any(recurrent_part(one.layer) for one in manager.layers)):
            return True
    return False


def value_dim_in_four_bits(spec: CacheSpec) -> bool:
    """Whether layers with block scales have V of another dim than K."""
    layers = [part for part in map(paged_part, spec.layers + spec.draft.layers) if isinstance(part, AttentionLayer)]
    return spec.kv_format.block_scaled and any(part.head_dim != part.value_dim for part in layers)


def entry_off_its_element(spec: CacheSpec) -> bool:
    """Whether the states of all layers of a rank, one after the other, start or end off their elements; the engine asks
    it of the temporal state's elements where there is none, too."""
    for manager in manager_layers(spec):
        states = [part for layer in manager.layers if (part := recurrent_part(layer.layer)) is not None]
        if not states:
            continue
        pages = [page for _, page in states_of(states[0], spec)]
        items = [page.format.container_bytes for page in pages]
        items.append((states[0].ssm_format or spec.state_format).container_bytes)
        sizes = [len(states) * page.span_bytes for page in pages]
        if any(end != round_up(end, item) for end in (sizes[0], sum(sizes)) for item in items):
            return True
    return False


SGLANG_LIMITS: tuple[Entry, ...] = (
    Entry(
        name="a KDA state without its key dim",
        allocators=_ALL,
        rules=("unexplained-rejection",),
        matches=key_dim_unlike_head_dim,
        anchor="docs/findings.md#a-kda-state-without-its-key-dim",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":16},{"kind":"recurrent","algorithm":"kda","heads":1,'
            b'"head_dim":1,"groups":1,"state_dim":2,"conv_kernel":2}]}'
        ),
        words=("ssm_state of", "has no room", "leaves no room"),
        releases=_RELEASES,
    ),
    Entry(
        name="V of another dim in a hybrid model",
        allocators=_POOLS,
        rules=("unexplained-rejection",),
        matches=value_dim_in_a_hybrid,
        anchor="docs/findings.md#v-of-another-dim-in-a-hybrid-model",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":2,"value_dim":1},'
            b'{"kind":"recurrent","algorithm":"mamba1","heads":1,"state_dim":1,"conv_kernel":2}]}'
        ),
        words=("made value of",),
        releases=_RELEASES,
    ),
    Entry(
        name="V of another dim in four bits",
        allocators=_POOLS,
        rules=("unexplained-rejection",),
        matches=value_dim_in_four_bits,
        anchor="docs/findings.md#v-of-another-dim-in-four-bits",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"kv_format":"nvfp4","layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":32,"value_dim":16}]}'
        ),
        words=("made value of", "made value_block_scale of"),
        releases=_RELEASES,
    ),
    Entry(
        name="an entry of states off its element",
        allocators=_ENTRIES,
        rules=("unexplained-rejection",),
        matches=entry_off_its_element,
        anchor="docs/findings.md#an-entry-of-states-off-its-element",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":16},{"kind":"recurrent","algorithm":"mamba1","heads":1,'
            b'"state_dim":1,"conv_kernel":2,"ssm_format":"fp32"}]}'
        ),
        words=("misaligned mamba spec",),
        releases=_RELEASES,
    ),
)
