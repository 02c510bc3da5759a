"""Merged column-parallel layers with some replicated outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from opweave.layers.linear.base import Result, ShardId
from opweave.layers.linear.column import ColumnParallelLinear, Part
from opweave.layers.linear.method import QuantConfig
from opweave.layers.mamba.in_context import causal_conv1d


class MixedColumnParallelLinear(ColumnParallelLinear):
    """Merged column-parallel layers; each output is sharded over the ranks or replicated.

    Args:
        output_sizes: the features of each output.
        whole: the indices of the replicated outputs.

    See :class:`ColumnParallelLinear` for the others.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        whole: Collection[int] = (),
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
    ) -> None:
        self.output_sizes, self.whole = list(output_sizes), frozenset(whole)
        super().__init__(
            input_size,
            sum(output_sizes),
            bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            return_bias=False,
        )

    def _parts(self) -> Mapping[ShardId, Part]:
        return {
            i: Part(size, 0, 1) if i in self.whole else self._part(size, f"output_sizes[{i}]")
            for i, size in enumerate(self.output_sizes)
        }


class CausalConv1d(MixedColumnParallelLinear):
    """Depthwise causal convolution of each sequence: ``ir.ops.causal_conv1d``.

    The weight is ``(channels, 1, K)``, as in a ``torch.nn.Conv1d`` with one group per channel.

    Args:
        channels: the channels of each of the concatenated inputs, on all ranks together.
        kernel_size: ``K``.
        layer: the name of the layer that owns the states.
        whole: the indices of the replicated inputs.
        bias: whether to add a bias.
        activation: see ``ir.ops.causal_conv1d``.
        params_dtype: dtype of weight and bias.
    """

    def __init__(
        self,
        channels: Sequence[int],
        kernel_size: int,
        layer: str,
        whole: Collection[int] = (),
        *,
        bias: bool,
        activation: str | None = None,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(kernel_size, channels, whole, bias, params_dtype, prefix=f"{layer}.conv1d")
        self.weight.data = self.weight.data[:, None]
        self.layer, self.activation = layer, activation

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of a sequence's state: this rank's channels, and the inputs kept per channel."""
        return self.weight.shape[0], self.weight.shape[2] - 1

    def forward(self, x: Tensor) -> Tensor:
        """Convolve *x*, ``(T, channels of this rank)``; return a tensor of the same shape."""
        return causal_conv1d(x, self.weight[:, 0], self.bias, self.layer, self.activation)


def tensor_of(result: Result) -> Tensor:
    """Return the tensor in the result of a linear layer."""
    return result[0] if isinstance(result, tuple) else result
