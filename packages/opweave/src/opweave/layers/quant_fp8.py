"""Quantization of activations to float8_e4m3fn as a layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from opweave import ir
from opweave.ir import IrOp
from opweave.layers.custom_op import CustomOp
from opweave.layers.registry import LayerArgumentError


class GroupShape(NamedTuple):
    """The numbers of rows and columns that share a scale; -1: all.

    >>> GroupShape(1, 128).is_per_group
    True
    """

    row: int
    col: int

    # Dynamo of torch 2.11 takes no named tuple for equal to a plain one: fields are compared.

    @property
    def is_per_tensor(self) -> bool:
        return self.row == self.col == -1

    @property
    def is_per_token(self) -> bool:
        return self.row == 1 and self.col == -1

    @property
    def is_per_channel(self) -> bool:
        return self.row == -1 and self.col == 1

    @property
    def is_per_group(self) -> bool:
        """Whether neighbors in one row share a scale."""
        return self.row == 1 and self.col >= 1


PER_TENSOR = GroupShape(-1, -1)
PER_TOKEN = GroupShape(1, -1)
PER_CHANNEL = GroupShape(-1, 1)
# Also as attributes of the class; a NamedTuple cannot define them.
for _name, _shape in (("TENSOR", PER_TENSOR), ("TOKEN", PER_TOKEN), ("CHANNEL", PER_CHANNEL)):
    setattr(GroupShape, f"PER_{_name}", _shape)

# Kernels that load scales by TMA want columns that begin at multiples of 16 bytes.
_TMA_ROWS = 4


@CustomOp.register("quant_fp8")
class QuantFP8(CustomOp):
    """Quantizes to float8_e4m3fn: ``x ~ q * scale``, with scales in float32.

    Calls ``ir.ops.static_quant_fp8``, ``dynamic_per_tensor_quant_fp8``,
    ``dynamic_per_token_quant_fp8`` or ``per_token_group_quant_fp8``.

    Args:
        static: each call gets the scales; False: they are computed.
        group_shape: the elements that share a scale. For computed scales: the tensor, a token, or a
            group of columns of a row, ``(1, g)``. For given scales also a channel, ``(-1, 1)``, and
            blocks of any size.
        num_token_padding: pad matrices with rows of zeros to this number of rows.
        column_major_scales: store the scales of groups in column-major order.
        tma_aligned_scales: likewise, with each column aligned to 16 bytes.
        use_ue8m0: round the scales of groups up to powers of two; None: no.
        compile_native: if the op is disabled, compile ``forward_native``.

    Raises:
        LayerArgumentError: scales cannot be computed for *group_shape*, or an option does not apply
            to it.

    Source: arXiv:2209.05433; DeepSeek-V3, arXiv:2412.19437, for groups.
    """

    def __init__(
        self,
        static: bool,
        group_shape: GroupShape | tuple[int, int],
        num_token_padding: int | None = None,
        column_major_scales: bool = False,
        tma_aligned_scales: bool = False,
        use_ue8m0: bool | None = None,
        compile_native: bool = True,
    ) -> None:
        super().__init__(compile_native=compile_native)
        self.static, self.group_shape = static, GroupShape(*group_shape)
        self.num_token_padding = num_token_padding
        self.column_major_scales = column_major_scales or tma_aligned_scales
        self.tma_aligned_scales, self.use_ue8m0 = tma_aligned_scales, bool(use_ue8m0)
        self._check()

    def _check(self) -> None:
        shape = self.group_shape
        grouped = not self.static and shape.is_per_group
        if any(size < 1 and size != -1 for size in shape):
            raise LayerArgumentError(f"group_shape={tuple(shape)} must be positive numbers or -1.")
        if not (self.static or grouped or shape.is_per_token or shape.is_per_tensor):
            raise LayerArgumentError(
                f"group_shape={tuple(shape)} needs given scales (static=True); computed ones are "
                "per tensor, (-1, -1), per token, (1, -1), or per group, (1, g)."
            )
        if not grouped and (self.column_major_scales or self.use_ue8m0):
            raise LayerArgumentError(
                "column_major_scales, tma_aligned_scales and use_ue8m0 are for computed scales of "
                f"groups, (1, g); this has static={self.static}, group_shape={tuple(shape)}."
            )

    def forward_native(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        scale_ub: Tensor | None = None,
        use_triton: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Quantize *x*.

        Args:
            x: ``(..., n)``, floating point.
            scale: float32, if *static*: one element; ``(tokens,)`` per token; ``(n,)`` per channel;
                or ``(m / row, n / col)`` for blocks of the ``(m, n)`` matrix of all rows.
            scale_ub: one float32, for computed scales per token: upper bound of the magnitude that
                determines a scale.
            use_triton: for scales per group, prefer a Triton implementation if there is one.

        Returns:
            float8_e4m3fn in the shape of *x*, plus padding rows, and the scales: the given ones,
            2-d unless per tensor; or the computed ones, ``(1,)``, ``(..., 1)`` or
            ``(..., ceil(n / g))``, without those of padding rows.

        Raises:
            LayerArgumentError: *scale* or *scale_ub* is missing, unexpected, or has another shape.
        """
        return self._run(x, scale, scale_ub, _native)

    def forward_cuda(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        scale_ub: Tensor | None = None,
        use_triton: bool = False,
    ) -> tuple[Tensor, Tensor]:
        return self._run(x, scale, scale_ub, _with_triton if use_triton else _selected)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _run(
        self,
        x: Tensor,
        scale: Tensor | None,
        scale_ub: Tensor | None,
        call: Callable[[IrOp], Callable[..., Any]],
    ) -> tuple[Tensor, Tensor]:
        self._check_call(x, scale, scale_ub)
        if scale is not None:
            scale = self._arranged(x, scale)
            q = call(ir.ops.static_quant_fp8)(x, scale)
        elif self.group_shape.is_per_tensor:
            q, scale = call(ir.ops.dynamic_per_tensor_quant_fp8)(x)
        elif self.group_shape.is_per_token:
            q, scale = call(ir.ops.dynamic_per_token_quant_fp8)(x, scale_ub)
        else:
            group = call(ir.ops.per_token_group_quant_fp8)
            q, scale = group(x, self.group_shape.col, self.use_ue8m0)
            scale = self._laid_out(scale)
        return self._padded(q), scale

    def _check_call(self, x: Tensor, scale: Tensor | None, scale_ub: Tensor | None) -> None:
        if (scale is not None) != self.static:
            raise LayerArgumentError(
                f"quant_fp8: scale is {'missing' if self.static else 'given'}, but static="
                f"{self.static}: scales are {'given' if self.static else 'computed'}."
            )
        if scale_ub is not None and (self.static or not self.group_shape.is_per_token):
            raise LayerArgumentError(
                "quant_fp8: scale_ub is for computed scales per token; this has static="
                f"{self.static}, group_shape={tuple(self.group_shape)}."
            )
        if self.num_token_padding is not None and x.ndim != 2:
            raise LayerArgumentError(
                f"quant_fp8: num_token_padding is for matrices; x has shape {tuple(x.shape)}."
            )

    def _arranged(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return given scales in the shape that the op expects."""
        shape = self.group_shape
        if scale.numel() == 1:
            return scale if shape.is_per_tensor else scale.reshape(1, 1)
        rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
        expected = (
            rows // shape.row if shape.row > 0 else 1,
            columns // shape.col if shape.col > 0 else 1,
        )
        flat = scale.ndim == 1 and 1 in expected and scale.numel() == math.prod(expected)
        divides = all(size % part == 0 for size, part in zip((rows, columns), shape, strict=True))
        if not divides or not (flat or scale.shape == expected):
            raise LayerArgumentError(
                f"quant_fp8: scale has shape {tuple(scale.shape)}; for group_shape={tuple(shape)} "
                f"and x of shape {tuple(x.shape)} it should be {expected}"
                f"{'' if divides else ', but the groups do not divide x'}."
            )
        return scale.reshape(expected)

    def _laid_out(self, scale: Tensor) -> Tensor:
        """Return computed scales in the requested memory layout."""
        if not self.column_major_scales or scale.ndim < 2:
            return scale
        columns, tokens = scale.transpose(-1, -2), scale.shape[-2]
        padding = -tokens % _TMA_ROWS if self.tma_aligned_scales else 0
        padded = functional.pad(columns, (0, padding))
        # Always a copy: of one token, contiguous() would leave the strides as they are.
        padded = padded.clone(memory_format=torch.contiguous_format)
        return padded[..., :tokens].transpose(-1, -2)

    def _padded(self, q: Tensor) -> Tensor:
        if self.num_token_padding is None or q.shape[0] >= self.num_token_padding:
            return q
        missing = self.num_token_padding - q.shape[0]
        # As bytes: not every device pads float8.
        padded = functional.pad(q.view(torch.uint8), (0, 0, 0, missing))
        return padded.view(q.dtype)

    def extra_repr(self) -> str:
        return f"static={self.static}, group_shape={tuple(self.group_shape)}"


def _native(op: IrOp) -> Callable[..., Any]:
    return op.native


def _selected(op: IrOp) -> Callable[..., Any]:
    return op


def _with_triton(op: IrOp) -> Callable[..., Any]:
    return op.using("triton") if "triton" in op.impls else op
