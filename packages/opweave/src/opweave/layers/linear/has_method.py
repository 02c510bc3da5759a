"""Base class of layers whose weights a linear method creates and applies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from opweave.layers.linear.method import LinearMethod
from opweave.layers.pluggable_layer import PluggableLayer


class HasLinearMethod(PluggableLayer):
    """A layer whose weights can be kept in another way before they are loaded.

    Attributes:
        quant_method: creates and applies the weights.
        params_dtype: dtype of weights that are not quantized.
    """

    quant_method: LinearMethod
    params_dtype: torch.dtype

    def set_quant_method(self, method: LinearMethod) -> None:
        """Keep the weights as *method* does; they are uninitialized afterwards."""
        for name in self._weight_names:  # others, such as a bias, stay
            del self._parameters[name]
        self.quant_method = method
        self._create_weights()

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Fill *param*, a parameter of this layer.

        Raises:
            WeightLoadError: the shape of *loaded_weight* does not fit.
        """
        raise NotImplementedError

    def _create_weights(self) -> None:
        """Call :meth:`_create_by_method` with the sizes of the layer."""
        raise NotImplementedError

    def _create_by_method(
        self,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
    ) -> None:
        others = set(self._parameters)
        self.quant_method.create_weights(
            self,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            self.params_dtype,
            weight_loader=self.weight_loader,
        )
        self._weight_names = self._parameters.keys() - others
