"""Rotation for dual chunk attention."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave import ir
from opweave.layers.custom_op import CustomOp
from opweave.layers.errors import LayerArgumentError
from opweave.layers.rotary.rotary_embedding import check_sizes
from opweave.layers.rotary.scaling import Scaling, cos_sin_table


@CustomOp.register("dual_chunk_rotary_embedding")
class DualChunkRotaryEmbedding(CustomOp):
    """Rotates keys once and queries five times: ``ir.ops.dual_chunk_rotary_embedding``.

    Args:
        head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype: as in
            :class:`RotaryEmbedding`. The table has ``2 * chunk_size - local_size`` rows,
            independent of the number of positions.
        chunk_size: the number of positions that a query distinguishes.
        local_size: the overlap of neighboring chunks; at least 0, less than *chunk_size*.

    Raises:
        LayerArgumentError: a size is out of range.

    Source: An et al., arXiv:2402.17463; Qwen2.5-1M, arXiv:2501.15383.
    """

    cos_sin_cache: Tensor

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        chunk_size: int,
        local_size: int,
    ) -> None:
        super().__init__()
        check_sizes(head_size, rotary_dim)
        if not 0 <= local_size < chunk_size:
            raise LayerArgumentError(
                f"local_size={local_size} must be from 0 and less than chunk_size={chunk_size}."
            )
        self.head_size, self.rotary_dim = head_size, rotary_dim
        self.max_position_embeddings, self.base = max_position_embeddings, base
        self.is_neox_style, self.dtype = is_neox_style, dtype
        self.chunk_size, self.local_size = chunk_size, local_size
        table = cos_sin_table(Scaling().frequencies(rotary_dim, base), 2 * chunk_size - local_size)
        table = table.to(device=torch.get_default_device(), dtype=dtype)
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate.

        Args:
            positions: ``(...)``, integer.
            query: ``(..., query_heads * head_size)`` or ``(..., query_heads, head_size)``.
            key: the same with the number of key heads.
            offsets: added to the positions.

        Returns:
            Queries for the own chunk, the previous one, all earlier ones, and the last two in the
            critical form, concatenated: ``(..., 5 * query_heads * head_size)``; and the keys,
            ``(..., key_heads * head_size)``.
        """
        rotated: tuple[Tensor, Tensor] = ir.ops.dual_chunk_rotary_embedding.native(
            query, key, *self._rest(positions, query, offsets)
        )
        return rotated

    def forward_cuda(
        self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = ir.ops.dual_chunk_rotary_embedding(
            query, key, *self._rest(positions, query, offsets)
        )
        return rotated

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _rest(
        self, positions: Tensor, query: Tensor, offsets: Tensor | None
    ) -> tuple[Tensor, Tensor, int, int, int, bool]:
        return (
            positions if offsets is None else positions + offsets,
            self.cos_sin_cache.to(query.device),
            self.head_size,
            self.chunk_size,
            self.local_size,
            self.is_neox_style,
        )

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, base={self.base}, "
            f"chunk_size={self.chunk_size}, local_size={self.local_size}"
        )
