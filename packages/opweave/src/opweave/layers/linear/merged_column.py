"""Several column-parallel layers with the same input, computed in one matrix product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from opweave.layers.errors import LayerArgumentError
from opweave.layers.linear.base import ShardId
from opweave.layers.linear.column import ColumnParallelLinear, Part
from opweave.layers.linear.method import QuantConfig
from opweave.layers.pluggable_layer import PluggableLayer


@PluggableLayer.register("merged_column_parallel_linear")
class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers with concatenated outputs; each is sharded separately.

    The weight loaders take the index of an output (``0``, ``1``, …) after the tensor, or only the
    tensor if it contains all outputs.

    Args:
        output_sizes: the features of each output, on all ranks together.

    See :class:`ColumnParallelLinear` for the others.

    Raises:
        ShardingError: the number of ranks does not divide one of *output_sizes*.
        LayerArgumentError: *output_sizes* is empty.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        if not output_sizes:
            raise LayerArgumentError("output_sizes is empty; it has one size for each output.")
        self.output_sizes = list(output_sizes)
        super().__init__(
            input_size,
            sum(output_sizes),
            bias,
            gather_output,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )

    def _parts(self) -> Mapping[ShardId, Part]:
        return {
            i: self._part(size, f"output_sizes[{i}]") for i, size in enumerate(self.output_sizes)
        }
