"""BERT: an encoder with bidirectional attention (arXiv:1810.04805)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.layers import (
    ColumnParallelLinear,
    MMEncoderAttention,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_act_fn,
)
from opweave_engine.models.causal_lm import Encoder
from opweave_engine.models.config import (
    Fields,
    ModelConfig,
    UnsupportedModelError,
    key,
    read_activation,
)
from opweave_engine.models.weights import Merged

# The configuration of BERT, read from a checkpoint's ``config.json``.


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """The configuration of a BERT encoder. Sizes are named as in ``config.json``.

    Attributes:
        hidden_act: the activation of the MLPs.
    """

    vocab_size: int = key(Fields.count, 30522)
    hidden_size: int = key(Fields.count, 768)
    intermediate_size: int = key(Fields.count, 3072)
    num_hidden_layers: int = key(Fields.count, 12)
    num_attention_heads: int = key(Fields.count, 12)
    max_position_embeddings: int = key(Fields.count, 512)
    type_vocab_size: int = key(Fields.count, 2)
    layer_norm_eps: float = key(Fields.number, 1e-12)
    hidden_act: str = key(read_activation, "gelu")

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        for name in ("is_decoder", "add_cross_attention"):
            fields.require(name, fields.flag(name, False), False)
        kind = fields.text("position_embedding_type", "absolute")
        fields.require("position_embedding_type", kind, "absolute")
        config = cls.read(fields)
        heads = config.num_attention_heads
        fields.require_multiple("hidden_size", config.hidden_size, "num_attention_heads", heads)
        return config


# The model.


class LayerNorm(nn.Module):
    """``ir.ops.layer_norm`` over the last dimension, with weight and bias.

    Args:
        size: the size of the last dimension.
        epsilon: added to the variance.
        dtype: dtype of weight and bias.
    """

    def __init__(self, size: int, epsilon: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = ir.ops.layer_norm(x, self.weight, self.bias, self.epsilon)
        return normed


class BertEmbeddings(nn.Module):
    """The normalized sum of the embeddings of a token, its type and its position."""

    def __init__(self, config: BertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.word_embeddings, self.token_type_embeddings, self.position_embeddings = (
            VocabParallelEmbedding(count, config.hidden_size, params_dtype=dtype)
            for count in (config.vocab_size, config.type_vocab_size, config.max_position_embeddings)
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
        size = hidden // heads
        self.qkv = QKVParallelLinear(hidden, size, heads, params_dtype=dtype, return_bias=False)
        self.attention = MMEncoderAttention(self.qkv.num_heads, size)

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


class BertLayer(nn.Module):
    """Attention and MLP, each with a norm after it; parts are named as in checkpoints."""

    def __init__(self, config: BertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.attention = nn.ModuleDict(
            {"self": BertSelfAttention(config, dtype), "output": BertOutput(hidden, config, dtype)}
        )
        dense = ColumnParallelLinear(hidden, intermediate, params_dtype=dtype, return_bias=False)
        self.intermediate = nn.ModuleDict({"dense": dense})
        self.activation = get_act_fn(config.hidden_act)
        self.output = BertOutput(intermediate, config, dtype)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        attended = self.attention["self"](hidden, cu_seqlens)
        hidden = self.attention["output"](attended, hidden)
        widened = self.activation(self.intermediate["dense"](hidden))
        normed: Tensor = self.output(widened, hidden)
        return normed


class BertModel(Encoder):
    """A BERT encoder; :meth:`load_weights` fills it.

    Args:
        config: the configuration.
        dtype: dtype of weights and activations.
        pools: whether there is a pooler, whose output is the input of classifiers.
    """

    config_class = BertConfig
    merged: ClassVar[Merged] = {"qkv": {"query": "q", "key": "k", "value": "v"}}

    def __init__(
        self, config: BertConfig, *, dtype: torch.dtype = torch.float32, pools: bool = True
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.max_positions = config.max_position_embeddings
        self.embeddings = BertEmbeddings(config, dtype)
        layers = (BertLayer(config, dtype) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.pooler = None
        if pools:
            size = config.hidden_size
            dense = ReplicatedLinear(size, size, params_dtype=dtype, return_bias=False)
            self.pooler = nn.ModuleDict({"dense": dense})
        self.requires_grad_(False)

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
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        hidden: Tensor = self.embeddings(input_ids, positions, types)
        layers: Any = self.encoder["layer"]
        for layer in layers:
            hidden = layer(hidden, cu_seqlens)
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
        return torch.tanh(self.pooler["dense"](first))

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
