"""Elementwise activations as layers; see :mod:`opweave.layers.activation`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.layers.activation import Activation
from opweave.layers.custom_op import CustomOp


@CustomOp.register("gelu_new")
class NewGELU(Activation):
    """GELU with the tanh approximation, as in GPT-2: ``ir.ops.gelu_new``."""

    op = ir.ops.gelu_new


@CustomOp.register("gelu_fast")
class FastGELU(Activation):
    """GELU with the tanh approximation and a truncated constant: ``ir.ops.gelu_fast``."""

    op = ir.ops.gelu_fast


@CustomOp.register("quick_gelu")
class QuickGELU(Activation):
    """``x * sigmoid(1.702 * x)``, as in CLIP: ``ir.ops.quick_gelu``."""

    op = ir.ops.quick_gelu


@CustomOp.register("relu2")
class ReLUSquaredActivation(Activation):
    """``relu(x) ** 2``: ``ir.ops.relu2``."""

    op = ir.ops.relu2

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__(compile_native=compile_native)


@CustomOp.register("xielu")
class XIELU(Activation):
    """xIELU, with a learned curvature on each side of zero: ``ir.ops.xielu``.

    ``alpha_p`` and ``alpha_n``, ``(1,)``, are parameters; ``beta`` and ``eps``, 0-d, are buffers,
    which are in checkpoints too. Loading a state dict changes all four.

    Args:
        alpha_p_init, alpha_n_init: the initial curvatures; the second must be above *beta*.
        beta: the slope at zero.
        eps: a small negative number, the upper bound of the argument of ``expm1``.
        dtype: dtype of parameters and buffers.
        with_vector_loads: a hint for kernels of other packages; unused here.
    """

    op = ir.ops.xielu

    beta: Tensor
    eps: Tensor

    def __init__(
        self,
        alpha_p_init: float = 0.8,
        alpha_n_init: float = 0.8,
        beta: float = 0.5,
        eps: float = -1e-6,
        dtype: torch.dtype = torch.bfloat16,
        with_vector_loads: bool = False,
    ) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(_inverse_softplus(alpha_p_init, dtype))
        self.alpha_n = nn.Parameter(_inverse_softplus(alpha_n_init - beta, dtype))
        self.register_buffer("beta", torch.tensor(beta, dtype=dtype))
        self.register_buffer("eps", torch.tensor(eps, dtype=dtype))
        self.with_vector_loads = with_vector_loads
        # The op takes numbers: reading a tensor's value in forward would wait for the device.
        self._numbers = beta, eps
        self.register_load_state_dict_post_hook(_read_numbers)  # type: ignore[no-untyped-call]
        for buffer in (self.beta, self.eps):
            buffer.weight_loader = self._load_number  # type: ignore[attr-defined]

    def _load_number(self, buffer: Tensor, loaded_weight: Tensor) -> None:
        buffer.data.copy_(loaded_weight.reshape(()))
        _read_numbers(self)

    @property
    def options(self) -> tuple[Any, ...]:
        return self.alpha_p, self.alpha_n, *self._numbers


def _read_numbers(layer: XIELU, *_: Any) -> None:
    layer._numbers = float(layer.beta), float(layer.eps)


def _inverse_softplus(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor([math.log(math.expm1(value))], dtype=dtype)
