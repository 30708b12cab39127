"""``find_passkeys``: a key planted deep in a long context must be fetched by attention, through the layout.

Every attention layer gets a context of its own: normal keys and values, and at one depth a key that only its query
matches, whose value is one of ``CODES`` code words. The key is found where the answer is nearer to that word than to
any other. A layout that mixes up pages, heads or layers loses passkeys; kernels that are given the right addresses find
all.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any, Final

import msgspec
import torch

from ...model.arithmetic import div_up
from ...model.errors import SpecError
from ...model.formats import ElementFormat
from ...model.layers import AttentionLayer
from ...model.spec import CacheSpec, Consumer
from ...sim.layout import KEY, KEY_SCALE, VALUE, VALUE_SCALE, Layout
from ...sim.registry import allocate
from ..attention.decode import Tiling, decode
from ..attention.problem import QUERY_TYPES, PagedAttention
from ..device import Device, open_device
from ..paged.views import LayoutMemory, PagedPlane
from ..quantize.rows import append
from .views import LayerViews, layers_of, slots_of

CODES: Final = 32
CONTEXTS: Final = (3_000, 7_000, 12_000)
DEPTHS: Final = (10, 50, 90)
"""Where the key is planted, in percent of the context."""
QUERY_SIZE: Final = 3
KEY_SIZE: Final = 4


class Passkeys(msgspec.Struct, frozen=True):
    """How many passkeys were found of how many planted, and the misses as (layer, context tokens, depth in percent)."""

    planted: int
    found: int
    missed: tuple[tuple[int, int, int], ...]
    refused: tuple[str, ...]


class _Planted(msgspec.Struct, frozen=True):
    """One layer with its context: the problem, the queries that fetch the key, and the code words' sum."""

    given: LayerViews
    problem: PagedAttention
    queries: Any
    words: Any
    answer: int


def find_passkeys(
    device: Device, layout: Layout, contexts: tuple[int, ...] = CONTEXTS, depths: tuple[int, ...] = DEPTHS
) -> Passkeys:
    """Plant and fetch a key in every attention layer, for each length of context and depth.

    All layers are written before any is read. A layer that no kernel can be run on counts as lost, and is told in
    ``refused``.
    """
    refused: list[str] = []
    missed: list[tuple[int, int, int]] = []
    planted = 0
    for tokens in contexts:
        for depth in depths:
            memory = LayoutMemory(device, layout)
            generator = torch.Generator().manual_seed(tokens + depth)
            written: list[_Planted] = []
            for given in layers_of(memory, "attention-op", refused):
                if {KEY, VALUE} <= set(given.views):
                    written.append(_plant(device, layout, given, tokens, depth, generator))
            reached = {each.given.layer for each in written}
            missed += [(layer, tokens, depth) for layer in _attention_layers(layout) - reached]
            missed += [(each.given.layer, tokens, depth) for each in written if not _fetched(device, each)]
            planted += len(_attention_layers(layout) | reached)
    return Passkeys(planted, planted - len(missed), tuple(sorted(missed)), tuple(dict.fromkeys(refused)))


def _attention_layers(layout: Layout) -> set[int]:
    """Return the layers that store K and V."""
    roles: dict[int, set[str]] = {}
    for buffer in layout.buffers:
        roles.setdefault(buffer.layer, set()).add(buffer.role)
    return {layer for layer, held in roles.items() if {KEY, VALUE} <= held}


def _plant(
    device: Device, layout: Layout, given: LayerViews, tokens: int, depth: int, generator: torch.Generator
) -> _Planted:
    """Write one layer's context in its slots, in random order."""
    key = PagedPlane(given.views[KEY], given.views.get(KEY_SCALE))
    value = PagedPlane(given.views[VALUE], given.views.get(VALUE_SCALE))
    heads, dim, value_dim = key.data.size("head"), key.data.dim, value.data.dim
    slots = slots_of(layout, given.life_cycle)
    pages = div_up(tokens, key.data.size("token"))
    if pages > len(slots):
        raise SpecError("slots", f"found {len(slots)} slots for a context of {tokens} tokens, needs {pages}")
    order = torch.randperm(len(slots), generator=generator)[:pages].tolist()
    table = torch.tensor([[slots[index] for index in order]], dtype=torch.int32)
    answer = int(torch.randint(0, CODES, (1,), generator=generator))
    words = torch.randn((CODES, value_dim), generator=generator).sign()
    direction = torch.randn((heads, dim), generator=generator).sign()
    keys = torch.randn((tokens, heads, dim), generator=generator)
    values = torch.randn((tokens, heads, value_dim), generator=generator)
    at = tokens * depth // 100  # floor: whole tokens
    keys[at], values[at] = KEY_SIZE * direction, words[answer]
    positions = torch.arange(tokens, dtype=torch.int32)
    where = device.kind
    for plane, contents in ((key, keys), (value, values)):
        # what every format takes: bf16 numbers in fp32
        held = contents.to(torch.bfloat16).to(torch.float32).to(where)
        append(plane, held, torch.zeros_like(positions).to(where), positions.to(where), table.to(where))
    queries = (QUERY_SIZE * direction)[None].to(QUERY_TYPES[key.data.format]).to(where)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    problem = PagedAttention(key, value, table.to(where), lengths.to(where))
    return _Planted(given, problem, queries, words.to(where), answer)


def _fetched(device: Device, planted: _Planted) -> bool:
    """Say whether every head's answer is nearest to the planted code word."""
    heads, value_dim = planted.queries.shape[1], planted.words.shape[1]
    out = torch.full((1, heads, value_dim), float("nan"), dtype=torch.float32, device=device.kind)
    # the interpreter pays for every tile
    tiling = Tiling(1024, 1, 1) if device.kind == "cpu" else None
    decode(planted.problem, planted.queries, out, split_tokens=4096, tiling=tiling)
    device.synchronize()
    likeness = out[0] @ planted.words.T
    finite = bool(torch.isfinite(likeness).all())
    return finite and bool((likeness.argmax(-1) == planted.answer).all())


def passkey_layout(
    allocator: str, format: ElementFormat, kv_layout: str, tokens: int, *, layers: int = 3, heads: int = 2,
    dim: int = 64, tokens_per_block: int = 32,
) -> Layout:  # fmt: skip
    """Return the layout that ``allocator`` gives a plain model with room for a context of ``tokens``."""
    spec = CacheSpec(
        layers=(AttentionLayer(kv_heads=heads, head_dim=dim),) * layers,
        kv_format=format,
        tokens_per_block=tokens_per_block,
        slots=div_up(tokens, tokens_per_block) + 3,
        consumer=Consumer(kv_layout="NHD" if kv_layout == "NHD" else "HND"),
    )
    return allocate(spec, allocator)


def main() -> int:
    """Plant passkeys for every format and page layout: ``python -m kvsan.kernels.results.retrieval cuda ALLOCATOR...``.

    Prints one JSON document; the exit status is 0 where every key was found, else 1.
    """
    kind, *allocators = sys.argv[1:] or ["cpu"]
    device = open_device(kind)
    reports: list[dict[str, Any]] = []
    build = functools.partial(passkey_layout, tokens=max(CONTEXTS))
    for allocator in allocators or ["trtllm-v1", "trtllm-v2"]:
        for format in QUERY_TYPES:
            for kv_layout in ("HND", "NHD"):
                found = find_passkeys(device, build(allocator, format, kv_layout))
                report = {"allocator": allocator, "format": format.value, "kv_layout": kv_layout}
                reports.append({**report, **msgspec.to_builtins(found)})
    print(json.dumps({"device": kind, "passkeys": reports}, indent=2))
    return 0 if all(report["planted"] == report["found"] for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
