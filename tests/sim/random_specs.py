"""Random specs from a seed, for tests that compare two answers about the same spec.

Everything is small, so that an arena of any of them takes little memory, and what is rare in models is frequent here:
odd head counts, one token per block, windows, states of other widths, pages of two geometries that are equally large.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from kvsan.model.formats import KV_FORMATS, STATE_FORMATS, ElementFormat
from kvsan.model.layers import (
    INDEX_KEY,
    INDEX_POSITION,
    AttentionLayer,
    AuxiliaryState,
    HybridLayer,
    LatentLayer,
    Layer,
    RecurrentLayer,
    SidePlane,
    UncachedLayer,
)
from kvsan.model.parallel import ParallelLayout
from kvsan.model.spec import CacheSpec, Consumer, Draft

Choice = TypeVar("Choice")

TOKENS = (1, 2, 3, 4, 5, 8, 16, 32, 64)
HEADS = (1, 1, 2, 2, 3, 4, 6, 8)
DIMS = (16, 32, 32, 48, 64, 64, 80, 128)
ODD_DIMS = (1, 2, 3, 6, 8, 20, 24)


class Drawer:
    """Draws one spec. ``mixed`` allows several KV formats and geometries in one life cycle, ``odd`` awkward dims."""

    def __init__(self, seed: int, *, mixed: bool, odd: bool = False) -> None:
        self.random = random.Random(seed)
        self.mixed = mixed
        self.odd = odd

    def one(self, choices: Sequence[Choice]) -> Choice:
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def spec(self) -> CacheSpec:
        tokens = self.one(TOKENS)
        layers = self.layers(tokens)
        parallel = self.parallel(len(layers))
        paged = [layer for layer in layers if isinstance(layer, AttentionLayer | LatentLayer)]
        return CacheSpec(
            layers=layers,
            kv_format=self.one(KV_FORMATS),
            state_format=self.one(STATE_FORMATS),
            conv_format=self.one(STATE_FORMATS),
            tokens_per_block=tokens,
            max_sequence_tokens=self.one((None, None, 64, 1024)),
            parallel=parallel,
            rank=self.random.randrange(parallel.world_size),
            draft=self.draft(paged, parallel),
            slots=self.random.randint(1, 5),
            state_slots=self.one((None, 1, 2, 3, 7)),
            consumer=Consumer(kv_layout=self.one(("NHD", "HND"))),
        )

    def layers(self, tokens: int) -> tuple[Layer, ...]:
        """Return a pattern of a few layer classes, repeated."""
        kind = self.one(("attention", "attention", "qsa", "latent", "hybrid"))
        geometry = {}
        classes: list[Layer] = []
        for _ in range(self.random.randint(1, 3)):
            window = self.one((None, None, 1, 7, 32, 100)) if kind != "qsa" or self.mixed else None
            sinks = self.one((0, 0, 1, 5)) if window else 0
            blocks = -(-sinks // tokens)
            if self.mixed or (window, blocks) not in geometry:
                geometry[window, blocks] = self.paged(
                    "latent" if kind == "latent" else "attention", window, sinks, tokens
                )
            classes.append(geometry[window, blocks])
        if kind == "qsa":
            classes = [self.with_planes(layer) for layer in classes[: 1 if not self.mixed else 3]]
        if kind == "latent" and self.chance(0.4):
            plane = SidePlane(role=INDEX_KEY, dim=self.one((68, 132, 64, 128)), format=ElementFormat.UINT8)
            classes = [self.replaced(layer, side_planes=(plane,)) for layer in classes]
        if kind in ("hybrid", "qsa") and (kind == "hybrid" or self.chance(0.6)):
            state = self.recurrent()
            classes += [state] * self.random.randint(1, 2)
            if self.mixed and self.chance(0.3):
                classes.append(self.recurrent())
            if kind == "hybrid" and isinstance(classes[0], AttentionLayer) and self.chance(0.4):
                classes.append(HybridLayer(attention=classes[0], recurrent=state))
        if self.chance(0.2):
            classes.append(UncachedLayer())
        pattern = [self.one(classes) for _ in range(self.random.randint(1, 5))]
        count = self.random.randint(1, 10)
        return tuple([pattern[index % len(pattern)] for index in range(count)])

    def paged(self, kind: str, window: int | None, sinks: int, tokens: int) -> AttentionLayer | LatentLayer:
        formats = (None, None, *KV_FORMATS) if self.mixed else (None,)
        blocks = [size for size in (tokens, tokens, 1, 2, 16) if tokens % size == 0]
        override = self.one(blocks) if self.mixed and self.chance(0.2) else None
        dims = DIMS + (ODD_DIMS if self.odd else ())
        if kind == "latent":
            return LatentLayer(
                latent_dim=self.one(dims),
                rope_dim=self.one((0, 16, 64)),
                window=window,
                sink_tokens=sinks,
                kv_format=self.one(formats),
                tokens_per_block=override,
            )
        return AttentionLayer(
            kv_heads=self.one(HEADS),
            head_dim=self.one(dims),
            window=window,
            sink_tokens=sinks,
            kv_format=self.one(formats),
            tokens_per_block=override,
        )

    def with_planes(self, layer: Layer) -> Layer:
        """Return a QSA layer: an index plane, which is often as large as a K page, and a position plane per rank."""
        planes = [SidePlane(role=INDEX_KEY, heads=self.one((1, 1, 2)), dim=self.one(DIMS), format=ElementFormat.BF16)]
        if self.chance(0.8):
            planes.append(SidePlane(role=INDEX_POSITION, dim=3, format=ElementFormat.INT32, scope="rank"))
        if self.chance(0.1):
            planes.append(SidePlane(role="index_value", dim=self.one(DIMS), format=ElementFormat.FP8))
        return self.replaced(layer, side_planes=tuple(planes))

    def replaced(self, layer: Layer, **fields: object) -> Layer:
        """Return ``layer`` with other fields, validated again."""
        kept = {name: getattr(layer, name) for name in layer.__struct_fields__}
        return type(layer)(**{**kept, **fields})

    def recurrent(self) -> RecurrentLayer:
        algorithm = self.one(("mamba1", "mamba2", "gdn", "kda", "short_conv"))
        inner_only = algorithm in ("mamba1", "short_conv")
        auxiliary = ()
        if self.mixed and self.chance(0.3):
            auxiliary = (
                AuxiliaryState(role="ngram_context", shape=(self.one((1, 3)),), format=ElementFormat.INT64),
                AuxiliaryState(role="ple_conv_state", shape=(self.one((4, 16)), 3), format=self.one(STATE_FORMATS)),
            )
        return RecurrentLayer(
            algorithm=algorithm,
            heads=self.one((2, 4, 8, 12)),
            head_dim=1 if inner_only else self.one((2, 4, 8)),
            groups=0 if inner_only else self.one((1, 2, 4)),
            state_dim=0 if algorithm == "short_conv" else self.one((2, 4, 16)),
            conv_kernel=self.one((2, 3, 4, 5)),
            ssm_format=self.one((None, None, *STATE_FORMATS)),
            conv_format=self.one((None, None, *STATE_FORMATS)),
            auxiliary=auxiliary,
        )

    def parallel(self, layers: int) -> ParallelLayout:
        tp = self.one((1, 1, 1, 2, 2, 3, 4, 8))
        pp = self.random.randint(1, min(4, layers)) if self.chance(0.4) else 1
        partition = None
        if pp > 1 and self.chance(0.4):
            cuts = sorted(self.random.sample(range(1, layers), pp - 1))
            partition = tuple([end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)])
        return ParallelLayout(
            tp=tp,
            pp=pp,
            ep=self.one((1, tp)),
            cp=self.one((1, 1, 1, 2)),
            attention_dp=self.chance(0.25),
            pp_partition=partition,
        )

    def draft(self, paged: Sequence[Layer], parallel: ParallelLayout) -> Draft:
        """Return draft layers like one of the target's: one geometry per life cycle, which a draft manager shares."""
        if not paged or self.chance(0.6):
            return Draft()
        layer = self.one(paged)
        mode = "folded" if parallel.attention_dp or self.chance(0.5) else "separate"
        return Draft(mode=mode, layers=(layer,) * self.random.randint(1, 2))


def random_spec(seed: int, *, mixed: bool, odd: bool = False) -> CacheSpec:
    """Return the spec of a seed; see ``Drawer``."""
    return Drawer(seed, mixed=mixed, odd=odd).spec()
