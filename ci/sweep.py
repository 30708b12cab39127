"""``kvsan sweep``: every geometry of a declared grid, and the complete classes that break a rule.

What is finite is enumerated. Some allocators look at nothing but sizes (``BY_SIZE``): two K/V geometries that compare
alike (which page sizes are equal, which slot is larger, whether one or several sparse layers are on the rank, whether
packing is asked for) are laid out alike up to scale, and tokens per block scale all sizes together. For those NumPy
compares all points of the grid at once and numbers the classes; the allocator is then run on members of every class,
the first and the last among them, and on one of every geometry in a class that breaks a rule. Members that disagree
split the class, which is then run point by point. Any other allocator is run on every point, since one that nobody
knows may look at anything: the answer is as complete, and takes longer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..model.errors import SpecError, require_choice, require_int, shown
from ..model.formats import KV_FORMATS, ElementFormat
from ..model.layers import INDEX_KEY, INDEX_POSITION, MAX_DIM, AttentionLayer, SidePlane
from ..model.parallel import ParallelLayout
from ..model.spec import MAX_LAYERS, CacheSpec
from ..sim.limits import KnownLimit, faults_outside_limits, limits_of
from ..sim.registry import Allocator, resolve

Ints = NDArray[np.int64]

POSITION = SidePlane(role=INDEX_POSITION, dim=3, format=ElementFormat.INT32, scope="rank")

BY_SIZE: Final = (
    "trtllm-v1",
    "trtllm-v2",
    "trtllm-v2-qsa-legacy",
    "trtllm-v2-qsa-packed",
    "trtllm-v2-qsa-packed-rank-local",
    "fault:coalesce-by-size",
    "fault:bare-assert",
)
"""Allocators that look at nothing but how sizes compare, so that one member speaks for its class."""

MAX_POINTS: Final = 50_000_000
MAX_GEOMETRIES: Final = 5_000_000
"""Points without their tokens per block, which are compared at once: some 200 B of memory each."""
MAX_TP: Final = 1 << 14
MAX_TOKENS_PER_BLOCK: Final = 1 << 16


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The axes of a sweep; the points are all their combinations that an element format allows.

    ``heads`` is the largest number of KV heads (all from 1 up are taken); ``index_dims`` are index planes of one bf16
    head, 0 for none; ``sparse_layers`` the layers of the model, all alike.
    """

    kv_formats: tuple[ElementFormat, ...] = (
        ElementFormat.BF16,
        ElementFormat.FP8,
        ElementFormat.NVFP4,
        ElementFormat.FP32,
    )
    heads: int = 256
    head_dims: tuple[int, ...] = (16, 32, 64, 80, 96, 128, 192, 256, 512)
    tokens_per_block: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256)
    tp: tuple[int, ...] = (1, 2, 4, 8)
    sparse_layers: tuple[int, ...] = (1, 2, 12)
    index_dims: tuple[int, ...] = (64, 128)

    def __post_init__(self) -> None:
        require_int("heads", self.heads, 1, MAX_DIM)
        for name in self.kv_formats:
            require_choice("kv_formats", name.value, tuple(f.value for f in KV_FORMATS))
        ranges = {
            "head_dims": (1, MAX_DIM),
            "tokens_per_block": (1, MAX_TOKENS_PER_BLOCK),
            "tp": (1, MAX_TP),
            "sparse_layers": (1, MAX_LAYERS),
            "index_dims": (0, MAX_DIM),
        }
        for axis in ("kv_formats", *ranges):
            values = getattr(self, axis)
            if not values:
                raise SpecError(axis, "found no value, needs at least one")
            if len(set(values)) < len(values):
                raise SpecError(axis, "found a value twice, needs each once")
            for value in values if axis in ranges else ():
                require_int(axis, value, *ranges[axis])
        if self.geometries > MAX_GEOMETRIES or self.points > MAX_POINTS:
            raise SpecError(
                "grid",
                f"found {shown(self.points)} points ({shown(self.geometries)} without tokens per block), needs at most "
                f"{MAX_POINTS} ({MAX_GEOMETRIES}); sweep it in parts",
            )

    @property
    def geometries(self) -> int:
        """Combinations of all axes but the tokens per block, whether or not a format allows them."""
        axes = (self.kv_formats, self.head_dims, self.tp, self.sparse_layers, self.index_dims)
        count = self.heads
        for axis in axes:
            count *= len(axis)
        return count

    @property
    def points(self) -> int:
        """Combinations of all axes, whether or not a format allows them."""
        return self.geometries * len(self.tokens_per_block)


GRIDS: Final = {
    "dev": Grid(heads=16),
    "ci": Grid(),
    "nightly": Grid(head_dims=tuple(range(16, 1025, 16)), index_dims=(32, 64, 96, 128, 256)),
}
"""Named grids; ``ci`` has 1.5 million points, ``nightly`` 27 million."""


class BrokenClass(msgspec.Struct, frozen=True, kw_only=True):
    """All points that break ``rule`` with one K/V geometry on the rank: ``count`` over the axes that are not named.

    ``heads`` are those of one rank. ``several_layers`` says whether the model has more than one sparse layer.
    """

    rule: str
    heads: int
    head_dim: int
    kv_dtype: str
    index_dim: int
    several_layers: bool
    count: int
    message: str


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """A finished sweep: ``signatures`` counts the classes compared, ``judged`` how often the allocator was run.

    ``refused`` is how many of those runs were refusals.
    """

    allocator: str
    points: int
    signatures: int
    judged: int
    refused: int
    seconds: float
    classes: list[BrokenClass]


def sweep(
    allocator: str,
    grid: Grid,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    by_size: bool | None = None,
) -> Sweep:
    """Sweep ``grid`` under ``allocator``; ``progress`` is told how many classes of how many are done.

    ``by_size`` says whether points that compare alike are one class; by default the allocators of ``BY_SIZE`` alone.
    Raises ``SpecError`` for an unknown allocator, one that gives no layout, and a grid without a point.
    """
    started = time.monotonic()
    points = _points(grid)
    total = len(points.heads)
    if not total:
        raise SpecError("grid", "found no point that an element format allows (NVFP4 takes head dims of 16, 32, …)")
    judging = _Judging(allocator, points, grid.tokens_per_block)
    classes = total
    if allocator in BY_SIZE if by_size is None else by_size:
        numbers = _signatures(points)
        order = np.argsort(numbers, kind="stable")
        _, counts = np.unique(numbers, return_counts=True)
        classes, done = len(counts), 0
        for number, count in enumerate(counts.tolist()):
            judging.judge_class(order[done : done + count])
            done += count
            progress(number + 1, classes)
    else:
        for number in range(total):
            judging.judge_each(number)
            progress(number + 1, total)
    return Sweep(
        allocator=allocator,
        points=total * len(grid.tokens_per_block),
        signatures=classes,
        judged=judging.judged,
        refused=judging.refused,
        seconds=time.monotonic() - started,
        classes=judging.classes(),
    )


class _Points(msgspec.Struct, frozen=True):
    """The grid's points as parallel arrays, each standing for all tokens per block."""

    formats: tuple[ElementFormat, ...]
    format: Ints
    heads: Ints
    dim: Ints
    tp: Ints
    layers: Ints
    index_dim: Ints

    @property
    def rank_heads(self) -> Ints:
        """KV heads on one rank."""
        return -(-self.heads // self.tp)  # floor: rounded up by the double negation


def _points(grid: Grid) -> _Points:
    axes = np.meshgrid(
        np.arange(len(grid.kv_formats)),
        np.arange(1, grid.heads + 1),
        np.array(grid.head_dims),
        np.array(grid.tp),
        np.array(grid.sparse_layers),
        np.array(grid.index_dims),
        indexing="ij",
    )
    flat = [axis.reshape(-1).astype(np.int64) for axis in axes]
    block_scaled = np.array([f.block_scaled for f in grid.kv_formats])[flat[0]]
    legal = ~block_scaled | (flat[2] % 16 == 0)
    return _Points(grid.kv_formats, *(axis[legal] for axis in flat))


def _signatures(points: _Points) -> Ints:
    """Return a class number per point: all comparisons of sizes, in bits per token, packed into one integer."""
    bits = np.array([f.bits for f in points.formats])[points.format]
    scaled = np.array([f.block_scaled for f in points.formats])[points.format]
    rank_elements = points.rank_heads * points.dim
    key = rank_elements * bits
    scale = np.where(scaled, rank_elements >> 1, 0)
    index = points.index_dim * 16
    position = np.where(points.index_dim > 0, 96, 0)
    plane = points.layers * index + position
    sizes = [key, scale, index, position, plane]
    totals = [2 * points.layers * key, 2 * points.layers * scale, points.layers * index, position, plane]
    numbers = np.zeros(len(key), dtype=np.int64)
    for values in (sizes, totals):
        for left in range(len(values)):
            for right in range(left):
                numbers = numbers * 3 + np.sign(values[left] - values[right]) + 1  # below 3^20 at the end
    may_pack = np.zeros(len(key), dtype=bool)
    for side in (index, position):
        for unit in (points.dim * bits, np.where(scaled, points.dim >> 1, 0)):
            whole = (unit > 0) & (side % np.maximum(unit, 1) == 0) & (side > 0)
            may_pack |= whole & (side // np.maximum(unit, 1) <= points.heads)  # floor: exact where ``whole`` holds
    for answer in (may_pack, scaled, points.layers > 1, points.heads < points.tp):
        numbers = numbers * 2 + answer
    return numbers


class _Judging:
    """The allocator at work on classes of points, and what it broke so far: counts by rule and geometry."""

    def __init__(self, allocator: str, points: _Points, tokens: tuple[int, ...]) -> None:
        self.judged = 0
        self.refused = 0
        self._name, self._points, self._tokens = allocator, points, tokens
        self._function: Allocator = resolve(allocator)
        self._limits: tuple[KnownLimit, ...] = limits_of(allocator)
        self._rank_heads = points.rank_heads
        self._counts: Counter[tuple[str, str, int, int, int, bool]] = Counter()
        self._messages: dict[tuple[str, str, int, int, int, bool], str] = {}

    def judge_class(self, members: Ints) -> None:
        """Judge three members of a class, and one of each geometry where they break a rule; count what breaks.

        Where those disagree, all members are judged.
        """
        places = (0, 0), (len(members) >> 1, len(self._tokens) >> 1), (-1, -1)
        samples = dict.fromkeys((int(members[place]), self._tokens[token]) for place, token in places)
        verdicts = [self._rules(*sample) for sample in samples]
        rows: list[tuple[list[int], int, dict[str, str]]] = []
        if any(verdicts):
            rows = [
                (row, count, self._rules(member, self._tokens[0])) for row, member, count in self._geometries(members)
            ]
            verdicts += [rules for _, _, rules in rows]
        if len({frozenset(rules) for rules in verdicts}) > 1:
            for member in members.tolist():
                self.judge_each(member)
            return
        for row, count, rules in rows:
            self._count(row, rules, count * len(self._tokens))

    def _geometries(self, members: Ints) -> list[tuple[list[int], int, int]]:
        """Return the different geometries on the rank among ``members``, each with its first member and its count."""
        points = self._points
        table = np.stack(
            [
                points.format[members],
                points.dim[members],
                self._rank_heads[members],
                points.index_dim[members],
                points.layers[members] > 1,
            ]
        )
        rows, first, counts = np.unique(table, axis=1, return_index=True, return_counts=True)
        return list(zip(rows.T.tolist(), members[first].tolist(), counts.tolist(), strict=True))

    def judge_each(self, member: int) -> None:
        """Judge one point with all tokens per block, and count what breaks."""
        points = self._points
        columns = (points.format, points.dim, self._rank_heads, points.index_dim)
        row = [*[int(column[member]) for column in columns], int(points.layers[member] > 1)]
        for tokens in self._tokens:
            self._count(row, self._rules(member, tokens), 1)

    def _count(self, row: list[int], rules: dict[str, str], count: int) -> None:
        kv_format, dim, heads, index_dim, several = row
        for rule, message in rules.items():
            key = (rule, self._points.formats[kv_format].value, dim, heads, index_dim, bool(several))
            self._counts[key] += count
            self._messages.setdefault(key, message)

    def _rules(self, member: int, tokens: int) -> dict[str, str]:
        """Return the rules that the allocator breaks on a point outside its known limits, each with a message."""
        spec = _spec(self._points, member, tokens)
        self.judged += 1
        try:
            faults, _, refused = faults_outside_limits(spec, self._function, self._limits)
        except Exception as error:  # no layout, or one that the rules choke on
            problem = error.problem if isinstance(error, SpecError) else f"{type(error).__name__}: {error}"
            raise SpecError("allocator", f"{shown(self._name)}: {problem}, on the spec {_brief(spec)}") from error
        self.refused += refused
        return {fault.rule: fault.message for fault in reversed(faults)}

    def classes(self) -> list[BrokenClass]:
        """Return the classes found, in order of rule and geometry."""
        return [
            BrokenClass(
                rule=key[0],
                kv_dtype=key[1],
                head_dim=key[2],
                heads=key[3],
                index_dim=key[4],
                several_layers=key[5],
                count=count,
                message=self._messages[key],
            )
            for key, count in sorted(self._counts.items())
        ]


def _spec(points: _Points, index: int, tokens: int) -> CacheSpec:
    """Return the spec of one point: ``layers`` equal sparse layers on one pipeline stage."""
    planes: tuple[SidePlane, ...] = ()
    if points.index_dim[index]:
        planes = (SidePlane(role=INDEX_KEY, dim=int(points.index_dim[index]), format=ElementFormat.BF16), POSITION)
    layer = AttentionLayer(kv_heads=int(points.heads[index]), head_dim=int(points.dim[index]), side_planes=planes)
    return CacheSpec(
        layers=(layer,) * int(points.layers[index]),
        kv_format=points.formats[int(points.format[index])],
        tokens_per_block=tokens,
        parallel=ParallelLayout(tp=int(points.tp[index])),
        sparse_algorithm="qsa" if planes else None,
        slots=2,
    )


def _brief(spec: CacheSpec) -> str:
    layer = spec.layers[0]
    heads, dim = getattr(layer, "kv_heads", 0), getattr(layer, "head_dim", 0)
    return (
        f"of {len(spec.layers)} layers of {heads} x {dim} {spec.kv_format.value}, {spec.tokens_per_block} tokens per "
        f"block, {spec.parallel.name}"
    )
