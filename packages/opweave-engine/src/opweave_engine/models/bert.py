"""BERT: an encoder with bidirectional attention (arXiv:1810.04805)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from opweave.layers import (
    ColumnParallelLinear,
    MMEncoderAttention,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_act_fn,
)
from opweave_engine.models.blocks import LayerNorm
from opweave_engine.models.causal_lm import Encoder
from opweave_engine.models.config import Fields, UnsupportedModelError, read_activation
from opweave_engine.models.weights import Merged

# The configuration of BERT, read from a checkpoint's ``config.json``.


@dataclass(frozen=True)
class BertConfig:
    """The configuration of a BERT encoder. Sizes are named as in ``config.json``.

    Attributes:
        hidden_act: the activation of the MLPs.
        dtype: the name of the checkpoint's dtype; None if it does not say.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    hidden_act: str
    dtype: str | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BertConfig:
        """Read the object in a ``config.json``, as transformers 4 or 5 writes it.

        Missing keys have the same meaning as in transformers.

        Raises:
            UnsupportedModelError: an activation, a kind of positions or a quantization that is not
                supported, or a decoder.
            InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
        """
        fields = Fields(config)
        for key, default in (("is_decoder", False), ("add_cross_attention", False)):
            fields.require(key, fields.flag(key, default), default)
        kind = fields.text("position_embedding_type", "absolute")
        fields.require("position_embedding_type", kind, "absolute")
        fields.refuse_quantized()
        hidden, heads = fields.count("hidden_size", 768), fields.count("num_attention_heads", 12)
        fields.require_multiple("hidden_size", hidden, "num_attention_heads", heads)
        return cls(
            vocab_size=fields.count("vocab_size", 30522),
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size", 3072),
            num_hidden_layers=fields.count("num_hidden_layers", 12),
            num_attention_heads=heads,
            max_position_embeddings=fields.count("max_position_embeddings", 512),
            type_vocab_size=fields.count("type_vocab_size", 2),
            layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
            hidden_act=read_activation(fields, default="gelu"),
            dtype=fields.dtype(),
        )


# The model.


class BertEmbeddings(nn.Module):
    """The normalized sum of the embeddings of a token, its type and its position."""

    def __init__(self, config: BertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.word_embeddings, self.token_type_embeddings, self.position_embeddings = (
            VocabParallelEmbedding(count, config.hidden_size, params_dtype=dtype)
            for count in (
                config.vocab_size,
                config.type_vocab_size,
                config.max_position_embeddings,
            )
        )
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps, dtype=dtype)

    def forward(self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor) -> Tensor:
        embedded = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        normed: Tensor = self.LayerNorm(embedded + self.position_embeddings(positions))
        return normed


class BertSelfAttention(nn.Module):
    """Bidirectional self-attention with this rank's heads."""

    def __init__(self, config: BertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.qkv = QKVParallelLinear(
            hidden, hidden // heads, heads, params_dtype=dtype, return_bias=False
        )
        self.attention = MMEncoderAttention(self.qkv.num_heads, hidden // heads)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        query, key, value = self.qkv(hidden)[None].chunk(3, -1)
        attended: Tensor = self.attention(query, key, value, cu_seqlens)
        return attended[0]


class BertOutput(nn.Module):
    """A projection, and the norm of its sum with the residual."""

    def __init__(self, size: int, config: BertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = RowParallelLinear(size, hidden, params_dtype=dtype, return_bias=False)
        self.LayerNorm = LayerNorm(hidden, config.layer_norm_eps, dtype=dtype)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dense(hidden) + residual)
        return normed


class BertAttention(nn.Module):
    """Attention, projection, norm."""

    def __init__(self, config: BertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, dtype)
        self.output = BertOutput(config.hidden_size, config, dtype)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        normed: Tensor = self.output(self.self(hidden, cu_seqlens), hidden)
        return normed


class BertIntermediate(nn.Module):
    """A projection and its activation."""

    def __init__(self, config: BertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.dense = ColumnParallelLinear(
            config.hidden_size, config.intermediate_size, params_dtype=dtype, return_bias=False
        )
        self.activation = get_act_fn(config.hidden_act)

    def forward(self, hidden: Tensor) -> Tensor:
        activated: Tensor = self.activation(self.dense(hidden))
        return activated


class BertLayer(nn.Module):
    """Attention and MLP, each with a norm after it."""

    def __init__(self, config: BertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention = BertAttention(config, dtype)
        self.intermediate = BertIntermediate(config, dtype)
        self.output = BertOutput(config.intermediate_size, config, dtype)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        hidden = self.attention(hidden, cu_seqlens)
        normed: Tensor = self.output(self.intermediate(hidden), hidden)
        return normed


class BertEncoder(nn.Module):
    """The layers in sequence."""

    def __init__(self, config: BertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            BertLayer(config, dtype) for _ in range(config.num_hidden_layers)
        )

    def forward(self, hidden: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        for layer in self.layer:
            hidden = layer(hidden, cu_seqlens)
        return hidden


class BertPooler(nn.Module):
    """``tanh`` of a projection."""

    def __init__(self, config: BertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        self.dense = ReplicatedLinear(size, size, params_dtype=dtype, return_bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.dense(hidden))


class BertModel(Encoder):
    """A BERT encoder; :meth:`load_weights` fills it.

    Args:
        config: the configuration.
        dtype: dtype of weights and activations.
        pools: whether there is a pooler, whose output is the input of classifiers.
    """

    merged: ClassVar[Merged] = {"qkv": {"query": "q", "key": "k", "value": "v"}}

    def __init__(
        self, config: BertConfig, *, dtype: torch.dtype = torch.float32, pools: bool = True
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embeddings = BertEmbeddings(config, dtype)
        self.encoder = BertEncoder(config, dtype)
        self.pooler = BertPooler(config, dtype) if pools else None
        self.requires_grad_(False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(BertConfig.from_hf(config), dtype=dtype)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        token_type_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden state of every token: ``(T, hidden_size)``.

        Args:
            input_ids: ``(T,)``, integer: packed sequences.
            positions: ``(T,)``, integer: the position of each token in its sequence.
            token_type_ids: ``(T,)``, integer: 0 for the first text, 1 for the second; None: all 0.
            cu_seqlens: ``(sequences + 1,)``, int32: the start of each sequence, and the end of the
                last. None: one sequence.
        """
        kinds = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        hidden: Tensor = self.encoder(self.embeddings(input_ids, positions, kinds), cu_seqlens)
        return hidden

    def pool(self, first: Tensor) -> Tensor:
        """Return a classifier's input, ``(..., hidden_size)``, from first tokens' hidden state.

        Raises:
            UnsupportedModelError: the checkpoint has no pooler.
        """
        if self.pooler is None:
            raise UnsupportedModelError(
                f"{type(self).__name__} has no pooler: its checkpoints do not hold one."
            )
        pooled: Tensor = self.pooler(first)
        return pooled

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        # Older checkpoints also hold the numbers of positions.
        super().load_weights(
            (name.removeprefix("bert."), tensor)
            for name, tensor in tensors
            if not name.endswith(".position_ids")
        )


class BertForMaskedLM(BertModel):
    """The encoder of a BERT for masked tokens, for embeddings."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(BertConfig.from_hf(config), dtype=dtype, pools=False)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        # The pooler, which some checkpoints hold, and the head of the predictions.
        others = ("cls.", "bert.pooler.")
        super().load_weights((n, t) for n, t in tensors if not n.startswith(others))
