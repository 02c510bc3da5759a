"""Activations as layers, each of which calls the op of the same name."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.ir.errors import did_you_mean
from opweave.layers.custom_op import CustomOp
from opweave.layers.registry import LayerArgumentError

# Activations as layers, each of which calls the op of the same name.
#
# ``forward_native`` runs the op's native implementation, which a compiler can fuse. The platform
# methods call the op, which runs the selected implementation.


class Activation(CustomOp):
    """A layer that calls one op.

    Attributes:
        op: the op.
        option_names: the attributes that are the arguments of the op after its input.
    """

    op: ClassVar[ir.IrOp]
    option_names: ClassVar[tuple[str, ...]] = ()

    @property
    def options(self) -> tuple[Any, ...]:
        names = self.option_names
        return tuple([getattr(self, name) for name in names]) if names else ()

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.option_names)

    def forward_native(self, x: Tensor) -> Tensor:
        activated: Tensor = self.op.native(x, *self.options)
        return activated

    def forward_cuda(self, x: Tensor) -> Tensor:
        activated: Tensor = self.op(x, *self.options)
        return activated

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda


@CustomOp.register("silu_and_mul")
class SiluAndMul(Activation):
    """``silu(x1) * x2`` for the halves of the last dimension: ``ir.ops.silu_and_mul``.

    Maps ``(..., 2 * d)`` to ``(..., d)``, like all gated activations.
    """

    op = ir.ops.silu_and_mul

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__(compile_native=compile_native)


@CustomOp.register("mul_and_silu")
class MulAndSilu(Activation):
    """``x1 * silu(x2)`` for the halves of the last dimension: ``ir.ops.mul_and_silu``."""

    op = ir.ops.mul_and_silu


@CustomOp.register("gelu_and_mul")
class GeluAndMul(Activation):
    """``gelu(x1) * x2`` for the halves of the last dimension: ``ir.ops.gelu_and_mul``.

    Args:
        approximate: ``"none"`` for the exact function, ``"tanh"`` for its approximation.

    Raises:
        LayerArgumentError: *approximate* is neither.
    """

    op = ir.ops.gelu_and_mul
    option_names = ("approximate",)

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = _check_approximate(approximate)


@CustomOp.register("gelu_and_mul_sparse")
class GeluAndMulSparse(Activation):
    """``gelu_and_mul`` of the largest elements of ``x1`` only: ``ir.ops.gelu_and_mul_sparse``.

    With tensor parallelism, mean and standard deviation are those of this rank's part of a row.

    Args:
        activation_sparsity: the fraction of normally distributed elements that become zero; between
            0 and 1.
        approximate: as in :class:`GeluAndMul`.

    Raises:
        LayerArgumentError: *activation_sparsity* is not between 0 and 1, or *approximate* is
            unknown.
    """

    op = ir.ops.gelu_and_mul_sparse
    option_names = ("std_multiplier", "approximate")

    def __init__(self, activation_sparsity: float, approximate: str = "none") -> None:
        super().__init__()
        if activation_sparsity == 0.0:
            raise LayerArgumentError(
                "activation_sparsity=0.0: nothing would become zero; use GeluAndMul."
            )
        if not 0.0 < activation_sparsity < 1.0:
            raise LayerArgumentError(
                f"activation_sparsity={activation_sparsity} must be between 0 and 1."
            )
        self.activation_sparsity = activation_sparsity
        self.approximate = _check_approximate(approximate)
        self.std_multiplier = NormalDist().inv_cdf(activation_sparsity)

    def extra_repr(self) -> str:
        return f"activation_sparsity={self.activation_sparsity}, approximate={self.approximate!r}"


@CustomOp.register("swigluoai_and_mul")
class SwigluOAIAndMul(Activation):
    """The gated activation of gpt-oss, for interleaved halves: ``ir.ops.swigluoai_and_mul``.

    Args:
        alpha: the factor in the sigmoid.
        limit: gates are clamped to at most *limit*, the other half to ``[-limit, limit]``.
    """

    op = ir.ops.swigluoai_and_mul
    option_names = ("alpha", "limit")

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit


@CustomOp.register("fatrelu_and_mul")
class FatreluAndMul(Activation):
    """``(x1 if x1 > threshold else 0) * x2``: ``ir.ops.fatrelu_and_mul``.

    Args:
        threshold: elements of ``x1`` not above it become zero.
    """

    op = ir.ops.fatrelu_and_mul
    option_names = ("threshold",)

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self.threshold = threshold


def _check_approximate(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise LayerArgumentError(f"approximate={approximate!r} is neither 'none' nor 'tanh'.")
    return approximate


# Elementwise activations.


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


# Activations by their names in model configurations.


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_fast": FastGELU,
    "gelu_new": NewGELU,
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "relu2": ReLUSquaredActivation,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
    "xielu": XIELU,
}
_GATED: dict[str, Callable[[], nn.Module]] = {
    "geglu": GeluAndMul,
    "gelu": GeluAndMul,
    "gelu_pytorch_tanh": lambda: GeluAndMul("tanh"),
    "silu": SiluAndMul,
    "swigluoai": SwigluOAIAndMul,
    "swish": SiluAndMul,
}


def get_act_fn(name: str) -> nn.Module:
    """Return a new elementwise activation.

    Args:
        name: as in a configuration's ``hidden_act``, in upper or lower case. The prefix
            ``torch.nn.modules.``, which sentence-transformers writes, is ignored.

    Raises:
        LayerArgumentError: (a ValueError) no activation has that name.

    >>> get_act_fn("gelu_pytorch_tanh")
    GELU(approximate='tanh')
    """
    return _named(name, _ACTIVATIONS, "activation")


def get_act_and_mul_fn(name: str) -> nn.Module:
    """Return a new gated activation, ``(..., 2 * d)`` to ``(..., d)``.

    Raises:
        LayerArgumentError: (a ValueError) no gated activation has that name.

    >>> get_act_and_mul_fn("silu")
    SiluAndMul()
    """
    return _named(name, _GATED, "gated activation")


def _named(name: str, activations: dict[str, Callable[[], nn.Module]], kind: str) -> nn.Module:
    key = name.lower()
    if key.startswith("torch.nn.modules."):
        key = key.rpartition(".")[2]
    if key not in activations:
        raise LayerArgumentError(f"unknown {kind} {name!r}. {did_you_mean(key, activations)}")
    return activations[key]()
