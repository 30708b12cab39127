"""The ledger: what released engines get wrong, understood and written up in docs/findings.md.

Each entry counts, and does not report, the same symptom in later campaigns, and its example is run against the engine
as an expected failure: when that passes, the engine is mended, and the entry must go.
"""

from __future__ import annotations

from ...model.rank import stage_layers
from ...model.spec import CacheSpec
from ..allocators.trtllm.support import refuse_unsupported
from ..allocators.vllm.building import plan
from ..allocators.vllm.grouping import Unifying, group_layers
from ..allocators.vllm.layer_specs import cached_layers
from ..allocators.vllm.limits import key_planes_beside_blocks
from ..allocators.vllm.slot_tensors import UNIFYING, packed_block_bytes, slot_block_bytes
from ..allocators.vllm.support import reasons
from ..rejection import Rejected
from .entry import Entry
from .sglang_limits import SGLANG_LIMITS

KERNEL_TOKENS = 16
"""Tokens of the kernel blocks that ``vllm-kernel-blocks`` asks for."""

_ALL = ("vllm", "vllm-kernel-blocks")
_LATE = ("vllm", "vllm-block-outermost", "vllm-lhbnc", "vllm-bhlnc", "vllm-kernel-blocks")
_PACKED = ("vllm-block-outermost",)
_EARLY = ("vllm", "vllm-block-outermost", "vllm-kernel-blocks")


def stage_without_cache(spec: CacheSpec) -> bool:
    """Whether a pipeline stage has no cached layer although the model has some."""
    stages = {layer.stage for layer in cached_layers(spec)}
    return len(stage_layers(spec)) > len(stages) > 0


def group_missing_on_a_stage(spec: CacheSpec) -> bool:
    """Whether blocks-outermost groups, formed over all pipeline stages, include one without a layer on some stage."""
    try:
        refuse_unsupported(reasons(spec, 3))
        groups = group_layers(cached_layers(spec), Unifying(True, True, keeps_sizes=True))
    except Rejected:
        return False
    return any(len({layer.stage for layer in group}) < spec.parallel.pp for group in groups)


def pages_off_their_element(spec: CacheSpec) -> bool:
    """Whether the pages or states that lie back to back are no whole elements of the widest among them."""
    sizes, items = set(), {1}
    for layer in cached_layers(spec):
        sizes.add(layer.spec.page_bytes)
        sizes.update(state.size_bytes for state in layer.spec.states)
        items.update(state.format.container_bytes for state in layer.spec.states)
        if layer.spec.kind != "recurrent":
            items.add(layer.spec.format.container_bytes)
    return any(size % max(items) for size in sizes)


def window_with_pages_of_several_sizes(spec: CacheSpec) -> bool:
    """Whether the layers of one window, beside others, have pages of several sizes."""
    sizes: dict[int, set[int]] = {}
    for layer in cached_layers(spec):
        if layer.spec.window is not None:
            sizes.setdefault(layer.spec.window, set()).add(layer.spec.page_bytes)
    return any(len(pages) > 1 for pages in sizes.values())


def windowed_rows_of_several_sizes(spec: CacheSpec) -> bool:
    """Whether latent layers of one window have rows of several sizes."""
    rows: dict[int, set[int]] = {}
    for layer in cached_layers(spec):
        if layer.spec.kind == "latent" and layer.spec.window is not None:
            rows.setdefault(layer.spec.window, set()).add(layer.spec.token_bytes)
    return any(len(sizes) > 1 for sizes in rows.values())


def rows_of_several_sizes(spec: CacheSpec) -> bool:
    """Whether latent layers have rows of several sizes."""
    return len({layer.spec.token_bytes for layer in cached_layers(spec) if layer.spec.kind == "latent"}) > 1


def states_below_the_largest_page(spec: CacheSpec) -> bool:
    """Whether some states take less than the largest page of the model."""
    pages = [layer.spec.page_bytes for layer in cached_layers(spec)]
    states = [layer.spec.page_bytes for layer in cached_layers(spec) if layer.spec.kind == "recurrent"]
    return bool(states) and min(states) < max(pages)


def two_blocks_beside_states(spec: CacheSpec) -> bool:
    """Whether there are two blocks, for pages and for states."""
    return _blocks_beside_states(spec) == 2


def two_kernel_blocks_beside_states(spec: CacheSpec) -> bool:
    """Whether pages beside states are two kernel blocks in all."""
    blocks = _blocks_beside_states(spec)
    paged = [layer.spec for layer in cached_layers(spec) if layer.spec.kind != "recurrent"]
    return any(blocks * page.block_tokens == 2 * KERNEL_TOKENS for page in paged)


def _blocks_beside_states(spec: CacheSpec) -> int:
    """Return the blocks of a rank with pages and states, 0 for any other."""
    try:
        deployment = plan(spec, 1, UNIFYING[1], slot_block_bytes)
    except Rejected:
        return 0
    return deployment.blocks if deployment.hybrid else 0


def packed_groups(spec: CacheSpec) -> int:
    """Return the groups that era 2 packs into common blocks, 0 where it packs none or refuses."""
    try:
        groups = plan(spec, 2, UNIFYING[2], packed_block_bytes).groups
    except Rejected:
        return 0
    return len(groups) if len(groups) > 1 else 0


def states_in_packed_blocks(spec: CacheSpec) -> bool:
    """Whether recurrent states lie in packed blocks."""
    return packed_groups(spec) > 0 and any(layer.spec.kind == "recurrent" for layer in cached_layers(spec))


def head_major_pages_in_packed_blocks(spec: CacheSpec) -> bool:
    """Whether K/V pages of heads before tokens lie in packed blocks."""
    paged = any(layer.spec.kind == "attention" for layer in cached_layers(spec))
    return spec.consumer.kv_layout == "HND" and paged and packed_groups(spec) > 0


LIMITS: tuple[Entry, ...] = (
    Entry(
        name="a pipeline stage without a cached layer",
        allocators=_LATE,
        rules=("unexplained-rejection", "rejected"),
        matches=stage_without_cache,
        anchor="docs/findings.md#a-pipeline-stage-without-a-cached-layer",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"parallel":{"pp":2},"layers":['
            b'{"kind":"uncached"},{"kind":"attention","kv_heads":1,"head_dim":128}]}'
        ),
    ),
    Entry(
        name="parts of a block off their element",
        allocators=_LATE,
        rules=("unexplained-rejection",),
        matches=pages_off_their_element,
        anchor="docs/findings.md#parts-of-a-block-off-their-element",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"layers":[{"kind":"recurrent","algorithm":"mamba1",'
            b'"heads":1,"head_dim":1,"state_dim":1,"conv_kernel":2,"ssm_format":"fp32"}]}'
        ),
        words=("must be divisible by",),
    ),
    Entry(
        name="a group without a layer on a pipeline stage",
        allocators=_PACKED,
        rules=("unexplained-rejection",),
        matches=group_missing_on_a_stage,
        anchor="docs/findings.md#a-group-without-a-layer-on-a-pipeline-stage",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"parallel":{"pp":2},"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":128},'
            b'{"kind":"attention","kv_heads":2,"head_dim":128,"window":1}]}'
        ),
        words=("raised StopIteration",),
    ),
    Entry(
        name="layers of one window with pages of several sizes",
        allocators=_PACKED,
        rules=("unexplained-rejection",),
        matches=window_with_pages_of_several_sizes,
        anchor="docs/findings.md#layers-of-one-window-with-pages-of-several-sizes",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":128},'
            b'{"kind":"attention","kv_heads":1,"head_dim":128,"window":1},'
            b'{"kind":"attention","kv_heads":1,"head_dim":128,"window":1},'
            b'{"kind":"attention","kv_heads":1,"head_dim":128,"window":1},'
            b'{"kind":"attention","kv_heads":2,"head_dim":128,"window":1}]}'
        ),
        words=("raised StopIteration", "KV cache groups miss layers"),
    ),
    Entry(
        name="windowed latent rows of several sizes in one group",
        allocators=_ALL,
        rules=("unexplained-rejection",),
        matches=windowed_rows_of_several_sizes,
        anchor="docs/findings.md#windowed-latent-rows-of-several-sizes-in-one-group",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"layers":['
            b'{"kind":"latent","latent_dim":128,"window":1,"side_planes":['
            b'{"role":"index_key","dim":128,"format":"bf16"}]},'
            b'{"kind":"latent","latent_dim":64,"window":1,"side_planes":['
            b'{"role":"index_key","dim":128,"format":"bf16"}]}]}'
        ),
        words=("viewed",),
    ),
    Entry(
        name="latent rows of several sizes taken for equal",
        allocators=_EARLY,
        rules=("unexplained-rejection", "alias"),
        matches=rows_of_several_sizes,
        anchor="docs/findings.md#latent-rows-of-several-sizes-taken-for-equal",
        example=(
            b'{"kvsan":"spec","tokens_per_block":16,"slots":1,"layers":['
            b'{"kind":"latent","latent_dim":128},{"kind":"latent","latent_dim":64}]}'
        ),
        # or, on a stage whose own rows are equal: another number of blocks
        words=("0.19.1 viewed", "0.25.1 viewed", " B in vllm"),
        releases=("0.19.1", "0.25.1"),
    ),
    Entry(
        name="states smaller than the largest page",
        allocators=_EARLY,
        rules=("unexplained-rejection",),
        matches=states_below_the_largest_page,
        anchor="docs/findings.md#states-smaller-than-the-largest-page",
        example=(
            b'{"kvsan":"spec","tokens_per_block":16,"slots":1,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":128},{"kind":"attention","kv_heads":2,"head_dim":128},'
            b'{"kind":"recurrent","algorithm":"mamba1","heads":1,"head_dim":1,"state_dim":1,"conv_kernel":2}]}'
        ),
        words=("0.19.1 raised AssertionError", "0.25.1 raised AssertionError"),
        releases=("0.19.1", "0.25.1"),
    ),
    Entry(
        name="a stage without a cached layer",
        allocators=_EARLY,
        rules=("unexplained-rejection",),
        matches=stage_without_cache,
        anchor="docs/findings.md#a-stage-without-a-cached-layer",
        example=(
            b'{"kvsan":"spec","tokens_per_block":16,"slots":1,"parallel":{"pp":2},"layers":['
            b'{"kind":"uncached"},{"kind":"attention","kv_heads":1,"head_dim":128}]}'
        ),
        words=("group_size must be greater than 0", "raised ZeroDivisionError"),
        releases=("0.19.1", "0.25.1"),
    ),
    Entry(
        name="states off their element",
        allocators=_EARLY,
        rules=("unexplained-rejection",),
        matches=pages_off_their_element,
        anchor="docs/findings.md#states-off-their-element",
        example=(
            b'{"kvsan":"spec","tokens_per_block":16,"slots":1,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":128},{"kind":"recurrent","algorithm":"mamba1",'
            b'"heads":1,"head_dim":1,"state_dim":1,"conv_kernel":2,"ssm_format":"fp32"}]}'
        ),
        words=("raised AssertionError and no message",),
        releases=("0.19.1", "0.25.1"),
    ),
    Entry(
        name="states in packed blocks",
        allocators=_PACKED,
        rules=("alias",),
        matches=states_in_packed_blocks,
        anchor="docs/findings.md#states-in-packed-blocks",
        example=(
            b'{"kvsan":"spec","tokens_per_block":16,"slots":1,"consumer":{"kv_layout":"NHD"},"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":128},{"kind":"attention","kv_heads":1,"head_dim":128},'
            b'{"kind":"recurrent","algorithm":"mamba1","heads":1,"head_dim":1,"state_dim":1,"conv_kernel":2},'
            b'{"kind":"recurrent","algorithm":"mamba1","heads":1,"head_dim":1,"state_dim":1,"conv_kernel":2}]}'
        ),
        words=("_state",),
        releases=("0.25.1",),
    ),
    Entry(
        name="HND pages in packed blocks",
        allocators=_PACKED,
        rules=("unexplained-rejection",),
        matches=head_major_pages_in_packed_blocks,
        anchor="docs/findings.md#hnd-pages-in-packed-blocks",
        example=(
            b'{"kvsan":"spec","tokens_per_block":16,"slots":1,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":128},'
            b'{"kind":"attention","kv_heads":1,"head_dim":128,"window":1}]}'
        ),
        words=("0.25.1 viewed",),
        releases=("0.25.1",),
    ),
    Entry(
        name="K planes beside blocks of rows",
        allocators=_ALL,
        rules=("alias",),
        matches=key_planes_beside_blocks,
        anchor="docs/findings.md#k-planes-beside-blocks-of-rows",
        example=(
            b'{"kvsan":"spec","tokens_per_block":16,"slots":2,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":128,"window":1},{"kind":"latent","latent_dim":256}]}'
        ),
        releases=("0.19.1",),
    ),
    Entry(
        name="a hybrid model with two blocks",
        allocators=("vllm",),
        rules=("unexplained-rejection", "alias", "stride"),
        matches=two_blocks_beside_states,
        anchor="docs/findings.md#a-hybrid-model-with-two-blocks",
        example=(
            b'{"kvsan":"spec","tokens_per_block":16,"slots":2,"layers":['
            b'{"kind":"latent","latent_dim":64},'
            b'{"kind":"recurrent","algorithm":"mamba1","heads":1,"head_dim":1,"state_dim":1,"conv_kernel":2}]}'
        ),
        releases=("0.19.1",),
    ),
    Entry(
        name="a hybrid model with two kernel blocks",
        allocators=("vllm-kernel-blocks",),
        rules=("unexplained-rejection", "alias", "stride"),
        matches=two_kernel_blocks_beside_states,
        anchor="docs/findings.md#a-hybrid-model-with-two-kernel-blocks",
        example=(
            b'{"kvsan":"spec","tokens_per_block":32,"slots":1,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":128},'
            b'{"kind":"recurrent","algorithm":"mamba1","heads":1,"head_dim":1,"state_dim":1,"conv_kernel":2}]}'
        ),
        releases=("0.19.1",),
    ),
    *SGLANG_LIMITS,
)
