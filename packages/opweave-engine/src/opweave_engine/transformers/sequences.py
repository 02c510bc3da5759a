"""Forwards that run one sequence at a time, for models that do not support packed sequences."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from opweave.layers.mamba.stateful import StatefulLayer
from opweave.layers.mamba.states import states_of
from opweave_engine.transformers.base_model import Halves, ropes_by_length
from opweave_engine.transformers.errors import NotSuitableError

# The names under which models take their cache, and return it.
_CACHES = ("past_key_values", "cache_params", "state")


@dataclass
class _Sequence:
    tokens: Tensor
    cache: Any


class RecomputedSequences(StatefulLayer):
    """Computes all tokens of a sequence in every step, without a cache.

    The engine gives each sequence a slot, as for layers with recurrent states; a slot holds the
    tokens of its sequence.

    Args:
        halves: the model.
    """

    description: ClassVar[str] = "one sequence at a time, and computes all its tokens in every step"

    def __init__(self, halves: Halves) -> None:
        super().__init__("sequences")
        # Every sequence counts one element, so that the engine can size the cache.
        self.state_shapes = {"conv": (1,)}
        self.halves = halves
        self._kept: dict[int, _Sequence] = {}

    @classmethod
    def of(cls, halves: Halves, tokens: Tensor, undo: ExitStack) -> Self:
        """Return the forward of a model. The other arguments are those of packed sequences."""
        return cls(halves)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states ``(T, hidden_size)`` of the new tokens of packed sequences."""
        states = states_of(input_ids)
        ends = states.query_start_loc.tolist()
        found = []
        for first, end, slot in zip(ends[:-1], ends[1:], states.slot_idx.tolist(), strict=True):
            if positions[first] == 0:
                self._kept.pop(slot, None)
            found.append(self._run(slot, input_ids[first:end]))
        return torch.cat(found)

    def _run(self, slot: int, new: Tensor) -> Tensor:
        known = self._kept.get(slot)
        tokens = new if known is None else torch.cat([known.tokens, new])
        hidden, cache = self.compute(tokens, len(new), None if known is None else known.cache)
        if slot >= 0:  # else nothing is to be kept
            self._kept[slot] = _Sequence(tokens, cache)
        return hidden

    def compute(self, tokens: Tensor, new: int, cache: Any) -> tuple[Tensor, Any]:
        """Return the hidden states of the last *new* tokens, and the sequence's cache.

        Args:
            tokens: ``(T,)``: the sequence up to here.
            new: how many of them have not been computed yet.
            cache: what was returned for the earlier ones; None for a new sequence.
        """
        hidden, _ = self.halves.hidden(tokens, use_cache=False)
        return hidden[-new:], None


class CachedSequences(RecomputedSequences):
    """Keeps the model's own cache of each sequence.

    The next token is computed with the cache. Several tokens that follow cached ones are computed
    together with those, in a new cache: recurrent layers of transformers continue with one token at
    a time only.

    Raises:
        NotSuitableError: the model does not take a cache.
    """

    description: ClassVar[str] = "one sequence at a time, with the model's own cache"

    def __init__(self, halves: Halves) -> None:
        super().__init__(halves)
        parameters = inspect.signature(halves.base.forward).parameters
        names = [name for name in _CACHES if name in parameters]
        if not names:
            raise NotSuitableError("it does not take a cache")
        self._name, self._takes_positions = names[0], "position_ids" in parameters
        config = halves.causal_lm.config.get_text_config(decoder=True)
        self._may_be_outdated = bool(ropes_by_length(config))

    def _is_outdated(self, tokens: Tensor, cache: Any) -> bool:
        """Whether the model does without *cache* for the last of *tokens*.

        Some models whose rope depends on the length do so at the token at which it changes, in the
        method by which transformers' ``generate`` prepares each step.
        """
        prepared = self.halves.causal_lm.prepare_inputs_for_generation(
            tokens[None], next_sequence_length=1, use_cache=True, **{self._name: cache}
        )
        return prepared.get(self._name) is None

    def compute(self, tokens: Tensor, new: int, cache: Any) -> tuple[Tensor, Any]:
        options: dict[str, Any] = {"use_cache": True}
        is_new = cache is None or new > 1
        if is_new or (self._may_be_outdated and self._is_outdated(tokens, cache)):
            hidden, output = self.halves.hidden(tokens, **options)
            return hidden[-new:], getattr(output, self._name)
        if self._takes_positions:
            options["position_ids"] = torch.full_like(tokens[:1], len(tokens) - 1)[None]
        hidden, output = self.halves.hidden(tokens[-1:], **options, **{self._name: cache})
        return hidden, getattr(output, self._name)
