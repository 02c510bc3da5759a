"""A transformers encoder with the engine's interface of encoders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from opweave.integrations.optimize import optimize
from opweave.models.encoder import Encoder


class TransformersEncoder(Encoder):
    """A base model of transformers with loaded weights; its attention may be causal.

    Texts are padded to one length for a forward, with an attention mask, as transformers does.

    Args:
        base: the model, in evaluation mode.

    Attributes:
        config: its configuration.
        report: which modules run opweave's ops.
    """

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.config, self.dtype = base.config, base.dtype
        self.base = base.requires_grad_(False)
        self._text: Any = base.config.get_text_config(decoder=True)
        self._padding: int = self._text.pad_token_id or 0
        self.report = optimize(base)

    @property
    def hidden_size(self) -> int:
        return int(self._text.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self._text.vocab_size)

    @property
    def max_positions(self) -> int:
        table = int(self._text.max_position_embeddings)
        # RoBERTa and its relatives begin after the id of padding.
        numbered = hasattr(
            getattr(self.base, "embeddings", None), "create_position_ids_from_input_ids"
        )
        return table - self._padding - 1 if numbered else table

    def forward(self, input_ids: Tensor, positions: Tensor, *, cu_seqlens: Tensor) -> Tensor:
        """Return the hidden states: ``(T, hidden_size)``.

        Args:
            input_ids: ``(T,)``, integer: packed texts.
            positions: unused; the model computes the positions.
            cu_seqlens: ``(texts + 1,)``, int32: the start of each text, and the end of the last.
        """
        lengths = cu_seqlens.diff()
        texts = torch.split_with_sizes(input_ids, lengths.tolist())
        ids = pad_sequence(list(texts), batch_first=True, padding_value=self._padding)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        output = self.base(input_ids=ids, attention_mask=mask.long())
        hidden: Tensor = output[0][mask]
        return hidden
