"""The rule about what kernels compute; it is judged where kernels run over a layout in memory, not on a layout."""

from __future__ import annotations

from .rule import Rule

RULE = Rule(
    "kernel-result",
    "a kernel disagrees with its float64 reference",
    "A kernel that is given what a consumer is given (pointers, page tables, strides) must compute what plain float64 "
    "code computes from the values that were put in. Wrong addresses show as wrong answers: the finding names the "
    "place in the answer, the first position of K or V that reads back something else than was written, and the "
    "formula that leads there.",
    None,
)
