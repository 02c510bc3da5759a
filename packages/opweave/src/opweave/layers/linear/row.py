"""A linear layer whose inputs are sharded over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave.layers.errors import LayerArgumentError
from opweave.layers.linear.base import LinearBase, Result
from opweave.layers.linear.method import QuantConfig
from opweave.layers.pluggable_layer import PluggableLayer
from opweave.layers.weight_loading import dim_of, fill


@PluggableLayer.register("row_parallel_linear")
class RowParallelLinear(LinearBase):
    """A linear layer sharded by inputs: each rank has some columns, and the outputs are summed.

    Composed of ``ir.ops.linear`` and ``all_reduce``. The bias is added once: on rank 0, before the
    sum. Source: Megatron-LM, arXiv:1909.08053.

    Args:
        input_is_parallel: ``x`` has only this rank's features, as a column-parallel layer returns
            them; False: ``x`` has all features, and the layer selects this rank's.
        reduce_results: sum over the ranks; False: return this rank's partial sum.

    See :class:`LinearBase` for the others.

    Raises:
        ShardingError: the number of ranks does not divide *input_size*.
        LayerArgumentError: *reduce_results* is False, and a bias would be added to a partial sum.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        reduce_results: bool = True,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        if bias and not reduce_results and not skip_bias_add:
            raise LayerArgumentError(
                "reduce_results=False returns a part of the sum, to which a bias should not be "
                "added; use skip_bias_add=True and add it after the sum, or bias=False."
            )
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
        self.input_is_parallel, self.reduce_results = input_is_parallel, reduce_results
        own = self.parallel.divide(input_size, "input_size")
        self._create_parameters(bias, own, [output_size])

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Fill *param* from the whole tensor, or from this rank's columns.

        Raises:
            WeightLoadError: *loaded_weight* has another shape.
        """
        dim, what = dim_of(param, "input_dim"), self._describe(param)
        fill(param.data, loaded_weight, what, dim, self.tp_rank, self.tp_size)

    def forward(self, x: Tensor) -> Result:
        """Return ``(..., output_size)``, and the bias with *return_bias*.

        Args:
            x: ``(..., input_size / ranks)``, or ``(..., input_size)`` without *input_is_parallel*.
        """
        if not self.input_is_parallel and self.tp_size > 1:
            own = self.input_size_per_partition
            x = x.narrow(-1, self.tp_rank * own, own)
        adds_bias = self.tp_rank == 0 and not self.skip_bias_add
        y = self.quant_method.apply(self, x, self.bias if adds_bias else None)
        if self.reduce_results and self.tp_size > 1:
            y = self.parallel.all_reduce(y)
        return self._result(y, self.bias)
