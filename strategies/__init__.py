"""Hypothesis strategies for specs and layouts: compose them in your own tests.

>>> from hypothesis import given, settings
>>> from kvsan.sim.verdict import judge
>>> from kvsan.strategies import cache_specs
>>> @settings(max_examples=20, derandomize=True, database=None)
... @given(cache_specs(family="dense-v1", draft_modes=["none"]))
... def v1_has_no_faults(spec):
...     assert not judge(spec, "trtllm-v1").faults
>>> v1_has_no_faults()
"""

from __future__ import annotations

from .census import Census, census
from .classes import layer_classes, layer_patterns
from .deployment import consumers, drafts
from .families import FAMILIES, family_of
from .formats import kv_formats, state_formats
from .layers import attention_layers, hybrid_layers, latent_layers, recurrent_layers
from .parallel import parallel_layouts
from .peers import peer_pairs
from .planes import side_planes
from .rare import CLASSES, FITTING, classes_of, observe
from .raw import raw_layouts
from .recipes import FAMILY_RECIPES, RECIPES
from .selections import accuracy_references, geometry_specs, kv_requests, selection_inputs
from .specs import cache_specs, specs_for

__all__ = [
    "CLASSES",
    "FAMILIES",
    "FAMILY_RECIPES",
    "FITTING",
    "RECIPES",
    "Census",
    "accuracy_references",
    "attention_layers",
    "cache_specs",
    "census",
    "classes_of",
    "consumers",
    "drafts",
    "family_of",
    "geometry_specs",
    "hybrid_layers",
    "kv_formats",
    "kv_requests",
    "latent_layers",
    "layer_classes",
    "layer_patterns",
    "observe",
    "parallel_layouts",
    "peer_pairs",
    "raw_layouts",
    "recurrent_layers",
    "selection_inputs",
    "side_planes",
    "specs_for",
    "state_formats",
]
