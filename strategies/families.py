"""Families of specs: which layers stand together in one model, by what the allocators of a family support.

``dense`` is what plain V2 takes: K/V or latent layers of any mixed geometry, index planes on latent layers, recurrent
and hybrid layers. ``dense-v1`` is the part of it that V1 takes too: one head dim, one KV format, one recurrent shape.
``qsa`` is sparse attention of one geometry with side planes, and recurrent layers. ``any`` is everything a spec can
say, whether or not anybody supports it.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from ..model.errors import SpecError, shown

FamilyName: TypeAlias = Literal["dense", "dense-v1", "qsa", "any"]
LayerKind: TypeAlias = Literal["attention", "latent", "recurrent", "hybrid", "uncached"]
LAYER_KIND_NAMES: Final[tuple[LayerKind, ...]] = ("attention", "latent", "recurrent", "hybrid", "uncached")


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What a family allows.

    ``bases`` are the kinds of a model's first layer class, ``attention`` and ``latent`` what its other classes may
    be, as variations of the first; ``drafts`` and ``separate_drafts`` the same for draft layers.
    """

    name: FamilyName
    bases: tuple[LayerKind, ...]
    attention: tuple[str, ...]
    latent: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ("twin",)
    separate_drafts: tuple[str, ...] = ("twin", "geometry")
    sparse_attention: bool = False
    layer_formats: bool = False
    auxiliary: bool = True
    one_state: bool = False
    overrides: bool = False


FAMILIES: Final[dict[str, Family]] = {
    "dense": Family(
        name="dense",
        bases=("attention", "attention", "latent"),
        attention=("window", "recurrent", "heads", "format", "geometry", "hybrid", "uncached"),
        latent=("window", "recurrent", "planes", "format", "geometry", "uncached"),
        drafts=("twin", "geometry", "format"),
        separate_drafts=("twin", "geometry", "format", "attention"),
        layer_formats=True,
        overrides=True,
    ),
    "dense-v1": Family(
        name="dense-v1",
        bases=("attention", "attention", "latent"),
        attention=("window", "recurrent", "heads", "hybrid", "uncached"),
        latent=("window", "recurrent", "plain", "uncached"),
        separate_drafts=("twin", "geometry", "attention"),
        auxiliary=False,
        one_state=True,
    ),
    "qsa": Family(
        name="qsa",
        bases=("attention",),
        attention=("recurrent", "plain", "hybrid", "planes", "uncached"),
        drafts=("twin", "plain"),
        separate_drafts=("twin", "geometry", "plain"),
        sparse_attention=True,
    ),
    "any": Family(
        name="any",
        bases=("attention", "latent", "attention"),
        attention=(
            "window",
            "recurrent",
            "plain",
            "heads",
            "format",
            "geometry",
            "hybrid",
            "planes",
            "loose",
            "uncached",
        ),
        latent=("window", "recurrent", "planes", "format", "geometry", "attention", "loose", "uncached"),
        drafts=("twin", "geometry", "format", "attention"),
        separate_drafts=("twin", "geometry", "format", "attention"),
        sparse_attention=True,
        layer_formats=True,
        overrides=True,
    ),
}


def family_named(name: str) -> Family:
    """Return a family; raise ``SpecError`` listing the known ones."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise SpecError("family", f"found {shown(name)}, needs one of {', '.join(FAMILIES)}") from None


def family_of(allocator: str) -> FamilyName:
    """Return the family whose specs the allocator called ``allocator`` mostly supports.

    A faulty allocator is taken for a variation of the QSA managers, and one of nobody's knowledge gets everything.

    >>> family_of("trtllm-v1"), family_of("trtllm-v2"), family_of("fault:bare-assert"), family_of("my.module:allocate")
    ('dense-v1', 'dense', 'qsa', 'any')
    """
    if allocator == "trtllm-v1":
        return "dense-v1"
    if allocator == "trtllm-v2" or allocator.startswith(("vllm", "sglang")):
        return "dense"
    return "qsa" if allocator.startswith(("trtllm-v2-qsa", "fault:")) else "any"
