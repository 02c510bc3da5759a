"""A linear layer that is replicated on every rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave.layers.linear.base import LinearBase, Result
from opweave.layers.linear.method import QuantConfig
from opweave.layers.pluggable_layer import PluggableLayer
from opweave.layers.weight_loading import fill


@PluggableLayer.register("replicated_linear")
class ReplicatedLinear(LinearBase):
    """A linear layer that is the same on every rank. Arguments: see :class:`LinearBase`.

    Composed of ``ir.ops.linear``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
        self._create_parameters(bias, input_size, [output_size])

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Fill *param* with all of *loaded_weight*.

        Raises:
            WeightLoadError: *loaded_weight* has another shape.
        """
        fill(param.data, loaded_weight, self._describe(param))

    def forward(self, x: Tensor) -> Result:
        """Map ``(..., input_size)`` to ``(..., output_size)``; see *return_bias*."""
        y = self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias)
        return self._result(y, self.bias)
