"""The vision encoder of Qwen2-VL: patches with positions in two dimensions (arXiv:2409.12191)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from opweave.layers import (
    ApplyRotaryEmb,
    ColumnParallelLinear,
    Conv3dLayer,
    MMEncoderAttention,
    QKVParallelLinear,
    QuickGELU,
    RowParallelLinear,
)
from opweave_engine.models.layer_norm import LayerNorm
from opweave_engine.models.patch_grid import AxialRope
from opweave_engine.models.qwen2_vision_config import Qwen2VisionConfig
from opweave_engine.models.weights import CheckpointModel

_EPSILON = 1e-6
Angles = tuple[Tensor, Tensor]


class PatchEmbedding(nn.Module):
    """A convolution whose kernel is one patch."""

    def __init__(self, config: Qwen2VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        patch = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.shape = (config.in_channels, *patch)
        self.proj = Conv3dLayer(
            config.in_channels, config.embed_dim, patch, patch, bias=False, params_dtype=dtype
        )

    def forward(self, pixels: Tensor) -> Tensor:
        patches = torch.unflatten(pixels.to(self.proj.weight.dtype), -1, self.shape)
        embedded: Tensor = self.proj(patches)
        return embedded.flatten(1)


class VisionAttention(nn.Module):
    """Bidirectional attention within a frame."""

    def __init__(self, config: Qwen2VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size, self.head_dim = config.embed_dim, config.head_dim
        self.qkv = QKVParallelLinear(
            size, config.head_dim, config.num_heads, params_dtype=dtype, return_bias=False
        )
        self.proj = RowParallelLinear(size, size, params_dtype=dtype, return_bias=False)
        self.rotate = ApplyRotaryEmb(enable_fp32_compute=True)
        self.attention = MMEncoderAttention(self.qkv.num_heads, config.head_dim)

    def forward(self, hidden: Tensor, angles: Angles, cu_seqlens: Tensor) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = heads.unbind(1)
        query, key = self.rotate(query, *angles), self.rotate(key, *angles)
        attended = self.attention(query[None], key[None], value[None], cu_seqlens)
        output: Tensor = self.proj(attended[0].flatten(1))
        return output


class VisionMlp(nn.Module):
    """``fc2(quick_gelu(fc1(x)))``."""

    def __init__(self, config: Qwen2VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = config.embed_dim, config.embed_dim * config.mlp_ratio
        self.fc1 = ColumnParallelLinear(*sizes, params_dtype=dtype, return_bias=False)
        self.fc2 = RowParallelLinear(*sizes[::-1], params_dtype=dtype, return_bias=False)
        self.activation = QuickGELU()

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.fc2(self.activation(self.fc1(hidden)))
        return output


class VisionBlock(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, config: Qwen2VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.embed_dim, _EPSILON, dtype=dtype)
        self.attn = VisionAttention(config, dtype)
        self.norm2 = LayerNorm(config.embed_dim, _EPSILON, dtype=dtype)
        self.mlp = VisionMlp(config, dtype)

    def forward(self, hidden: Tensor, angles: Angles, cu_seqlens: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), angles, cu_seqlens)
        merged: Tensor = hidden + self.mlp(self.norm2(hidden))
        return merged


class PatchMerger(nn.Module):
    """Merges squares of neighboring patches into tokens for the language model."""

    def __init__(self, config: Qwen2VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = config.embed_dim * config.spatial_merge_size**2
        self.ln_q = LayerNorm(config.embed_dim, _EPSILON, dtype=dtype)
        self.mlp = nn.Sequential(
            ColumnParallelLinear(self.size, self.size, params_dtype=dtype, return_bias=False),
            nn.GELU(),
            RowParallelLinear(self.size, config.hidden_size, params_dtype=dtype, return_bias=False),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        merged: Tensor = self.mlp(self.ln_q(hidden).view(-1, self.size))
        return merged


class Qwen2VisionTransformer(CheckpointModel):
    """Qwen2-VL's vision encoder; :meth:`load_weights` fills it.

    Args:
        config: the configuration.
        dtype: dtype of weights and activations.
    """

    def __init__(self, config: Qwen2VisionConfig, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.patch_embed = PatchEmbedding(config, dtype)
        self.rope = AxialRope(config.head_dim, config.rope_theta)
        self.blocks = nn.ModuleList(VisionBlock(config, dtype) for _ in range(config.depth))
        self.merger = PatchMerger(config, dtype)
        self.requires_grad_(False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(Qwen2VisionConfig.from_hf(config), dtype=dtype)

    def forward(self, pixels: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return the hidden state of every patch: ``(patches, embed_dim)``.

        Args:
            pixels: ``(patches, in_channels * temporal_patch_size * patch_size ** 2)``.
            positions, cu_seqlens: those of a :class:`~opweave_engine.models.patch_grid.PatchGrid`.
        """
        angles = self.rope(positions)
        hidden: Tensor = self.patch_embed(pixels)
        for block in self.blocks:
            hidden = block(hidden, angles, cu_seqlens)
        return hidden

    def merge(self, hidden: Tensor) -> Tensor:
        """Return the language model's tokens: ``(patches / spatial_merge_size ** 2, hidden_size)``.

        Args:
            hidden: ``(patches, embed_dim)``.
        """
        tokens: Tensor = self.merger(hidden)
        return tokens
