"""Multi-head latent attention as a layer: projections, norms, rotation, attention, output.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.layers.errors import InvalidLayerError
from opweave.layers.pluggable_layer import PluggableLayer


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
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: MLAModules,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        attention: LatentAttentionFn = one_sequence,
    ) -> None:
        super().__init__()
        _check_modules(mla_modules, q_lora_rank)
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
            out = out * torch.sigmoid(_output(self.g_proj(hidden_states)))
        return _output(self.o_proj(out))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, ``(T, heads * (nope + rope))``, and ``[latent | rope]``."""
        if self.q_lora_rank is None:
            return _output(self.q_proj(hidden)), _output(self.kv_a_proj_with_mqa(hidden))
        sizes = [self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim]
        q_c, latent = _output(self.fused_qkv_a_proj(hidden)).split_with_sizes(sizes, -1)
        return _output(self.q_b_proj(self.q_a_layernorm(q_c))), latent

    def _rotate(self, positions: Tensor, query: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        plain, turned = query.split_with_sizes([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        turned, key = self.rotary_emb(positions, turned, k_pe[:, None])
        return torch.cat((plain, turned), -1), key[:, 0]


def _check_modules(modules: MLAModules, q_lora_rank: int | None) -> None:
    needed = _WITHOUT_Q_LORA if q_lora_rank is None else _WITH_Q_LORA
    missing = [name for name in needed if getattr(modules, name) is None]
    if missing:
        raise InvalidLayerError(
            f"latent attention with q_lora_rank={q_lora_rank} lacks {', '.join(missing)}; give "
            f"MLAModules {', '.join(needed)}."
        )


def _output(result: Tensor | tuple[Tensor, Any]) -> Tensor:
    """Return the tensor in the result of a linear module."""
    return result[0] if isinstance(result, tuple) else result
