"""A vocabulary table in blocks of GGUF."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opweave.ir.ops.gguf_blocks import dequantized_blocks
from opweave.layers.linear.low_bit import BlockMethod
from opweave.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

_BYTES = UnquantizedEmbeddingMethod()


@dataclass(frozen=True)
class BlockEmbeddingMethod(BlockMethod):
    """A table in blocks, as the file has them: only the rows that are looked up are dequantized.

    Blocks of zeros, in rows that a rank does not have, are zeros in every format.
    """

    def embedding(self, layer: VocabParallelEmbedding, input_ids: Tensor) -> Tensor:
        rows = _BYTES.embedding(layer, input_ids).reshape(-1, layer.weight.shape[1])
        values = dequantized_blocks(rows, self.format, torch.float32).to(layer.params_dtype)
        return values.reshape(*input_ids.shape, layer.embedding_dim)
