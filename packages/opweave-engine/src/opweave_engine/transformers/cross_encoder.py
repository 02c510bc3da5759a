"""A transformers sequence classifier with one label, which scores pairs of texts."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from opweave_engine.models.config import UnsupportedModelError
from opweave_engine.transformers.model import TransformersEncoder


class TransformersCrossEncoder(TransformersEncoder):
    """A cross-encoder of transformers with loaded weights.

    Args:
        classifier: the model with its head, in evaluation mode.

    Attributes:
        num_token_types: token type ids are below it; 0: the model does not use them.

    Raises:
        UnsupportedModelError: the model does not have exactly one label.
    """

    def __init__(self, classifier: Any) -> None:
        if classifier.config.num_labels != 1:
            raise UnsupportedModelError(
                f"{type(classifier).__name__} with {classifier.config.num_labels} labels is not "
                "supported. A sequence classifier must have one label, the score of a pair of "
                "texts ('id2label' in config.json)."
            )
        super().__init__(classifier.base_model)
        self.classifier = classifier.requires_grad_(False)
        is_typed = "token_type_ids" in inspect.signature(classifier.forward).parameters
        types: int | None = getattr(self._text, "type_vocab_size", None)
        self.num_token_types = types or 0 if is_typed else 0

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        cu_seqlens: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the logit of each pair: ``(pairs,)``.

        Args:
            input_ids: ``(T,)``, integer: packed pairs.
            positions: unused; the model computes the positions.
            cu_seqlens: ``(pairs + 1,)``, int32: the start of each pair, and the end of the last.
            token_type_ids: ``(T,)``, integer; None: all 0. Models without token types ignore them.
        """
        sizes = cu_seqlens.diff().tolist()
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        texts = torch.split_with_sizes(input_ids, sizes)
        pairs = list(zip(texts, torch.split_with_sizes(types, sizes), strict=True))
        # Without an id for padding, decoders cannot find the last token of a padded pair.
        is_alone = self._text.pad_token_id is None or self._is_by_length
        batches = [[pair] for pair in pairs] if is_alone else [pairs]
        return torch.cat([self._logits(batch) for batch in batches])

    def _logits(self, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        ids, types = zip(*pairs, strict=True)
        padded = pad_sequence(list(ids), batch_first=True, padding_value=self._padding)
        mask = pad_sequence([torch.ones_like(text) for text in ids], batch_first=True)
        options = {"attention_mask": mask.long()}
        if self.num_token_types:
            options["token_type_ids"] = pad_sequence(list(types), batch_first=True)
        logits: Tensor = self.classifier(input_ids=padded, **options).logits
        return logits[:, 0]
