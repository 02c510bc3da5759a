"""Rotary embedding with positions in time, height and width (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opweave.layers.errors import LayerArgumentError
from opweave.layers.rotary.apply_rotary_emb import ApplyRotaryEmb
from opweave.layers.rotary.rotary_embedding import RotaryEmbedding
from opweave.layers.rotary.scaling import Scaling

AXES = 3
# The time of a long video may run ahead of the number of its tokens.
_ROWS_PER_POSITION = 4


class MRotaryEmbedding(RotaryEmbedding):
    """M-RoPE: each pair of dimensions is rotated by one of three positions of a token.

    The three positions of a text token are equal, so text may pass one position per token.

    Args:
        mrope_section: the numbers of pairs rotated by time, height and width; their sum is
            ``rotary_dim / 2``.
        mrope_interleaved: pairs alternate between the axes as long as each section lasts, and the
            remaining pairs use time; False: the sections follow each other.

    The other arguments, and the table, are those of :class:`RotaryEmbedding`; the table has four
    times as many positions.

    Raises:
        LayerArgumentError: the sections do not add up to ``rotary_dim / 2``.

    Source: Qwen2-VL, arXiv:2409.12191; interleaved: Qwen3-VL, arXiv:2511.21631.
    """

    axes: Tensor

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        mrope_section: Sequence[int],
        mrope_interleaved: bool = False,
        *,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__(
            head_size,
            rotary_dim,
            max_position_embeddings,
            base,
            is_neox_style,
            dtype,
            init_cache=False,
            scaling=Scaling() if scaling is None else scaling,
        )
        section = tuple(mrope_section)
        if len(section) != AXES or sum(section) != rotary_dim // 2:
            raise LayerArgumentError(
                f"mrope_section={[*section]} must be three numbers with the sum {rotary_dim // 2}, "
                f"half of rotary_dim."
            )
        self.mrope_section, self.mrope_interleaved = section, mrope_interleaved
        self.apply_rotary_emb = ApplyRotaryEmb(is_neox_style=is_neox_style)
        self.make_cache(_ROWS_PER_POSITION * self.scaling.rows(max_position_embeddings))
        pairs = _interleaved(section) if mrope_interleaved else _consecutive(section)
        # Cosines and sines of a pair turn together.
        axes = torch.tensor([pairs + pairs], device=self.cos_sin_cache.device)
        self.register_buffer("axes", axes, persistent=False)

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate.

        Args:
            positions: ``(3, tokens)``, integer: time, height and width; or ``(tokens,)``.
            query: ``(tokens, heads * head_size)`` or ``(tokens, heads, head_size)``.
            key: the same with the number of key heads, or None.

        Returns:
            The rotated queries and keys, in the shapes and dtypes that came in.

        Raises:
            LayerArgumentError: the positions have another shape.
        """
        if positions.ndim == 1:
            return super().forward_native(positions, query, key)
        cos, sin = self._angles(positions, query)
        rotate = self.apply_rotary_emb.forward_native
        return (
            rotate(self._heads(query), cos, sin).reshape(query.shape),
            None if key is None else rotate(self._heads(key), cos, sin).reshape(key.shape),
        )

    def forward_cuda(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate and donate queries and keys: do not use them afterwards."""
        if positions.ndim == 1:
            return super().forward_cuda(positions, query, key)
        cos, sin = self._angles(positions, query)
        rotate = self.apply_rotary_emb
        return (
            rotate(self._heads(query), cos, sin).reshape(query.shape),
            None if key is None else rotate(self._heads(key), cos, sin).reshape(key.shape),
        )

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _angles(self, positions: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, ``(tokens, rotary_dim / 2)`` each."""
        if positions.ndim != 2 or positions.shape[0] != AXES:
            raise LayerArgumentError(
                f"M-RoPE takes positions of shape (3, tokens) or (tokens,), found "
                f"{tuple(positions.shape)}."
            )
        by_axis = self._table(query)[positions]
        axes = self.axes.to(query.device).expand(1, positions.shape[1], -1)
        cos, sin = by_axis.gather(0, axes)[0].chunk(2, dim=-1)
        return cos, sin

    def _heads(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            return x
        return torch.unflatten(x, -1, (x.shape[-1] // self.head_size, self.head_size))


def _consecutive(section: Sequence[int]) -> list[int]:
    return [axis for axis, size in enumerate(section) for _ in range(size)]


def _interleaved(section: Sequence[int]) -> list[int]:
    """Return the axis of each pair: ``p % AXES`` while that section lasts, else time."""
    pairs = range(sum(section))
    return [p % AXES if p // AXES < section[p % AXES] else 0 for p in pairs]
