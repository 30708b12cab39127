"""What a caller of ``cache_specs`` pins or restricts, in one frozen value."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from ..model.errors import SpecError, require_int, shown
from ..model.formats import ElementFormat
from ..model.layers import Layer
from ..model.parallel import ParallelLayout
from ..model.spec import MAX_LAYERS, Consumer
from .families import LAYER_KIND_NAMES, Family, LayerKind

DRAFT_MODES = ("none", "folded", "separate")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``cache_specs``; a strategy of None is drawn from the module's own tables.

    ``pinned`` names the axes that were given, which no rare recipe may touch.
    """

    family: Family
    kv_formats: st.SearchStrategy[ElementFormat] | None = None
    state_formats: st.SearchStrategy[ElementFormat] | None = None
    tokens_per_block: st.SearchStrategy[int] | None = None
    heads: st.SearchStrategy[int] | None = None
    head_dims: st.SearchStrategy[int] | None = None
    layers: st.SearchStrategy[tuple[Layer, ...]] | None = None
    layer_classes: st.SearchStrategy[tuple[Layer, ...]] | None = None
    parallel: st.SearchStrategy[ParallelLayout] | None = None
    consumers: st.SearchStrategy[Consumer] | None = None
    slots: st.SearchStrategy[int] | None = None
    kinds: tuple[LayerKind, ...] = LAYER_KIND_NAMES
    draft_modes: tuple[str, ...] = DRAFT_MODES
    min_layers: int = 1
    max_layers: int = 12
    max_classes: int = 3
    windows: bool = True
    sparse: bool | None = None
    layer_formats: bool | None = None
    quotas: bool = True
    recipes: tuple[str, ...] = ()
    always: bool = False
    plain: bool = False

    def __post_init__(self) -> None:
        require_int("min_layers", self.min_layers, 1, MAX_LAYERS)
        require_int("max_layers", self.max_layers, self.min_layers, MAX_LAYERS)
        require_int("max_classes", self.max_classes, 1, 16)
        for field, found, known in (
            ("draft_modes", self.draft_modes, DRAFT_MODES),
            ("kinds", self.kinds, LAYER_KIND_NAMES),
        ):
            if not found or not set(found) <= set(known):
                raise SpecError(field, f"found {shown(found)}, needs some of {', '.join(known)}")

    @property
    def layer_formats_allowed(self) -> bool:
        """Whether layers may have KV formats of their own: as given, else where neither family nor caller says one."""
        if self.layer_formats is not None:
            return self.layer_formats
        return self.family.layer_formats and self.kv_formats is None

    @property
    def pinned(self) -> frozenset[str]:
        """The axes that the caller pinned."""
        strategies = ("kv_formats", "state_formats", "tokens_per_block", "heads", "head_dims", "parallel", "layers")
        found = {name for name in strategies if getattr(self, name) is not None}
        if self.layer_classes is not None or not {"attention", "latent"} & set(self.kinds):
            found.add("layers")
        if not self.windows:
            found.add("windows")
        if self.sparse is False:
            found.add("planes")
        if not self.layer_formats_allowed:
            found.add("layer_formats")
        return frozenset(found)
