"""The blocks of language models: norms, attention, MLP."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir, layers
from opweave.ir.torch_ops import opaque_op
from opweave.layers.attention import one_sequence
from opweave_engine.models.config import AttentionConfig, max_positions
from opweave_engine.models.forward_context import CachedRows, current_forward_context

# The gated MLP of language models.


class GatedMlp(nn.Module):
    """``down(activation([gate(x) | up(x)]))``.

    Args:
        hidden_size: the size of a token's hidden state.
        intermediate_size: the size between the two products, on all ranks.
        activation: a gated activation of ``[gate | up]``, such as ``SiluAndMul``.
        dtype: dtype of the weights.
        bias: whether the products have a bias.
        reduce_results: sum over the ranks; False: the caller does so.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: nn.Module,
        *,
        dtype: torch.dtype,
        bias: bool = False,
        reduce_results: bool = True,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": bias, "params_dtype": dtype, "return_bias": False}
        sizes = [intermediate_size] * 2
        self.gate_up_proj = layers.MergedColumnParallelLinear(hidden_size, sizes, **options)
        self.down_proj = layers.RowParallelLinear(
            intermediate_size, hidden_size, reduce_results=reduce_results, **options
        )
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.activation(self.gate_up_proj(hidden)))
        return output


# Causal self-attention over the sequences of the current forward.


class Attention(nn.Module):
    """Causal attention within each sequence.

    Inside a :func:`~opweave_engine.models.forward_context.forward_context`, new keys and values are
    added to the cache. Without one, the tokens are one new sequence.

    Args:
        layer: the index of the layer, which identifies its cache.
        num_heads: the number of query heads on this rank.
        num_kv_heads: the number of key and value heads on this rank.
        head_dim: the size of a head.
        window: the maximum number of positions to attend to; None: all.
        scale, soft_cap: as in ``ir.ops.varlen_attention``.
        value_dim: the size of a value head; by default *head_dim*.

    Attributes:
        cached: the cache entry of a token for this layer.
    """

    def __init__(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        *,
        value_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.num_heads = layer, num_heads
        self.window, self.scale, self.soft_cap = window, scale, soft_cap
        self.cached = CachedRows(layer, num_kv_heads, head_dim, value_dim or head_dim, window)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return ``(T, heads * value_dim)``.

        Args:
            query: ``(T, heads, head_dim)``.
            key: ``(T, kv_heads, head_dim)``.
            value: ``(T, kv_heads, value_dim)``.
        """
        # A graph must hold for every context, so that it looks the context up when it runs.
        attend = _opaque_attend if torch.compiler.is_dynamo_compiling() else _attend
        options = self.window, self.scale, self.soft_cap
        return attend(query, key, value, self.layer, *options).flatten(1)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    window: int | None,
    scale: float | None,
    soft_cap: float | None,
) -> Tensor:
    context = current_forward_context()
    if context is None:
        dense: Tensor = ir.ops.causal_attention(
            query[None], key[None], value[None], scale, window, soft_cap
        )
        return dense[0]
    return context.attention.attend(layer, query, key, value, scale, window, soft_cap)


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *options: object) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


_opaque_attend = opaque_op("opweave", "attention_in_context", _attend, _attend_fake)


# Multi-head latent attention over the sequences of the current forward.


class LatentAttention(nn.Module):
    """Causal attention within each sequence.

    Inside a :func:`~opweave_engine.models.forward_context.forward_context`, new rows
    ``[kv_c | k_pe]`` are added to the cache, as keys of one head without values. Without a context,
    the tokens are one new sequence.

    Args:
        layer: the index of the layer, which identifies its cache.
        num_heads: the number of query heads on this rank.
        row_size: the size of a row.

    Attributes:
        cached: the cache entry of a token for this layer.
    """

    def __init__(self, layer: int, num_heads: int, row_size: int) -> None:
        super().__init__()
        self.layer, self.num_heads = layer, num_heads
        self.cached = CachedRows(layer, 1, row_size, 0)

    def forward(
        self, query: Tensor, kv_c: Tensor, k_pe: Tensor, kv_b_weight: Tensor, scale: float
    ) -> Tensor:
        """Return ``(T, heads, value_size)``; arguments as in ``ir.ops.mla_attention_prefill``."""
        # A graph must hold for every context, so that it looks the context up when it runs.
        attend = _opaque_attend_latent if torch.compiler.is_dynamo_compiling() else _attend_latent
        out: Tensor = attend(query, kv_c, k_pe, kv_b_weight, scale, self.layer)
        return out


def _attend_latent(
    query: Tensor, kv_c: Tensor, k_pe: Tensor, kv_b_weight: Tensor, scale: float, layer: int
) -> Tensor:
    context = current_forward_context()
    if context is None:
        return one_sequence(query, kv_c, k_pe, kv_b_weight, scale)
    return context.attention.attend_latent(layer, query, kv_c, k_pe, kv_b_weight, scale)


def _attend_latent_fake(
    query: Tensor, kv_c: Tensor, k_pe: Tensor, kv_b_weight: Tensor, *options: object
) -> Tensor:
    heads = query.shape[1]
    nope = query.shape[2] - k_pe.shape[1]
    return query.new_empty(query.shape[0], heads, kv_b_weight.shape[0] // heads - nope)


_opaque_attend_latent = opaque_op(
    "opweave", "latent_attention_in_context", _attend_latent, _attend_latent_fake
)


# Self-attention of decoders: projections, norms of heads, rotation, attention.


class SelfAttention(nn.Module):
    """The attention of one layer, with this rank's heads.

    Args:
        config: the configuration.
        layer: the index of the layer, which identifies its cache.
        rope: ``rope_parameters``, as for :func:`~opweave.layers.get_rope`.
        dtype: dtype of weights and activations.
        qkv_bias, o_bias: which linear layers have a bias.
        norms: per-head norms of queries and keys, or None.
        window, scale, soft_cap: as in :class:`Attention`.
    """

    def __init__(
        self,
        config: AttentionConfig,
        layer: int,
        rope: Mapping[str, Any],
        dtype: torch.dtype,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        norms: tuple[nn.Module, nn.Module] | None = None,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.head_dim = size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        options: dict[str, Any] = {"params_dtype": dtype, "return_bias": False}
        self.qkv_proj = layers.QKVParallelLinear(
            hidden, size, heads, kv_heads, bias=qkv_bias, **options
        )
        self.q_norm: nn.Module | None
        self.k_norm: nn.Module | None
        self.q_norm, self.k_norm = norms or (None, None)
        positions = config.max_position_embeddings
        longest = max_positions(rope, positions)
        self.rotary_emb = layers.get_rope(
            size, positions, rope_parameters=rope, dtype=dtype, max_model_len=longest
        )
        local_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.attention = Attention(layer, *local_heads, size, window, scale, soft_cap)
        self.o_proj = layers.RowParallelLinear(heads * size, hidden, bias=o_bias, **options)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        qkv = torch.unflatten(self.qkv_proj(hidden), -1, (-1, self.head_dim))
        query, key, value = torch.split_with_sizes(qkv, [heads, kv_heads, kv_heads], -2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        # Query and key may be views of one tensor with value: a kernel that
        # rotates them in place leaves value's elements alone.
        query, key = self.rotary_emb(positions, query, key)
        output: Tensor = self.o_proj(self.attention(query, key, value))
        return output


# The block of a decoder, which takes and returns a hidden state and a residual.
#
# *hidden* is the previous block's output, and *residual* the sum of all outputs before it. Each
# norm first adds them, so that a kernel can do both in one pass over memory.


ResidualStream = tuple[Tensor, Tensor]  # the hidden state, and the residual


def add_and_norm(norm: nn.Module, hidden: Tensor, residual: Tensor | None) -> ResidualStream:
    """Return the norm of ``hidden + residual``, and the sum. Both inputs may be donated.

    Args:
        norm: takes one tensor; or takes two, and returns the norm and the sum.
        hidden, residual: ``(T, hidden_size)``; *residual* is None before the first block.
    """
    if residual is None:
        return norm(hidden), hidden
    normed_and_sum: ResidualStream = norm(hidden, residual)
    return normed_and_sum


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm.

    Args:
        input_layernorm: before the attention.
        self_attn: takes positions and hidden states.
        post_attention_layernorm: before the MLP.
        mlp: takes hidden states.
    """

    def __init__(
        self,
        input_layernorm: nn.Module,
        self_attn: nn.Module,
        post_attention_layernorm: nn.Module,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = input_layernorm, self_attn
        self.post_attention_layernorm, self.mlp = post_attention_layernorm, mlp

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> ResidualStream:
        hidden, residual = add_and_norm(self.input_layernorm, hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = add_and_norm(self.post_attention_layernorm, hidden, residual)
        return self.mlp(hidden), residual
