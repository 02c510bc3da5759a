"""Linear method of quantized checkpoints with weights and activations of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.layers.errors import LayerArgumentError
from opweave.layers.linear.low_bit import check_share, register

GROUP = 128
"""Columns that share a scale, of activations and of blocks of weights."""


@dataclass(frozen=True)
class ActivationScheme:
    """How activations are quantized to 8 bits.

    Attributes:
        is_static: scales are parameters, one for each merged output; else each token has a scale.
        upper_bound: of the magnitude that determines a token's scale; float8 only.
        use_ue8m0: scales are rounded up to powers of two; for groups only.
    """

    is_static: bool = False
    upper_bound: float | None = None
    use_ue8m0: bool = False


@dataclass(frozen=True)
class W8A8Method:
    """Weights and activations of 8 bits: ``ir.ops.linear_w8a8``.

    Parameters: ``weight`` ``(out, in)``; ``scale`` float32, ``(out,)``, or ``(out / block_rows, in
    / 128)`` for blocks; ``input_scale`` float32 ``(merged outputs,)``, of a static scheme.

    Attributes:
        dtype: int8 or float8_e4m3fn, of weights and activations.
        activations: how activations are quantized. With blocks of weights, each group of 128
            columns of a token has a scale.
        block_rows: the rows of a block of weights; None: each row has a scale. A checkpoint has
            128; a layer keeps fewer if its merged or sharded outputs are not multiples of 128.
    """

    dtype: torch.dtype
    activations: ActivationScheme = ActivationScheme()
    block_rows: int | None = None

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows, own = sum(output_partition_sizes), input_size_per_partition
        weight = torch.empty(rows, own, dtype=self.dtype)
        register(layer, "weight", weight, input_dim=1, output_dim=0, **extra_weight_attrs)
        attrs = {"output_dim": 0, **extra_weight_attrs}
        if self.block_rows is None:
            register(layer, "scale", torch.empty(rows, dtype=torch.float32), **attrs)
        else:
            if self.for_outputs(output_partition_sizes) != self:
                raise LayerArgumentError(
                    f"block_rows={self.block_rows} does not divide the outputs "
                    f"{list(output_partition_sizes)}; use for_outputs."
                )
            check_share(layer, own, input_size, GROUP, "block")
            scale = torch.empty(rows // self.block_rows, own // GROUP, dtype=torch.float32)
            register(layer, "scale", scale, input_dim=1, **attrs)
        if self.activations.is_static:
            given = torch.empty(len(output_partition_sizes), dtype=torch.float32)
            register(layer, "input_scale", given, **extra_weight_attrs)

    def for_outputs(self, sizes: Sequence[int]) -> W8A8Method:
        """Return the method whose blocks do not cross the bounds of outputs of these *sizes*."""
        if self.block_rows is None:
            return self
        return replace(self, block_rows=gcd(self.block_rows, *sizes))

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        given = layer.get_parameter("input_scale") if self.activations.is_static else None
        codes, x_scale = self.quantized(x, given)
        output: Tensor = ir.ops.linear_w8a8(
            codes, x_scale, layer.weight, layer.scale, bias, x.dtype
        )
        return output

    def quantized(self, x: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return activations of 8 bits and their scales, as ``linear_w8a8`` takes them.

        Args:
            x: ``(..., in)``.
            input_scale: of a static scheme.
        """
        is_int, ops = self.dtype is torch.int8, ir.ops
        if input_scale is not None:
            largest = input_scale.max()  # as vLLM does where merged outputs differ
            quantize = ops.static_quant_int8 if is_int else ops.static_quant_fp8
            return quantize(x, largest), largest
        if self.block_rows is not None:
            codes, scale = ops.per_token_group_quant_fp8(x, GROUP, self.activations.use_ue8m0)
            return codes, scale
        if is_int:
            codes, scale = ops.dynamic_per_token_quant_int8(x)
            return codes, scale
        upper = self.activations.upper_bound
        bound = None if upper is None else torch.full((1,), upper, device=x.device)
        codes, scale = ops.dynamic_per_token_quant_fp8(x, bound)
        return codes, scale
