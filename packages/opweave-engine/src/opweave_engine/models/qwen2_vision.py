"""The vision encoder of Qwen2-VL (arXiv:2409.12191)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

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
from opweave_engine.models.blocks import LayerNorm
from opweave_engine.models.config import Fields, InvalidConfigError, ModelError
from opweave_engine.models.weights import CheckpointModel

# The configuration of Qwen2-VL's vision encoder, read from a checkpoint's ``config.json``.


@dataclass(frozen=True)
class Qwen2VisionConfig:
    """The configuration of Qwen2-VL's vision encoder. Sizes are named as in ``config.json``.

    Attributes:
        embed_dim: the size of a patch's hidden state.
        hidden_size: the size of the merger's output, the hidden size of the language model.
        spatial_merge_size: the side of the squares of patches that become one token.
        rope_theta: the base of the frequencies.
        dtype: the name of the checkpoint's dtype; None if it does not say.
    """

    depth: int
    embed_dim: int
    hidden_size: int
    num_heads: int
    mlp_ratio: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    rope_theta: float
    dtype: str | None

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return self.embed_dim // self.num_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen2VisionConfig:
        """Read the object in a ``config.json``, or the ``vision_config`` in one.

        Missing keys have the same meaning as in transformers.

        Raises:
            UnsupportedModelError: an activation or rope type that is not supported.
            InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
        """
        fields = Fields(config)
        activation = fields.text("hidden_act", "quick_gelu")
        fields.require("hidden_act", activation, "quick_gelu")
        rope = fields.nested("rope_parameters")
        rope.require("rope_type", rope.text("rope_type", "axial"), "axial")
        found = cls(
            depth=fields.count("depth", 32),
            embed_dim=fields.count("embed_dim", 1280),
            hidden_size=fields.count("hidden_size", 3584),
            num_heads=fields.count("num_heads", 16),
            mlp_ratio=fields.count("mlp_ratio", 4),
            in_channels=fields.count("in_channels", 3),
            patch_size=fields.count("patch_size", 14),
            temporal_patch_size=fields.count("temporal_patch_size", 2),
            spatial_merge_size=fields.count("spatial_merge_size", 2),
            rope_theta=rope.number("rope_theta", 10000.0),
            dtype=fields.dtype(),
        )
        if found.embed_dim % (4 * found.num_heads):
            raise InvalidConfigError(
                f"{fields.name} has 'embed_dim': {found.embed_dim} for {found.num_heads} "
                "'num_heads'; a head's size must be a multiple of 4, pairs for rows and columns."
            )
        return found


# The positions of image patches in two dimensions, and rotary embedding for them.


class PatchGridError(ModelError, ValueError):
    """The patches of an image cannot be merged: a side is not a multiple of the square's."""


class PatchGrid(NamedTuple):
    """The packed patches of several images or videos.

    The patches of a frame are in merge order: square after square.

    Attributes:
        positions: ``(patches, 2)``, int64: row and column.
        cu_seqlens: ``(frames + 1,)``, int32: the start of each frame, and the end of the last.
    """

    positions: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, sizes: Iterable[Sequence[int]], merge: int) -> Self:
        """Return the grid of images of the given *sizes*: ``(frames, rows, columns)`` of patches.

        Args:
            sizes: the size of each image; a video has several frames.
            merge: squares of *merge* by *merge* patches become one token.

        Raises:
            PatchGridError: rows or columns are not a multiple of *merge*.

        Examples:
            >>> PatchGrid.of([(1, 2, 4)], 2).positions.tolist()
            [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
        """
        positions, lengths = [torch.empty(0, 2, dtype=torch.int64)], [0]
        for frames, rows, columns in sizes:
            positions.append(_squares(rows, columns, merge).repeat(frames, 1))
            lengths += [rows * columns] * frames
        return cls(torch.cat(positions), torch.tensor(lengths).cumsum(0).to(torch.int32))


def _squares(rows: int, columns: int, merge: int) -> Tensor:
    if rows % merge or columns % merge:
        raise PatchGridError(
            f"an image of {rows} by {columns} patches cannot be merged in squares of {merge} by "
            f"{merge}; resize it to a multiple."
        )
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    squares = grid.view(rows // merge, merge, columns // merge, merge, 2)
    return squares.transpose(1, 2).reshape(-1, 2)


class AxialRope(nn.Module):
    """The angles of rows rotate the first half of a head's pairs, those of columns the second.

    Args:
        head_dim: the size of a head, a multiple of 4.
        theta: the base of the frequencies.
    """

    frequencies: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        powers = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
        self.register_buffer("frequencies", theta**-powers, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, ``(patches, head_dim / 2)``, float32, of *positions*."""
        angles = (positions[..., None] * self.frequencies).flatten(1)
        return angles.cos(), angles.sin()


# The vision encoder of Qwen2-VL: patches with positions in two dimensions (arXiv:2409.12191).


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
            positions, cu_seqlens: those of a :class:`PatchGrid`.
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
