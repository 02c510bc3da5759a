"""The two halves of a causal transformers model: hidden states and logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from opweave_engine.models.errors import UnsupportedModelError


class Halves(nn.Module):
    """Computes hidden states with the base model, and logits with everything after it.

    Args:
        causal_lm: a causal language model of transformers.
        base: the module of it that computes the last hidden states.
        output_class: of the results of *base*.
    """

    def __init__(self, causal_lm: Any, base: Any, output_class: Any) -> None:
        super().__init__()
        self.causal_lm, self.base, self._output_class = causal_lm, base, output_class

    @classmethod
    def of(cls, causal_lm: Any, tokens: Tensor) -> tuple[Self, Tensor]:
        """Find the base model, and return the logits ``(T, vocab_size)`` of *tokens*, too.

        Raises:
            UnsupportedModelError: no module returns hidden states.
        """
        found: list[tuple[Any, Any]] = []

        def note(module: nn.Module, _: Any, output: Any) -> None:
            if module is not causal_lm and hasattr(output, "last_hidden_state"):
                found.append((module, type(output)))

        with ExitStack() as hooks:
            for module in causal_lm.modules():
                hooks.callback(module.register_forward_hook(note).remove)
            logits: Tensor = causal_lm(input_ids=tokens[None], use_cache=False).logits
        if not found:
            raise UnsupportedModelError(
                f"{type(causal_lm).__name__} has no base model that returns hidden states."
            )
        # The outermost module is the last to return.
        return cls(causal_lm, *found[-1]), logits[0]

    def hidden(self, input_ids: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """Return the hidden states ``(T, hidden_size)`` of one row of tokens, and all outputs.

        Args:
            input_ids: ``(T,)``, integer.
            options: further arguments of the base model.
        """
        output = self.base(input_ids=input_ids[None], **options)
        return output[0][0], output

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``(N, vocab_size)`` of ``(N, hidden_size)``.

        The model's own forward runs with *hidden* in place of its base model's result, so that
        scaling, soft caps and biases are the model's.
        """
        output = self._output_class(last_hidden_state=hidden[None])
        # Some models look at the shape of the ids.
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with _replaced_forward(self.base, output):
            logits: Tensor = self.causal_lm(input_ids=ids, use_cache=False).logits
        return logits[0]


@contextmanager
def _replaced_forward(module: nn.Module, result: Any) -> Iterator[None]:
    vars(module)["forward"] = lambda *args, **kwargs: result
    try:
        yield
    finally:
        del vars(module)["forward"]


def ropes_by_length(config: Any) -> set[str]:
    """Return the rope types of a configuration whose frequencies depend on a sequence's length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # Of all layers, or by kind of layer.
    ropes = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    kinds = {kind for rope in ropes if isinstance(kind := rope.get("rope_type"), str)}
    return kinds & {"dynamic", "longrope"}
