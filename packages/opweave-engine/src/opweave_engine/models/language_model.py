"""Base class of models that predict the next token."""

from __future__ import annotations

from torch import Tensor

from opweave_engine.models.weights import CheckpointModel


class LanguageModel(CheckpointModel):
    """A model that predicts the next token of packed sequences.

    Attributes:
        vocab_size: the number of logits.
        max_positions: the longest sequence that the model supports; None: any length.
        needs_whole_prompts: whether the hidden states of a prompt's tokens depend on the tokens
            that follow, or on their number, so that a prompt must not be split over steps.
    """

    vocab_size: int
    max_positions: int | None
    needs_whole_prompts: bool = False

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden state of every token: ``(T, hidden_size)``.

        Args:
            input_ids: ``(T,)``, integer. One sequence, unless a forward context says otherwise.
            positions: ``(T,)``, integer: the index of each token in its sequence.
        """
        raise NotImplementedError

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token, ``(N, vocab_size)``, of ``(N, hidden_size)``."""
        raise NotImplementedError
