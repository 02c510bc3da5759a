"""A transformers encoder with the engine's interface of encoders."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from opweave.optimization import optimize
from opweave_engine.models.encoder import Encoder
from opweave_engine.models.errors import UnsupportedModelError
from opweave_engine.transformers.base_model import ropes_by_length


class TransformersEncoder(Encoder):
    """A base model of transformers with loaded weights; its attention may be causal.

    Texts are padded to one length for a forward, with an attention mask, as transformers does. If
    the model's rope depends on the length, each text has a forward of its own.

    Args:
        base: the model, in evaluation mode.

    Attributes:
        config: its configuration.
        report: which modules run opweave's ops.

    Raises:
        UnsupportedModelError: its configuration does not limit the length of texts.
    """

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.config, self.dtype = base.config, base.dtype
        self.base = base.requires_grad_(False)
        self._text: Any = base.config.get_text_config(decoder=True)
        self._padding: int = self._text.pad_token_id or 0
        self._is_by_length = bool(ropes_by_length(self._text))
        self._max_positions = _max_positions(base, self._text, self._padding)
        self.report = optimize(base)

    @property
    def hidden_size(self) -> int:
        return int(self._text.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self._text.vocab_size)

    @property
    def max_positions(self) -> int:
        return self._max_positions

    def forward(self, input_ids: Tensor, positions: Tensor, *, cu_seqlens: Tensor) -> Tensor:
        """Return the hidden states: ``(T, hidden_size)``.

        Args:
            input_ids: ``(T,)``, integer: packed texts.
            positions: unused; the model computes the positions.
            cu_seqlens: ``(texts + 1,)``, int32: the start of each text, and the end of the last.
        """
        lengths = cu_seqlens.diff()
        texts = torch.split_with_sizes(input_ids, lengths.tolist())
        if self._is_by_length:
            return torch.cat([self.base(input_ids=text[None])[0][0] for text in texts])
        ids = pad_sequence(list(texts), batch_first=True, padding_value=self._padding)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        output = self.base(input_ids=ids, attention_mask=mask.long())
        hidden: Tensor = output[0][mask]
        return hidden


@torch.inference_mode()
def _max_positions(base: Any, config: Any, padding: int) -> int:
    """Return the length of the longest text for which the model has positions.

    RoBERTa and its relatives number tokens from the row after the padding's, so that the table of
    positions is longer than a text. The embeddings of one token at two places show the first row: only the
    table of positions is read at two consecutive rows.
    """
    limits = [getattr(config, "max_position_embeddings", None) or 0]
    if limits[0] < 1:
        raise UnsupportedModelError(
            f"{type(base).__name__} is not supported as an encoder: its configuration lacks a "
            "positive max_position_embeddings, the length of the longest text."
        )

    def record(table: Any, inputs: tuple[Any, ...]) -> None:
        if inputs and not inputs[0].is_floating_point() and inputs[0].numel() == len(ids[0]):
            first, second = inputs[0].flatten().tolist()
            if second == first + 1:
                limits.append(len(table.weight) - first)

    token = next(token for token in range(config.vocab_size) if token != padding)
    ids = torch.full((1, 2), token, device=base.device)
    if (embeddings := getattr(base, "embeddings", None)) is not None:
        # LUKE's fail without them.
        typed = "token_type_ids" in inspect.signature(embeddings.forward).parameters
        options = {"token_type_ids": torch.zeros_like(ids)} if typed else {}
        with ExitStack() as hooks:
            for module in embeddings.children():
                if hasattr(module, "weight"):
                    hooks.callback(module.register_forward_pre_hook(record).remove)
            embeddings(ids, **options)
    return min(limits)
