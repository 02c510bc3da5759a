"""Runs the model on sequences that are packed one after the other."""

from __future__ import annotations

from collections.abc import Sequence as Batch
from itertools import accumulate

import torch
from torch import Tensor

from opweave.config import CompilationConfig
from opweave.engine.compilation import compiled_forward
from opweave.engine.kv_cache import PackedCaches, SequenceCache
from opweave.engine.sequence import Sequence
from opweave.models import ForwardContext, LlamaForCausalLM, forward_context

_FIRST_ALLOCATION = 256  # generated tokens that a sequence's cache has room for at first


class ModelRunner:
    """Computes the next token's scores; prefill and decode differ in the number of tokens only."""

    def __init__(self, model: LlamaForCausalLM, config: CompilationConfig) -> None:
        self.model = model
        self._forward = compiled_forward(model, config)

    @torch.inference_mode()
    def forward(self, sequences: Batch[Sequence]) -> Tensor:
        """Compute each sequence's new tokens, into its cache.

        Args:
            sequences: at least one; each has at least one token that is not computed.

        Returns:
            ``(sequences, vocab_size)``: the scores of the token after each sequence.
        """
        caches = [sequence.cache or self._allocate(sequence) for sequence in sequences]
        tokens = [sequence.uncomputed for sequence in sequences]
        counts = [len(new) for new in tokens]
        lengths = [cache.num_tokens + count for cache, count in zip(caches, counts, strict=True)]
        spans = zip(lengths, counts, strict=True)
        positions = [p for end, count in spans for p in range(end - count, end)]
        packed = PackedCaches(caches, counts)
        starts = self._starts(counts)
        with forward_context(ForwardContext(starts, self._starts(lengths), packed)):
            ids = self._ids([i for new in tokens for i in new])
            hidden = self._forward(ids, self._ids(positions))
        packed.advance()
        return self.model.compute_logits(hidden[starts[1:] - 1])

    def _allocate(self, sequence: Sequence) -> SequenceCache:
        room = min(sequence.max_tokens, _FIRST_ALLOCATION)
        sequence.cache = SequenceCache(
            self.model.config,
            sequence.num_prompt_tokens + room,
            dtype=self.model.dtype,
            device=self.model.device,
        )
        return sequence.cache

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)

    def _starts(self, counts: list[int]) -> Tensor:
        values = [0, *accumulate(counts)]
        return torch.tensor(values, dtype=torch.int32, device=self.model.device)
