"""The ledger: what released engines get wrong, understood and written up in docs/findings.md.

Each entry counts, and does not report, the same symptom in later campaigns, and its example is run against the engine
as an expected failure: when that passes, the engine is mended, and the entry must go.
"""

from __future__ import annotations

from ...model.rank import stage_layers
from ...model.spec import CacheSpec
from ..allocators.trtllm.support import refuse_unsupported
from ..allocators.vllm.grouping import Unifying, group_layers
from ..allocators.vllm.layer_specs import cached_layers
from ..allocators.vllm.support import reasons
from ..limits import KnownLimit
from ..rejection import Rejected

_LATE = ("vllm", "vllm-block-outermost", "vllm-lhbnc", "vllm-bhlnc")
_PACKED = ("vllm-block-outermost",)


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


LIMITS: tuple[KnownLimit, ...] = (
    KnownLimit(
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
    KnownLimit(
        name="parts of a block off their element",
        allocators=_LATE,
        rules=("unexplained-rejection",),
        matches=pages_off_their_element,
        anchor="docs/findings.md#parts-of-a-block-off-their-element",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":1,"layers":[{"kind":"recurrent","algorithm":"mamba1",'
            b'"heads":1,"head_dim":1,"state_dim":1,"conv_kernel":2,"ssm_format":"fp32"}]}'
        ),
        words="must be divisible by",
    ),
    KnownLimit(
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
        words="raised StopIteration",
    ),
    KnownLimit(
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
        words="raised StopIteration",
    ),
)
