"""Rotary embedding with a table of cosines and sines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from opweave import ir
from opweave.layers.custom_op import CustomOp
from opweave.layers.errors import LayerArgumentError
from opweave.layers.rotary.scaling import Scaling, cos_sin_table

_PLAIN = Scaling()


@CustomOp.register("rotary_embedding")
class RotaryEmbedding(CustomOp):
    """Rotates queries and keys by their positions: ``ir.ops.rotary_embedding``.

    ``cos_sin_cache``, ``(positions, rotary_dim)``, is a non-persistent buffer.

    Args:
        head_size: the size of a head.
        rotary_dim: the number of leading dimensions of a head that are rotated; even.
        max_position_embeddings: the number of positions in the model's configuration; a scaling may
            make the table longer.
        base: the base of the frequencies.
        is_neox_style: pair dimension ``i`` with ``i + rotary_dim / 2``; otherwise ``2 * i`` with
            ``2 * i + 1``.
        dtype: dtype of the table, which is computed in float32.
        init_cache: create the table; False for subclasses that create their own.
        scaling: the scaling of frequencies and table; none by default.

    Raises:
        LayerArgumentError: *rotary_dim* is odd, or not between 2 and *head_size*.

    Source: Su et al., "RoFormer", arXiv:2104.09864.
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
        init_cache: bool = True,
        *,
        scaling: Scaling = _PLAIN,
    ) -> None:
        super().__init__()
        check_sizes(head_size, rotary_dim)
        self.head_size, self.rotary_dim = head_size, rotary_dim
        self.max_position_embeddings, self.base = max_position_embeddings, base
        self.is_neox_style, self.dtype, self.scaling = is_neox_style, dtype, scaling
        if init_cache:
            self.make_cache(scaling.rows(max_position_embeddings))

    def make_cache(self, rows: int) -> None:
        """Make the table for positions below *rows*, on the default device."""
        device = torch.get_default_device()
        if device.type == "meta":  # sizes that are not checked yet may ask for any amount of memory
            table = torch.empty(rows, self.rotary_dim, dtype=self.dtype)
        else:
            frequencies = self.scaling.frequencies(self.rotary_dim, self.base)
            table = cos_sin_table(frequencies, rows, self.scaling.magnitude)
            table = table.to(device=device, dtype=self.dtype)
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate.

        Args:
            positions: ``(...)``, integer.
            query: ``(..., query_heads * head_size)`` or ``(..., query_heads, head_size)``; its
                leading dimensions and those of the positions may be flattened differently.
            key: the same with the number of key heads, or None.

        Returns:
            The rotated queries and keys, in the shapes and dtypes of the inputs.

        Raises:
            LayerArgumentError: the leading dimensions do not match the number of positions.
        """
        xs = [query] if key is None else [query, key]
        shapes = [x.shape for x in xs]
        tokens, xs = align(positions, xs)
        rotated = [
            ir.ops.rotary_embedding_single.native(
                x, tokens, self._table(x), self.head_size, self.is_neox_style
            )
            for x in xs
        ]
        return _as_given(rotated, shapes)

    def forward_cuda(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate and donate queries and keys: do not use them afterwards."""
        xs = [query] if key is None else [query, key]
        shapes = [x.shape for x in xs]  # in a graph, asking what is donated counts as a use
        tokens, xs = align(positions, xs)
        rest = (tokens, self._table(query), self.head_size, self.is_neox_style)
        if key is None:
            rotated = [ir.ops.rotary_embedding_single.maybe_inplace(*xs, *rest)]
        else:
            rotated = ir.ops.rotary_embedding.maybe_inplace(*xs, *rest)
        return _as_given(rotated, shapes)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _table(self, x: Tensor) -> Tensor:
        # Moving the buffer itself would be a side effect in a compiled graph.
        return self.cos_sin_cache.to(x.device)

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, base={self.base}, "
            f"is_neox_style={self.is_neox_style}, scaling={self.scaling}"
        )


def check_sizes(head_size: int, rotary_dim: int) -> None:
    """Raise LayerArgumentError unless *rotary_dim* is valid for the head size."""
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_size:
        raise LayerArgumentError(
            f"rotary_dim={rotary_dim} must be an even number from 2 to head_size={head_size}."
        )


def align(positions: Tensor, xs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return *positions* and *xs* with the same leading dimensions, as views where possible.

    Raises:
        LayerArgumentError: the leading dimensions of a tensor do not match the number of positions.
    """
    if all(x.ndim > positions.ndim and x.shape[: positions.ndim] == positions.shape for x in xs):
        return positions, [*xs]
    return positions.flatten(), [_token_rows(positions, x) for x in xs]


def _token_rows(positions: Tensor, x: Tensor) -> Tensor:
    for last, count in enumerate(accumulate(x.shape[:-1], mul)):
        if count == positions.numel():
            return x.flatten(0, last)
    raise LayerArgumentError(
        f"rotary embedding: positions of shape {tuple(positions.shape)} do not fit a tensor of "
        f"shape {tuple(x.shape)}, whose first dimensions should hold one token for each."
    )


def _as_given(
    rotated: Sequence[Tensor], shapes: Sequence[torch.Size]
) -> tuple[Tensor, Tensor | None]:
    query, *keys = (x.reshape(shape) for x, shape in zip(rotated, shapes, strict=True))
    return query, keys[0] if keys else None
