"""The ledger's entries for SGLang; ``limits`` says what an entry means."""

from __future__ import annotations

from ...model.layers import AttentionLayer, paged_part, recurrent_part
from ...model.rank import manager_layers
from ...model.spec import CacheSpec
from ..allocators.sglang.pools import states_of
from .entry import Entry

_ALL = ("sglang-engine", "sglang-engine-envelope", "sglang-engine-speculative", "sglang-engine-unified")
_POOLS = _ALL[:3]
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


def empty_state_off_its_element(spec: CacheSpec) -> bool:
    """Whether layers have no temporal state, and their convolutions are no whole elements of its format."""
    for manager in manager_layers(spec):
        states = [part for layer in manager.layers if (part := recurrent_part(layer.layer)) is not None]
        if states and not states[0].state_dim:
            [(_, page)] = states_of(states[0], spec)
            item = (states[0].ssm_format or spec.state_format).container_bytes
            if len(states) * page.span_bytes % item:
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
        name="nvfp4 values as wide as keys",
        allocators=_POOLS,
        rules=("unexplained-rejection",),
        matches=value_dim_in_four_bits,
        anchor="docs/findings.md#nvfp4-values-as-wide-as-keys",
        example=(
            b'{"kvsan":"spec","kv_format":"nvfp4","tokens_per_block":1,"slots":1,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":16,"value_dim":32}]}'
        ),
        words=("made value of", "made value_block_scale of"),
        releases=_RELEASES,
    ),
    Entry(
        name="an empty state off its element",
        allocators=("sglang-engine-envelope",),
        rules=("rejected",),
        matches=empty_state_off_its_element,
        anchor="docs/findings.md#an-empty-state-off-its-element",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"layers":[{"kind":"recurrent","algorithm":"short_conv",'
            b'"heads":1,"conv_kernel":2,"ssm_format":"fp32"}]}'
        ),
        words=("misaligned mamba spec",),
        releases=_RELEASES,
    ),
)
