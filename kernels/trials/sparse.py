"""Trial of sparse attention: index keys and positions in planes of their own beside K and V."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ...model.arithmetic import div_up
from ...model.formats import ElementFormat
from ...model.layers import INDEX_KEY, INDEX_POSITION
from ..attention.sparse import ROTARY_BASE, IndexPlanes, sparse_decode
from ..device import Device
from ..paged.views import LayoutMemory
from ..reference import attention, sparse
from ..reference.bounds import ATTENTION_BOUNDS, SCORE_BOUND, Bound
from .attention import prepare
from .filling import numbers
from .layouts import plane_layout
from .outcome import Outcome, judge, poisoned
from .shape import Shape


def trial_sparse(device: Device, shape: Shape) -> Outcome:
    """Try selection and attention: scores against float64, the choice against the kernel's own scores, then the output.

    A third of the shapes stays within the budget and must be dense.
    """
    shape = msgspec.structs.replace(shape, window=None, sinks=0, query_tokens=1)
    ready = prepare(device, shape, 1)
    where = ready.queries.device
    index_dim = 2 * (1 + shape.seed % 64)
    planes, contents = _index_planes(device, shape, ready.held, index_dim, where)
    generator = torch.Generator().manual_seed(shape.seed + 1)
    requests = len(shape.lengths)
    index_queries = numbers(generator, (requests, 1 + shape.seed % 2, index_dim), where)
    query_places = torch.randint(0, 50, (requests, 3), generator=generator).to(torch.int32).to(where)
    kept, budget = 1 + shape.seed % 4, 10**6 if shape.seed % 3 == 0 else shape.page_tokens
    out = poisoned((requests, ready.queries.shape[2], shape.value_dim), where)
    queries = ready.queries[:, 0]
    chosen = sparse_decode(
        ready.problem, planes, queries, index_queries, query_places, out, kept_blocks=kept, budget_tokens=budget
    )
    device.synchronize()
    results: list[tuple[str, Any, Any, Bound]] = []
    wanted = []
    for request, (keys, values) in enumerate(ready.contents):
        length, used = keys.shape[0], div_up(keys.shape[0], shape.page_tokens)
        index_keys, places = contents[request]
        scores = sparse.token_scores(index_queries[request], query_places[request], index_keys, places, ROTARY_BASE)
        by_block = sparse.block_scores(scores, shape.page_tokens)
        found = chosen.scores[request, :used]
        # a score is a sum that may cancel: its error is one of the largest score that such vectors can have
        sizes = [
            torch.linalg.vector_norm(each.to(torch.float64), dim=-1) for each in (index_queries[request], index_keys)
        ]
        reach = sizes[0].sum() * (sizes[1].max() if length else 0)
        both = [torch.cat([each.to(torch.float64), reach.reshape(1)]) for each in (found, by_block)]
        results.append((f"scores of request {request}", *both, SCORE_BOUND))
        blocks = list(range(used)) if length <= budget else sparse.kept_blocks(found, kept)
        table = ready.held.table[request][blocks]
        results.append((f"pages of request {request}", chosen.table[request, : len(blocks)], table, Bound(0.0, 0.0)))
        token = torch.arange(length, device=where)
        block = torch.div(token, shape.page_tokens, rounding_mode="floor")
        taken = torch.isin(block, torch.tensor(blocks, device=where))
        scale = ready.problem.score_scale
        wanted.append(attention.attention(queries[request : request + 1], keys, values, taken[None], scale)[0])
    return judge([*results, ("out", out, torch.stack(wanted), ATTENTION_BOUNDS[shape.format])])


def _index_planes(
    device: Device, shape: Shape, held: Any, index_dim: int, where: Any
) -> tuple[IndexPlanes, list[tuple[Any, Any]]]:
    """Return filled planes, and each request's index keys (tokens, dim) and positions (tokens, 3)."""
    generator = torch.Generator().manual_seed(shape.seed + 2)
    roles = ((INDEX_KEY, ElementFormat.BF16, index_dim), (INDEX_POSITION, ElementFormat.INT32, 3))
    layout = plane_layout(shape, held.slots, roles)
    memory = LayoutMemory(device, layout)
    keys, places = (memory.of_buffer(buffer) for buffer in layout.buffers)
    contents = []
    for request, length in enumerate(shape.lengths):
        rows = numbers(generator, (length, index_dim), where)
        spots = torch.randint(0, 50, (length, 3), generator=generator).to(torch.int32).to(where)
        number = torch.arange(length, device=where)
        ordinal = torch.div(number, shape.page_tokens, rounding_mode="floor")
        slots, entries = held.table[request].to(torch.int64)[ordinal], number - ordinal * shape.page_tokens
        keys.tensor()[slots, entries, 0] = rows.to(torch.bfloat16)
        places.tensor()[slots, entries, 0] = spots
        contents.append((rows, spots))
    return IndexPlanes(keys, places), contents
