"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, which differ in flags of :class:`LlamaConfig`.

Between layers go two tensors: *hidden*, the last block's output, and *residual*, the sum of all
before it. Each norm adds the one to the other first, so that a kernel can do both in one pass over
memory. Modules are named as checkpoints name them; ``qkv_proj`` and ``gate_up_proj`` merge theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.models.attention import Attention
from opweave.models.config import LlamaConfig
from opweave.models.linear import Linear, MergedLinear, weight
from opweave.models.rope import RotaryEmbedding

Device = torch.device | str


class RMSNorm(nn.Module):
    """Root-mean-square norm, with the addition of a residual before it."""

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        self.weight, self.epsilon = weight(size, dtype=dtype, device=device), epsilon

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = ir.ops.rms_norm(x, self.weight, self.epsilon)
        return normed

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of ``x + residual``, and the sum. Both inputs are donated."""
        normed, total = ir.ops.fused_add_rms_norm.maybe_inplace(
            x, residual, self.weight, self.epsilon
        )
        return normed, total


class SelfAttention(nn.Module):
    """Projections, rotation, attention."""

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        rotary: RotaryEmbedding,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.qkv_proj = MergedLinear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(
            q_size, config.hidden_size, bias=config.o_bias, dtype=dtype, device=device
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device) for _ in range(2)
            )
        self.rotary = rotary
        self.attention = Attention(layer, config.windows[layer])

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        query, key, value = (
            torch.unflatten(part, -1, (-1, self.head_dim))
            for part in self.qkv_proj.split(self.qkv_proj(hidden))
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        # Query and key may be views of one tensor with value: a kernel that
        # rotates them in place leaves value's elements alone.
        query, key = self.rotary(positions, query, key)
        output: Tensor = self.o_proj(self.attention(query, key, value))
        return output


class Mlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedLinear(
            config.hidden_size,
            {"gate_proj": size, "up_proj": size},
            bias=bias,
            dtype=dtype,
            device=device,
        )
        self.down_proj = Linear(size, config.hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        gated = ir.ops.silu_and_mul(self.gate_up_proj(hidden))
        output: Tensor = self.down_proj(gated)
        return output


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        rotary: RotaryEmbedding,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, epsilon, dtype, device)
        self.self_attn = SelfAttention(config, layer, rotary, dtype, device)
        self.post_attention_layernorm = RMSNorm(size, epsilon, dtype, device)
        self.mlp = Mlp(config, dtype, device)

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class Embedding(nn.Module):
    """Token embedding; its weight serves as the output matrix too where they are tied."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        self.weight = weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = ir.ops.embedding(input_ids, self.weight)
        return hidden


class LlamaModel(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        rotary = RotaryEmbedding(
            config.rope,
            config.head_dim,
            config.max_position_embeddings,
            dtype=dtype,
            device=device,
        )
        self.embed_tokens = Embedding(config, dtype, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, rotary, dtype, device)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        first, *others = self.layers
        hidden, residual = first(positions, self.embed_tokens(input_ids), None)
        for layer in others:
            hidden, residual = layer(positions, hidden, residual)
        return self.norm.add(hidden, residual)[0]


class LlamaForCausalLM(nn.Module):
    """A language model of the Llama family; a loader fills its weights.

    Args:
        config: the model.
        dtype: of weights and activations.
        device: where the weights live.
    """

    def __init__(
        self, config: LlamaConfig, *, dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.model = LlamaModel(config, dtype, device)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(
                config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device
            )
        )

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden state of every token: ``(T, hidden_size)``.

        Args:
            input_ids: ``(T,)``, integer. One sequence, unless a forward context says otherwise.
            positions: ``(T,)``, integer: the place of each token in its sequence.
        """
        hidden: Tensor = self.model(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the next token, ``(..., vocab_size)``, in the dtype of the model."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits: Tensor = ir.ops.linear(hidden, head.weight)
        return logits
