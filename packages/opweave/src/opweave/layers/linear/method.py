"""The strategy of a linear layer: weight format and computation. Quantization replaces it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.layers.weight_loading import set_weight_attrs


class LinearMethod(Protocol):
    """Creates the parameters of a linear layer, and applies them. Layers may share an instance."""

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
        """Register the parameters on *layer*.

        Each parameter gets ``extra_weight_attrs`` as attributes, which include its loader, and the
        attributes ``output_dim`` and ``input_dim`` for the dimensions that it has. Ranks shard
        along these. Along ``output_dim``, merged outputs must have lengths proportional to their
        sizes.

        Args:
            layer: the linear layer.
            input_size_per_partition: input features of this rank.
            output_partition_sizes: output features of this rank, for each merged output.
            input_size, output_size: features on all ranks together.
            params_dtype: the dtype of weights that are not quantized.
        """

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``, ``(..., outputs of this rank)``."""


class QuantConfig(Protocol):
    """Chooses a method for each layer of a model."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethod | None:
        """Return the method for *layer*, called *prefix* in the model; None: not quantized."""


class UnquantizedLinearMethod:
    """One weight ``(out, in)``, multiplied by ``ir.ops.linear``."""

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
        rows = sum(output_partition_sizes)
        data = torch.empty(rows, input_size_per_partition, dtype=params_dtype)
        weight = nn.Parameter(data, requires_grad=False)
        set_weight_attrs(weight, input_dim=1, output_dim=0, **extra_weight_attrs)
        layer.register_parameter("weight", weight)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = ir.ops.linear(x, layer.weight, bias)
        return output


class DeferredMethod(UnquantizedLinearMethod):
    """A weight without memory, until ``LinearBase.set_quant_method`` replaces it."""

    def create_weights(self, *args: Any, **extra_weight_attrs: Any) -> None:
        with torch.device("meta"):
            super().create_weights(*args, **extra_weight_attrs)


_defers: ContextVar[bool] = ContextVar("opweave_defers_weights", default=False)


@contextmanager
def deferred_weights() -> Iterator[None]:
    """Inside the block, layers without a *quant_config* get no memory for weights.

    A checkpoint's tensors decide how each is kept, and the names of layers are known only when the
    model is whole.
    """
    token = _defers.set(True)
    try:
        yield
    finally:
        _defers.reset(token)


def weights_are_deferred() -> bool:
    """Return whether this is inside a block of :func:`deferred_weights`."""
    return _defers.get()


def default_method() -> LinearMethod:
    """Return the method of a layer for which no *quant_config* chooses one."""
    return DeferredMethod() if _defers.get() else UnquantizedLinearMethod()
