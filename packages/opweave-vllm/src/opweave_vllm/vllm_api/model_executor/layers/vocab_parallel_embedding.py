"""Embeddings and LM heads, sharded over the vocabulary."""

from opweave.layers import ParallelLMHead, VocabParallelEmbedding, embedding
from opweave.layers.embedding import UnquantizedEmbeddingMethod

__all__ = [
    "DEFAULT_VOCAB_PADDING_SIZE", "ParallelLMHead", "UnquantizedEmbeddingMethod",
    "VocabParallelEmbedding", "pad_vocab_size",
]  # fmt: skip

DEFAULT_VOCAB_PADDING_SIZE = 64


def pad_vocab_size(vocab_size: int, pad_to: int = DEFAULT_VOCAB_PADDING_SIZE) -> int:
    """Return *vocab_size*, rounded up to a multiple of *pad_to*."""
    return embedding.pad_vocab_size(vocab_size, pad_to)
