"""Activations as layers, each of which calls the op of the same name.

``forward_native`` runs the op's native implementation, which a compiler can fuse. The platform
methods call the op, which runs the selected implementation.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, ClassVar

from torch import Tensor

from opweave import ir
from opweave.layers.custom_op import CustomOp
from opweave.layers.errors import LayerArgumentError


class Activation(CustomOp):
    """A layer that calls one op.

    Attributes:
        op: the op.
        options: the arguments of the op after its input.
    """

    op: ClassVar[ir.IrOp]

    @property
    def options(self) -> tuple[Any, ...]:
        return ()

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

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = _check_approximate(approximate)

    @property
    def options(self) -> tuple[Any, ...]:
        return (self.approximate,)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


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

    @property
    def options(self) -> tuple[Any, ...]:
        return self.std_multiplier, self.approximate

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

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    @property
    def options(self) -> tuple[Any, ...]:
        return self.alpha, self.limit

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, limit={self.limit}"


@CustomOp.register("fatrelu_and_mul")
class FatreluAndMul(Activation):
    """``(x1 if x1 > threshold else 0) * x2``: ``ir.ops.fatrelu_and_mul``.

    Args:
        threshold: elements of ``x1`` not above it become zero.
    """

    op = ir.ops.fatrelu_and_mul

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self.threshold = threshold

    @property
    def options(self) -> tuple[Any, ...]:
        return (self.threshold,)

    def extra_repr(self) -> str:
        return f"threshold={self.threshold}"


def _check_approximate(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise LayerArgumentError(f"approximate={approximate!r} is neither 'none' nor 'tanh'.")
    return approximate
