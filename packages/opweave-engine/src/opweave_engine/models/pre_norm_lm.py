"""Language models with pre-norm blocks, which differ only in the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from opweave.layers import RMSNorm, VocabParallelEmbedding
from opweave_engine.models.causal_lm import CausalLM, Decoder
from opweave_engine.models.decoder_layer import DecoderLayer


class PreNormConfig(Protocol):
    """The configuration of a pre-norm language model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


class PreNormLM(CausalLM):
    """An embedding, blocks, a norm and the output matrix.

    Args:
        config: the model's sizes.
        layer: builds the block with a given index.
        dtype: dtype of weights and activations.
    """

    def __init__(
        self,
        config: PreNormConfig,
        layer: Callable[[int], DecoderLayer],
        *,
        dtype: torch.dtype,
    ) -> None:
        decoder = Decoder(
            VocabParallelEmbedding(config.vocab_size, config.hidden_size, params_dtype=dtype),
            map(layer, range(config.num_hidden_layers)),
            RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype),
        )
        super().__init__(
            decoder,
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            tied=config.tie_word_embeddings,
            max_positions=config.max_positions,
        )
