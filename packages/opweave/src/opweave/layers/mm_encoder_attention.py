"""Attention in encoders of images, sound and video."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.checks import is_readable
from opweave.layers.custom_op import CustomOp
from opweave.layers.errors import LayerArgumentError


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
        k, v = (
            self._heads(x, self.num_kv_heads, name) for x, name in ((key, "key"), (value, "value"))
        )
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
    found = [tuple(x.shape[:2]) for x in (query, key, value)]
    same = found[0] if cu_seqlens is not None else (found[0][0], found[1][1])
    if found[1] != same or found[2] != same:
        which = "key and value" if cu_seqlens is None else "with cu_seqlens, all three"
        raise LayerArgumentError(
            f"mm_encoder_attn: query, key and value have (batch, tokens) {found[0]}, {found[1]} "
            f"and {found[2]}; they must be of one batch, and {which} have the same tokens."
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
