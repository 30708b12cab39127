"""Known limits of the vLLM models that count as sound; explained in docs/known-limits.md."""

from __future__ import annotations

from ....model.spec import CacheSpec
from ...limits import KnownLimit
from ...rejection import Rejected
from .building import Deployment, plan
from .slot_tensors import UNIFYING, slot_block_bytes


def key_planes_beside_blocks(spec: CacheSpec) -> bool:
    """Whether one tensor holds all K before all V for one group, and rows block by block for another.

    Block ``b`` of the first is two halves of a page, far apart, and of the second one page: another block's bytes. With
    a single block both are the same.
    """
    try:
        deployment = plan(spec, 1, UNIFYING[1], slot_block_bytes)
    except Rejected:
        return False
    return not deployment.hybrid and deployment.blocks > 1 and _mixed(deployment)


def _mixed(deployment: Deployment) -> bool:
    places: dict[int, set[str]] = {}
    for group in deployment.groups:
        for place, layer in enumerate(group):
            places.setdefault(place, set()).add("planes" if layer.spec.kind == "attention" else "blocks")
    return len(deployment.groups) > 1 and any(len(kinds) > 1 for kinds in places.values())


LIMITS: tuple[KnownLimit, ...] = (
    KnownLimit(
        name="K planes beside blocks of rows",
        allocators=("vllm-e1",),
        rules=("alias",),
        matches=key_planes_beside_blocks,
        anchor="docs/known-limits.md#k-planes-beside-blocks-of-rows",
        example=(
            b'{"kvsan":"spec","tokens_per_block":1,"slots":2,"layers":['
            b'{"kind":"attention","kv_heads":1,"head_dim":128,"window":1},{"kind":"latent","latent_dim":256}]}'
        ),
    ),
)
