"""Transformers encoders and cross-encoders with the engine's interface of encoders."""

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from opweave.optimization import optimize
from opweave_engine.models.causal_lm import Encoder
from opweave_engine.models.config import UnsupportedModelError
from opweave_engine.transformers.model import ropes_by_length


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
        self.hidden_size, self.vocab_size = self._text.hidden_size, self._text.vocab_size
        self.max_positions = _max_positions(base, self._text, self._padding)
        self.report = optimize(base)

    def forward(self, input_ids: Tensor, positions: Tensor, *, cu_seqlens: Tensor) -> Tensor:
        """Return the hidden states: ``(T, hidden_size)``.

        Args:
            input_ids: ``(T,)``, integer: packed texts.
            positions: unused; the model computes the positions.
            cu_seqlens: ``(texts + 1,)``, int32: the start of each text, and the end of the last.
        """
        texts = torch.split_with_sizes(input_ids, cu_seqlens.diff().tolist())
        if self._is_by_length:
            return torch.cat([self.base(input_ids=text[None])[0][0] for text in texts])
        ids, mask = self._padded(texts)
        hidden: Tensor = self.base(input_ids=ids, attention_mask=mask)[0][mask.bool()]
        return hidden

    def _padded(self, texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return texts, padded to one length, and their attention mask."""
        ids = pad_sequence(list(texts), batch_first=True, padding_value=self._padding)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        return ids, mask.long()


@torch.inference_mode()
def _max_positions(base: Any, config: Any, padding: int) -> int:
    """Return the length of the longest text for which the model has positions.

    RoBERTa and its relatives number tokens from the row after the padding's, so that the table of
    positions is longer than a text. The embeddings of one token at two places show the first: only
    the table of positions is read at two consecutive rows.
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
        padded, mask = self._padded(ids)
        options = {"attention_mask": mask}
        if self.num_token_types:
            options["token_type_ids"] = pad_sequence(list(types), batch_first=True)
        logits: Tensor = self.classifier(input_ids=padded, **options).logits
        return logits[:, 0]
