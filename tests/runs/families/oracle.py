"""Greedy decoding by transformers itself, without a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from runs.families.checkpoint import build
from runs.families.sizes import CONTEXT, SPECIAL, VOCABULARY

LENGTHS = (1, 9, 70, 300)
COUNT = 8  # tokens after each prompt
_SEEDS = 20
_CLEAR = 1e-3  # least difference of the two largest logits, in standard deviations of all


@dataclass(frozen=True)
class Continuation:
    """The greedy continuation of a prompt.

    Attributes:
        prompt: token ids.
        tokens: token ids that follow.
        logprobs: of *tokens*.
        margin: the smallest difference between the logits of the two most likely tokens, in
            standard deviations of all logits.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    margin: float


class UnclearError(Exception):
    """No random weights give greedy continuations that rounding does not change."""


def reference(name: str) -> tuple[Any, list[Continuation]]:
    """Return the model of an architecture, and its greedy continuations of random prompts.

    The first random weights are taken with which no two tokens are about equally likely.
    """
    for seed in range(_SEEDS):
        model, continuations = build(name, seed), []
        for prompt in _prompts(seed, CONTEXT):
            continuations.append(_continuation(model, prompt))
            if not continuations[-1].margin > _CLEAR:
                break
        else:
            if len({token for each in continuations for token in each.tokens}) > len(LENGTHS):
                return model, continuations
    raise UnclearError(f"{_SEEDS} models of {name} choose between equally likely tokens")


def _prompts(seed: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(SPECIAL, VOCABULARY - 1, (length,), generator=generator).tolist()
        for length in LENGTHS
        if length + COUNT <= longest
    ]


def _continuation(model: Any, prompt: list[int]) -> Continuation:
    """Write after *prompt*, each token by a forward of the whole text."""
    ids, logprobs, margin = list(prompt), [], math.inf
    for _ in range(COUNT):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double()
        first, second = logits.topk(2).values.tolist()
        margin = min(margin, (first - second) / logits.std().item())
        token = int(logits.argmax())
        logprobs.append(logits.log_softmax(-1)[token].item())
        ids.append(token)
    return Continuation(prompt, ids[len(prompt) :], logprobs, margin)
