"""Greedy generation, beam search and speculative decoding over a ``Store``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import torch

from ...model.errors import SpecError
from ...sim.cache.sequence import token_of
from ...sim.cache.trace import MAX_BEAMS, Operation
from .model import VOCABULARY, HybridModel
from .store import StepRow, Store

Contexts = dict[tuple[int, int], list[int]]
"""All tokens of a request and beam, those included that the cache does not hold yet."""
_TOKEN_STEP: Final = 7


def prompt(text: int, tokens: int) -> list[int]:
    """Return the first tokens of a text of the running cache: equal prefixes of texts are equal tokens."""
    return [(_TOKEN_STEP * position + 11 * token_of(text, position) + 3) % VOCABULARY for position in range(tokens)]


class Generated(msgspec.Struct, frozen=True):
    """What one request got: its new tokens, and the largest of the logits that chose each of them."""

    tokens: tuple[int, ...]
    peaks: tuple[float, ...]


class Beams(msgspec.Struct, frozen=True):
    """The beams of one request, best first: new tokens and the sums of their log probabilities.

    ``parents`` are, step by step, the beams that the beams went on from.
    """

    tokens: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]
    parents: tuple[tuple[int, ...], ...]

    @property
    def divergent(self) -> bool:
        """Whether beams went on from several parents that are not themselves."""
        own = tuple(range(len(self.scores)))
        return any(len(set(parents)) > 1 and parents != own for parents in self.parents)


class Drafted(msgspec.Struct, frozen=True):
    """Speculative decoding of one request: its new tokens, and for each step what was proposed and how many were right.

    With a greedy target the tokens are those of ``greedy``, however good the draft is.
    """

    tokens: tuple[int, ...]
    proposed: tuple[tuple[int, ...], ...]
    accepted: tuple[int, ...]


def greedy(
    model: HybridModel, store: Store, prompts: dict[int, Sequence[int]], count: int, *,
    texts: dict[int, int] | None = None, between: dict[int, Sequence[Operation]] | None = None, chunk: int = 0,
) -> dict[int, Generated]:  # fmt: skip
    """Return ``count`` new tokens of each request, all of them in one batch; ``texts`` number the prompts.

    ``between`` are operations to do before the step of that number: of the first new token, 1. Prompts are computed in
    chunks of at most ``chunk`` tokens (0: whole).
    """
    contexts: Contexts = {(request, 0): list(tokens) for request, tokens in prompts.items()}
    for request, tokens in prompts.items():
        store.apply(Operation("admit", request, len(tokens), (texts or {}).get(request, 0)))
    found: dict[int, tuple[list[int], list[float]]] = {request: ([], []) for request in prompts}
    for step in range(count):
        for operation in (between or {}).get(step, ()):
            store.apply(operation)
        if step:
            for request in prompts:
                store.apply(Operation("extend", request, 1))
        last: dict[int, torch.Tensor] = {}
        while len(last) < len(prompts):
            waiting = [request for request in prompts if request not in last]
            for row, states in _dispatch(model, store, contexts, waiting, chunk).items():
                if row.end == len(contexts[row.request, 0]):
                    last[row.request] = states[-1]
            store.apply(Operation("complete"))
        for request in prompts:
            logits = model.logits(last[request])
            token = int(logits.argmax())
            found[request][0].append(token)
            found[request][1].append(float(logits[token]))
            contexts[request, 0].append(token)
    return {request: Generated(tuple(tokens), tuple(peaks)) for request, (tokens, peaks) in found.items()}


def beam_search(
    model: HybridModel, store: Store, tokens: Sequence[int], count: int, *, width: int = MAX_BEAMS, request: int = 0,
    text: int = 0,
) -> Beams:  # fmt: skip
    """Return the ``width`` most probable continuations of ``count`` tokens that a beam search finds.

    Of equal candidates the one of the lower beam, then the lower token comes first.
    """
    contexts: Contexts = {(request, 0): list(tokens)}
    store.apply(Operation("admit", request, len(tokens), text))
    ((_, states),) = _dispatch(model, store, contexts, [request]).items()
    store.apply(Operation("complete"))
    scores = torch.zeros(1, dtype=torch.float64)
    logits = model.logits(states[-1])[None]
    history: list[tuple[int, ...]] = []
    for step in range(count):
        scores, chosen = torch.sort((scores[:, None] + torch.log_softmax(logits, -1)).flatten(), descending=True,
                                    stable=True)  # fmt: skip
        scores, chosen = scores[:width], chosen[:width]
        parents = tuple((chosen // VOCABULARY).tolist())  # floor: candidates run over beams, then tokens
        contexts = {
            (request, beam): [*contexts[request, parent], token]
            for beam, (parent, token) in enumerate(zip(parents, (chosen % VOCABULARY).tolist(), strict=True))
        }
        if step == 0:
            store.apply(Operation("fork", request, width))
        else:
            history.append(parents)
            store.apply(Operation("reorder", request, sum([parent << 2 * beam for beam, parent in enumerate(parents)])))
        if step + 1 == count:
            break
        store.apply(Operation("extend", request, 1))
        ready = {row.beam: states for row, states in _dispatch(model, store, contexts, [request]).items()}
        store.apply(Operation("complete"))
        logits = torch.stack([model.logits(ready[beam][-1]) for beam in range(width)])
    found = tuple([tuple(contexts[request, beam][len(tokens) :]) for beam in range(width)])
    return Beams(found, tuple(scores.tolist()), tuple(history))


def speculative(
    model: HybridModel, store: Store, tokens: Sequence[int], count: int, *, request: int = 0, text: int = 0
) -> Drafted:
    """Return ``count`` new tokens, proposed by the draft layers and checked by the target.

    Draft layer ``i`` proposes the token ``i + 2`` positions on. Every step computes the last accepted token and all
    proposals, and what was not right is taken back. Raises ``SpecError`` for a model that cannot.
    """
    modules = len(model.spec.draft.layers)
    if not modules:
        raise SpecError("draft", "found no draft layer, needs one to propose tokens")
    if any(layer.__struct_config__.tag == "recurrent" for layer in model.spec.layers):
        raise SpecError("layers", "found a recurrent layer, whose state cannot take rejected tokens back")
    known = list(tokens)
    proposals: list[int] = []
    store.apply(Operation("admit", request, len(tokens), text))
    proposed: list[tuple[int, ...]] = []
    accepted: list[int] = []
    while len(known) < len(tokens) + count:
        ((row, states),) = _dispatch(model, store, {(request, 0): [*known, *proposals]}, [request]).items()
        wanted = [int(model.logits(state).argmax()) for state in states[len(states) - 1 - len(proposals) :]]
        right = 0
        while right < len(proposals) and proposals[right] == wanted[right]:
            right += 1
        if proposals:
            proposed.append(tuple(proposals))
            accepted.append(right)
        rejected = len(proposals) - right
        known += [*proposals[:right], wanted[right]]
        proposals = _propose(model, store, row, states[: len(states) - rejected], known, modules)
        store.apply(Operation("complete"))
        if rejected:
            store.apply(Operation("rewind", request, rejected))
        store.apply(Operation("extend", request, 1 + modules))
    return Drafted(tuple(known[len(tokens) : len(tokens) + count]), tuple(proposed), tuple(accepted))


def _propose(
    model: HybridModel, store: Store, row: StepRow, states: list[torch.Tensor], known: list[int], modules: int
) -> list[int]:
    """Return a token of each draft layer; ``states`` are the target's of the row's tokens that were right."""
    proposals: list[int] = []
    for module in range(modules):
        sequence = [*known, *proposals]
        states = [
            model.draft(store, row, module, position, state, sequence[position + 1 + module])
            for position, state in enumerate(states, row.start)
        ]
        proposals.append(int(model.logits(states[-1]).argmax()))
    return proposals


def _dispatch(
    model: HybridModel, store: Store, contexts: Contexts, requests: Sequence[int], chunk: int = 0
) -> dict[StepRow, list[torch.Tensor]]:
    """Dispatch a step of the requests and compute it; return the last hidden states of every row's tokens.

    The step is still in flight: complete it when all is written.
    """
    store.apply(Operation("step", sum([1 << request for request in requests]), chunk))
    found = {}
    for row in store.rows():
        tokens = contexts[row.request, row.beam]
        found[row] = [model.hidden(store, row, position, tokens[position]) for position in range(row.start, row.end)]
    return found
