"""``SelectionInputs``: everything that decides which cache manager a model gets, and the facts that rules ask of it.

A *fact* is a small function of one or a few inputs. Rules name facts and the values they want, so one table of rules
can be applied to a single configuration and to a whole grid of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

import msgspec

from ..errors import SpecError, require_choice, require_int, shown

SparseChoice: TypeAlias = Literal[
    "none", "skip_softmax", "dsa", "deepseek_v4", "minimax_m3", "qsa", "rocket", "glm_kpool"
]
SPARSE_CHOICES: Final = ("none", "skip_softmax", "dsa", "deepseek_v4", "minimax_m3", "qsa", "rocket", "glm_kpool")
KERNEL_ONLY: Final = ("skip_softmax",)
"""Sparse algorithms that change kernels alone: the cache is laid out as for dense attention."""
OWNERS: Final = tuple(name for name in SPARSE_CHOICES if name != "none" and name not in KERNEL_ONLY)
"""Sparse algorithms that store more than K and V, and so bring a manager of their own."""

MAX_BATCH: Final = 1 << 20
MAX_BEAMS: Final = 1 << 10
MAX_STAGES: Final = 1 << 14


class SelectionInputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configuration, as far as the choice of a manager goes.

    ``v2`` is the user's flag; ``auto`` leaves it to the model, which prefers V2 or (``model_prefers_v2`` false) has no
    preference. ``v2_beams`` says whether V2 of this build decodes several beams. ``hybrid``: ``no``, ``zero`` (a model
    of a hybrid kind without a recurrent layer here) or ``some``. ``geometry`` is ``variable`` when layers differ in KV
    heads or head dim. ``fp4_mla``: a latent cache in NVFP4. ``mrope_delta_cache``: the model keeps one position delta
    per sequence slot in a cache of another size. ``py_mamba`` and ``mamba_preference`` are the environment's
    ``TRTLLM_USE_PY_MAMBA`` and ``TLLM_MAMBA_MANAGER_PREFERENCE``; the transceiver counts where ``disaggregated``.
    ``max_batch`` counts requests.
    """

    sparse: SparseChoice = "none"
    v2: Literal["true", "false", "auto"] = "true"
    model_prefers_v2: bool = False
    beam_width: int = 1
    v2_beams: bool = True
    sleep: bool = False
    disaggregated: bool = False
    hybrid: Literal["no", "zero", "some"] = "no"
    geometry: Literal["uniform", "variable"] = "uniform"
    fp4_mla: bool = False
    block_reuse: bool = False
    rebalance: bool = False
    py_mamba: bool = False
    mamba_preference: Literal["unset", "mixed", "cpp"] = "unset"
    transceiver_runtime: Literal["cpp", "python"] = "cpp"
    transceiver_backend: Literal["nixl", "ucx"] = "nixl"
    attention_dp: bool = False
    pp: int = 1
    overlap: bool = True
    mrope_delta_cache: bool = False
    max_batch: int = 8

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            require_choice(field, getattr(self, field), choices)
        for field in _SWITCHES:
            if type(getattr(self, field)) is not bool:
                raise SpecError(field, f"found {shown(getattr(self, field))}, needs true or false")
        require_int("beam_width", self.beam_width, 1, MAX_BEAMS)
        require_int("pp", self.pp, 1, MAX_STAGES)
        require_int("max_batch", self.max_batch, 1, MAX_BATCH)


_CHOICES: Final = {
    "sparse": SPARSE_CHOICES,
    "v2": ("true", "false", "auto"),
    "hybrid": ("no", "zero", "some"),
    "geometry": ("uniform", "variable"),
    "mamba_preference": ("unset", "mixed", "cpp"),
    "transceiver_runtime": ("cpp", "python"),
    "transceiver_backend": ("nixl", "ucx"),
}
_SWITCHES: Final = (
    "model_prefers_v2",
    "v2_beams",
    "sleep",
    "disaggregated",
    "fp4_mla",
    "block_reuse",
    "rebalance",
    "py_mamba",
    "attention_dp",
    "overlap",
    "mrope_delta_cache",
)

AXES: Final[dict[str, tuple[Any, ...]]] = {
    "sparse": SPARSE_CHOICES,
    "v2": _CHOICES["v2"],
    "model_prefers_v2": (False, True),
    "beam_width": (1, 4),
    "v2_beams": (True, False),
    "sleep": (False, True),
    "disaggregated": (False, True),
    "hybrid": _CHOICES["hybrid"],
    "geometry": _CHOICES["geometry"],
    "fp4_mla": (False, True),
    "block_reuse": (False, True),
    "rebalance": (False, True),
    "py_mamba": (False, True),
    "mamba_preference": _CHOICES["mamba_preference"],
    "transceiver_runtime": _CHOICES["transceiver_runtime"],
    "transceiver_backend": _CHOICES["transceiver_backend"],
    "attention_dp": (False, True),
    "pp": (1, 2),
    "overlap": (True, False),
    "mrope_delta_cache": (False, True),
}
"""The whole grid: every input with its values, the ordinary one first. Of beam width and pipeline stages the rules ask
no more than whether there are several; the batch is a factor of all counts and no axis."""


class Fact(msgspec.Struct, frozen=True):
    """What rules may ask: ``of`` are the inputs it depends on, ``ask`` gives its value from theirs, in that order."""

    of: tuple[str, ...]
    ask: Callable[..., Any]


def _itself(value: Any) -> Any:
    return value


def _lacking(beam_width: int, v2_beams: bool, sleep: bool) -> tuple[str, ...]:
    """Return the features asked for that V2 does not have, as messages call them."""
    beams = ("several beams",) if beam_width > 1 and not v2_beams else ()
    return beams + (("sleep",) if sleep else ())


FACTS: Final[dict[str, Fact]] = {
    **{field: Fact((field,), _itself) for field in AXES if field not in ("beam_width", "pp")},
    "flag_is_true": Fact(("v2",), lambda v2: v2 == "true"),
    "asks_v2": Fact(("v2", "model_prefers_v2"), lambda v2, prefers: v2 == "true" or (v2 == "auto" and prefers)),
    "owns_its_manager": Fact(("sparse",), lambda sparse: sparse in OWNERS),
    "lacking": Fact(("beam_width", "v2_beams", "sleep"), _lacking),
    "incompatible": Fact(("beam_width", "v2_beams", "sleep"), lambda *features: bool(_lacking(*features))),
    "recurrent": Fact(("hybrid",), lambda hybrid: hybrid == "some"),
    "mamba_switch": Fact(("py_mamba", "mamba_preference"), lambda python, preference: python or preference != "unset"),
    "wants_python_mamba": Fact(
        ("py_mamba", "mamba_preference"), lambda python, preference: python or preference == "mixed"
    ),
    "python_nixl": Fact(
        ("transceiver_runtime", "transceiver_backend"),
        lambda runtime, backend: runtime == "python" and backend == "nixl",
    ),
}
"""All facts by name; an input with few values is a fact itself."""


def fact_of(inputs: SelectionInputs, name: str) -> Any:
    """Return the value of the fact called ``name`` for ``inputs``."""
    fact = FACTS[name]
    return fact.ask(*[getattr(inputs, field) for field in fact.of])
