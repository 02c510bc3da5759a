"""Forwards of packed sequences, with attention over the engine's paged cache."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from opweave_engine.transformers import attention
from opweave_engine.transformers.base_model import Halves, ropes_by_length
from opweave_engine.transformers.errors import NotSuitableError


class PackedSequences(nn.Module):
    """Computes packed sequences in one forward of a model.

    Args:
        halves: the model, whose attention layers have been recorded.
    """

    description: ClassVar[str] = "on packed sequences, with a paged cache"

    def __init__(self, halves: Halves) -> None:
        super().__init__()
        self.halves = halves

    @classmethod
    def of(cls, halves: Halves, tokens: Tensor, undo: ExitStack) -> Self:
        """Replace the attention of a model.

        Args:
            halves: the model.
            tokens: ``(T,)``: a sequence to record its attention layers with.
            undo: gets what brings back the model's attention.

        Raises:
            NotSuitableError: the model needs more than attention to earlier tokens.
        """
        model: Any = halves.causal_lm
        if by_length := ropes_by_length(model.config.get_text_config(decoder=True)):
            raise NotSuitableError(f"its rope ({', '.join(by_length)}) depends on the length")
        before = model.config._attn_implementation
        undo.callback(attention.remove, model, before)
        attention.install(model)
        with attention.recording() as recorder:
            positions = torch.arange(len(tokens), device=tokens.device)
            cls(halves).forward(tokens, positions)
        if not recorder.callers:
            raise NotSuitableError("its layers do not use transformers' attention interface")
        return cls(halves)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states: ``(T, hidden_size)``."""
        hidden, _ = self.halves.hidden(input_ids, position_ids=positions[None], use_cache=False)
        return hidden
