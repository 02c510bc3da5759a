"""Multi-head latent attention, and attention in encoders, as layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.ir.ops.arguments import is_readable
from opweave.layers.custom_op import CustomOp
from opweave.layers.linear import tensor_of
from opweave.layers.registry import InvalidLayerError, LayerArgumentError, PluggableLayer

# Multi-head latent attention as a layer: projections, norms, rotation, attention, output.
#
# Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.


class LatentAttentionFn(Protocol):
    """Attention over the latent rows of new and cached tokens."""

    def __call__(
        self, query: Tensor, kv_c: Tensor, k_pe: Tensor, kv_b_weight: Tensor, scale: float
    ) -> Tensor:
        """Return ``(T, heads, value_size)``; arguments as in ``ir.ops.mla_attention_prefill``."""


def one_sequence(
    query: Tensor, kv_c: Tensor, k_pe: Tensor, kv_b_weight: Tensor, scale: float
) -> Tensor:
    """Causal latent attention of tokens that form one new sequence."""
    ends = torch.arange(2, dtype=torch.int32, device=query.device) * query.shape[0]
    out: Tensor = ir.ops.mla_attention_prefill(query, kv_c, k_pe, kv_b_weight, ends, ends, scale)
    return out


@dataclass(frozen=True)
class MLAModules:
    """The modules of latent attention.

    Linear modules return a tensor, or a tuple of a tensor and a bias (None).

    Attributes:
        kv_a_layernorm: norm of the latent vector, ``(T, kv_lora_rank)``.
        kv_b_proj: its ``weight`` is ``(heads * (nope + value), kv_lora_rank)``, this rank's heads.
            It has no bias.
        rotary_emb: called as ``rotary_emb(positions, query, key)``; None: no rotation.
        o_proj: ``(T, heads * value)`` to ``(T, hidden_size)``, summed over ranks.
        fused_qkv_a_proj: ``hidden`` to ``[q_lora_rank | kv_lora_rank + rope]``. Needed with
            *q_lora_rank*, as are *q_a_layernorm* and *q_b_proj*.
        kv_a_proj_with_mqa: ``hidden`` to ``kv_lora_rank + rope``. Needed without *q_lora_rank*,
            as is *q_proj*.
        q_a_layernorm: norm of the queries' latent vector.
        q_b_proj: the queries' latent vector to ``heads * (nope + rope)``.
        q_proj: ``hidden`` to ``heads * (nope + rope)``.
        g_proj: ``hidden`` to ``heads * value``, an output gate: its sigmoid multiplies the result.
    """

    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Module
    rotary_emb: nn.Module | None
    o_proj: nn.Module
    fused_qkv_a_proj: nn.Module | None = None
    kv_a_proj_with_mqa: nn.Module | None = None
    q_a_layernorm: nn.Module | None = None
    q_b_proj: nn.Module | None = None
    q_proj: nn.Module | None = None
    g_proj: nn.Module | None = None


_WITH_Q_LORA = ("fused_qkv_a_proj", "q_a_layernorm", "q_b_proj")
_WITHOUT_Q_LORA = ("kv_a_proj_with_mqa", "q_proj")


@PluggableLayer.register("multi_head_latent_attention")
class MultiHeadLatentAttentionWrapper(PluggableLayer):
    """Latent attention over the modules of :class:`MLAModules`.

    ``ir.ops.mla_attention_prefill`` or ``mla_attention_decode``, chosen by *attention*, between
    linear layers. With tensor parallelism, a rank has *num_heads* heads; the layers before the
    latent vectors are replicated.

    Args:
        hidden_size: the size of a token's hidden state.
        num_heads: the number of heads of this rank.
        scale: factor on the scores.
        qk_nope_head_dim, qk_rope_head_dim: the sizes of the unrotated and of the rotated part of a
            query or key.
        v_head_dim: the size of a head's value.
        q_lora_rank: the size of the queries' latent vector; None: queries are projected directly.
        kv_lora_rank: the size of the latent vector of keys and values.
        mla_modules: the modules.
        cache_config, quant_config: kept as attributes, for replacements of this layer.
        prefix: the name of this layer in its model.
        attention: the attention over new and cached tokens; by default the tokens form one new
            sequence.

    Raises:
        InvalidLayerError: a module is missing; the message names it.
    """

    # Modules of any type, chosen by the model's author.
    kv_a_layernorm: Any
    kv_b_proj: Any
    rotary_emb: Any
    o_proj: Any
    fused_qkv_a_proj: Any
    kv_a_proj_with_mqa: Any
    q_a_layernorm: Any
    q_b_proj: Any
    q_proj: Any
    g_proj: Any

    def __init__(
        self, hidden_size: int, num_heads: int, scale: float, qk_nope_head_dim: int,
        qk_rope_head_dim: int, v_head_dim: int, q_lora_rank: int | None, kv_lora_rank: int,
        mla_modules: MLAModules, cache_config: Any = None, quant_config: Any = None,
        prefix: str = "", attention: LatentAttentionFn = one_sequence,
    ) -> None:  # fmt: skip
        super().__init__()
        required = _WITHOUT_Q_LORA if q_lora_rank is None else _WITH_Q_LORA
        missing = [name for name in required if getattr(mla_modules, name) is None]
        if missing:
            raise InvalidLayerError(
                f"latent attention with q_lora_rank={q_lora_rank} lacks {', '.join(missing)}; give "
                f"MLAModules {', '.join(required)}."
            )
        self.hidden_size, self.num_heads, self.scale = hidden_size, num_heads, scale
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.cache_config, self.quant_config, self.prefix = cache_config, quant_config, prefix
        for field in fields(mla_modules):
            setattr(self, field.name, getattr(mla_modules, field.name))
        self.attention = attention

    def forward(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None
    ) -> Tensor:
        """Return ``(T, hidden_size)``, in the dtype of *hidden_states*.

        Args:
            positions: ``(T,)``, integer.
            hidden_states: ``(T, hidden_size)``.
            llama_4_scaling: a factor on the queries that broadcasts with
                ``(T, heads, nope + rope)``.
        """
        query, latent = self._project(hidden_states)
        query = torch.unflatten(query, -1, (self.num_heads, -1))
        kv_c, k_pe = latent.split_with_sizes([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        kv_c = self.kv_a_layernorm(kv_c)
        if self.rotary_emb is not None:
            query, k_pe = self._rotate(positions, query, k_pe)
        if llama_4_scaling is not None:
            query = (query * llama_4_scaling).to(query.dtype)
        out = self.attention(query, kv_c, k_pe, self.kv_b_proj.weight, self.scale).flatten(1)
        if self.g_proj is not None:
            out = out * torch.sigmoid(tensor_of(self.g_proj(hidden_states)))
        return tensor_of(self.o_proj(out))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, ``(T, heads * (nope + rope))``, and ``[latent | rope]``."""
        if self.q_lora_rank is None:
            return tensor_of(self.q_proj(hidden)), tensor_of(self.kv_a_proj_with_mqa(hidden))
        sizes = [self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim]
        q_c, latent = tensor_of(self.fused_qkv_a_proj(hidden)).split_with_sizes(sizes, -1)
        return tensor_of(self.q_b_proj(self.q_a_layernorm(q_c))), latent

    def _rotate(self, positions: Tensor, query: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        plain, turned = query.split_with_sizes([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        turned, key = self.rotary_emb(positions, turned, k_pe[:, None])
        return torch.cat((plain, turned), -1), key[:, 0]


# Attention in encoders of images, sound and video.


@CustomOp.register("mm_encoder_attn")
class MMEncoderAttention(CustomOp):
    """Bidirectional attention within each segment.

    Calls ``ir.ops.bidirectional_attention``, or ``ir.ops.varlen_attention`` if there are segments.
    It is enabled regardless of the configuration: encoders run the platform's kernels.

    Args:
        num_heads: the number of query heads of this rank.
        head_size: the size of a head.
        scale: factor on the scores; by default ``head_size ** -0.5``.
        num_kv_heads: the number of key heads of this rank, by default *num_heads*; it divides
            *num_heads*, and each key head serves a group of consecutive query heads.
        prefix: the name of the layer in its model.

    Raises:
        LayerArgumentError: *num_kv_heads* does not divide *num_heads*.

    Source: Vaswani et al., arXiv:1706.03762.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.prefix = num_heads, head_size, prefix
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise LayerArgumentError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={num_heads}."
            )
        self.scale = head_size**-0.5 if scale is None else scale

    @classmethod
    def enabled(cls) -> bool:
        """Return True."""
        return True

    def forward_native(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention.

        Args:
            query: ``(batch, tokens, num_heads * head_size)`` or ``(batch, tokens, num_heads,
                head_size)``.
            key, value: the same with *num_kv_heads*; without segments, any number of tokens.
            cu_seqlens: ``(segments + 1,)``, int32 or int64, non-decreasing, from 0 to the number of
                tokens (checked in eager mode, in host memory): segment ``i`` of every batch element
                is ``cu_seqlens[i]:cu_seqlens[i + 1]``. None: one segment.
            max_seqlen: the length of the longest segment, for kernels of other packages; unused
                here.

        Returns:
            The shape and dtype of the query, contiguous.

        Raises:
            LayerArgumentError: a tensor has neither shape, keys and values have different numbers
                of tokens, or the segments do not cover all tokens.
        """
        dense, packed = ir.ops.bidirectional_attention, ir.ops.varlen_attention
        return self._run(query, key, value, cu_seqlens, dense.native, packed.native)

    def forward_cuda(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | None = None,
    ) -> Tensor:
        dense, packed = ir.ops.bidirectional_attention, ir.ops.varlen_attention
        return self._run(query, key, value, cu_seqlens, dense, packed)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None,
        dense: Callable[..., Tensor],
        packed: Callable[..., Tensor],
    ) -> Tensor:
        q = self._heads(query, self.num_heads, "query")
        k = self._heads(key, self.num_kv_heads, "key")
        v = self._heads(value, self.num_kv_heads, "value")
        _check_tokens(q, k, v, cu_seqlens)
        if cu_seqlens is None:
            return dense(q, k, v, self.scale).reshape(query.shape)
        ends = _ends_of_all(cu_seqlens, q.shape[0], q.shape[1])
        out = packed(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ends, ends, self.scale)
        return out.reshape(query.shape)

    def _heads(self, x: Tensor, heads: int, name: str) -> Tensor:
        """Return *x* as ``(batch, tokens, heads, head_size)``."""
        if x.ndim == 3 and x.shape[-1] == heads * self.head_size:
            return torch.unflatten(x, -1, (heads, self.head_size))
        if x.ndim == 4 and x.shape[2:] == (heads, self.head_size):
            return x
        raise LayerArgumentError(
            f"mm_encoder_attn: {name} has shape {tuple(x.shape)}; it should be (batch, tokens, "
            f"{heads * self.head_size}) or (batch, tokens, {heads}, {self.head_size})."
        )

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_size={self.head_size}, "
            f"num_kv_heads={self.num_kv_heads}, scale={self.scale}"
        )


def _check_tokens(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raise LayerArgumentError unless the tensors have the same batch and segments."""
    sizes = [tuple(x.shape[:2]) for x in (query, key, value)]
    expected = sizes[0] if cu_seqlens is not None else (sizes[0][0], sizes[1][1])
    if sizes[1] != expected or sizes[2] != expected:
        which = "key and value" if cu_seqlens is None else "with cu_seqlens, all three"
        raise LayerArgumentError(
            f"mm_encoder_attn: query, key and value have (batch, tokens) {sizes[0]}, {sizes[1]} "
            f"and {sizes[2]}; they must be of one batch, and {which} have the same tokens."
        )
    if cu_seqlens is None:
        return
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise LayerArgumentError(
            f"mm_encoder_attn: cu_seqlens must be int32 or int64, (segments + 1,); found "
            f"{cu_seqlens.dtype}, {tuple(cu_seqlens.shape)}."
        )
    if is_readable(cu_seqlens):
        ends, tokens = cu_seqlens.tolist(), query.shape[1]
        if ends[:1] != [0] or ends[-1] != tokens or ends != sorted(ends):
            raise LayerArgumentError(
                f"mm_encoder_attn: cu_seqlens={ends} must go from 0 to {tokens}, the number of "
                "tokens, and never down."
            )


def _ends_of_all(cu_seqlens: Tensor, batch: int, tokens: int) -> Tensor:
    """Return the boundaries of the segments of all batch elements, concatenated."""
    if batch == 1:
        return cu_seqlens
    first = torch.arange(batch, device=cu_seqlens.device, dtype=cu_seqlens.dtype) * tokens
    starts = (cu_seqlens[:-1] + first[:, None]).flatten()
    return torch.cat((starts, starts.new_full((1,), batch * tokens)))
