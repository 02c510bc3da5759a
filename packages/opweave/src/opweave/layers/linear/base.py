"""Base class of linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from opweave.layers.linear.has_method import HasLinearMethod
from opweave.layers.linear.method import QuantConfig, default_method
from opweave.layers.parallel import ALONE, current_tensor_parallel
from opweave.layers.weight_loading import describe, set_weight_attrs

ShardId = int | str
Result = Tensor | tuple[Tensor, Tensor | None]


class LinearBase(HasLinearMethod):
    """``y = x @ weight.T + bias``, possibly sharded over a tensor-parallel group.

    Parameters are uninitialized and do not require gradients. ``param.weight_loader(param,
    tensor)`` fills them from a checkpoint's tensor or from this rank's shard of it.

    Args:
        input_size: features of ``x``, on all ranks together.
        output_size: features of ``y``, on all ranks together.
        bias: whether to add a bias.
        skip_bias_add: return the bias instead of adding it, for a caller that adds it later.
        params_dtype: dtype of the parameters; by default ``torch.get_default_dtype()``.
        quant_config: chooses the quantization of the weights; by default none.
        prefix: name of the layer in the model, for *quant_config* and errors.
        return_bias: return ``(y, bias or None)`` instead of ``y``. The bias is None unless
            *skip_bias_add* is set.
        disable_tp: replicate the layer on every rank.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add, self.return_bias = skip_bias_add, return_bias
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_config, self.prefix, self.disable_tp = quant_config, prefix, disable_tp
        self.parallel = ALONE if disable_tp else current_tensor_parallel()
        self.tp_rank, self.tp_size = self.parallel.rank, self.parallel.size
        chosen = None if quant_config is None else quant_config.get_quant_method(self, prefix)
        self.quant_method = chosen or default_method()

    def extra_repr(self) -> str:
        """Return sizes, for ``repr(model)``."""
        ranks = f", rank={self.tp_rank} of {self.tp_size}" if self.tp_size > 1 else ""
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}{ranks}"

    def _create_parameters(
        self, bias: bool, input_size: int, output_sizes: Sequence[int], **bias_attrs: object
    ) -> None:
        """Create weight and bias for a rank's *input_size* and *output_sizes*."""
        self.input_size_per_partition = input_size
        self.output_partition_sizes = list(output_sizes)
        self.output_size_per_partition = sum(output_sizes)
        self._create_weights()
        if not bias:
            self.register_parameter("bias", None)
            return
        values = torch.empty(self.output_size_per_partition, dtype=self.params_dtype)
        self.bias = nn.Parameter(values, requires_grad=False)
        set_weight_attrs(self.bias, weight_loader=self.weight_loader, **bias_attrs)

    def _create_weights(self) -> None:
        self._create_by_method(
            self.input_size_per_partition,
            self.output_partition_sizes,
            self.input_size,
            self.output_size,
        )

    def _result(self, y: Tensor, bias: Tensor | None) -> Result:
        if not self.return_bias:
            return y
        return y, bias if self.skip_bias_add else None

    def _describe(self, param: Tensor) -> str:
        return describe(self, self.prefix, param)
