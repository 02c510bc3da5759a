"""Root-mean-square normalization as layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.layers.custom_op import CustomOp
from opweave.layers.errors import LayerArgumentError


@CustomOp.register("rms_norm")
class RMSNorm(CustomOp):
    """Normalizes the last dimension: ``ir.ops.rms_norm``, ``ir.ops.fused_add_rms_norm``.

    Args:
        hidden_size: the size of the last dimension.
        eps: added to the mean square.
        var_hidden_size: compute the mean square over the first *var_hidden_size* elements only.
        has_weight: whether there is a learned weight; otherwise ``weight`` is ones.
        dtype: dtype of the weight; by default, torch's default dtype.

    Raises:
        LayerArgumentError: *var_hidden_size* is not between 1 and *hidden_size*.

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """

    weight: Tensor

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if var_hidden_size is not None and not 0 < var_hidden_size <= hidden_size:
            raise LayerArgumentError(
                f"var_hidden_size={var_hidden_size} is not between 1 and hidden_size={hidden_size}."
            )
        self.hidden_size, self.variance_epsilon, self.has_weight = hidden_size, eps, has_weight
        self.variance_size = None if var_hidden_size == hidden_size else var_hidden_size
        ones = torch.ones(hidden_size, dtype=dtype)
        self.weight = nn.Parameter(ones) if has_weight else ones

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize *x*, ``(..., hidden_size)``, or ``x + residual``.

        Returns:
            The result in the shape and dtype of *x*; with a residual, the result and the sum.
        """
        if residual is None:
            normed: Tensor = ir.ops.rms_norm.native(x, *self._options())
            return normed
        both: tuple[Tensor, Tensor] = ir.ops.fused_add_rms_norm.native(
            x, residual, *self._options()
        )
        return both

    def forward_cuda(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As :meth:`forward_native`, but with a residual, *x* and *residual* are donated.

        Do not use donated tensors afterwards.
        """
        if residual is None:
            normed: Tensor = ir.ops.rms_norm(x, *self._options())
            return normed
        both: tuple[Tensor, Tensor] = ir.ops.fused_add_rms_norm.maybe_inplace(
            x, residual, *self._options()
        )
        return both

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _options(self) -> tuple[Tensor | None, float, int | None]:
        weight = self.weight if self.has_weight else None
        return weight, self.variance_epsilon, self.variance_size

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, eps={self.variance_epsilon}"


@CustomOp.register("gemma_rms_norm")
class GemmaRMSNorm(CustomOp):
    """RMS norm with the factor ``1 + weight``, in float32: ``ir.ops.rms_norm``.

    Args:
        hidden_size: the size of the last dimension.
        eps: added to the mean square.

    Source: Gemma, arXiv:2403.08295.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.variance_epsilon = eps

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As :meth:`RMSNorm.forward_native`; nothing is donated."""
        if residual is None:
            normed: Tensor = ir.ops.rms_norm.native(x, self._factor(), self.variance_epsilon)
            return normed
        both: tuple[Tensor, Tensor] = ir.ops.fused_add_rms_norm.native(
            x, residual, self._factor(), self.variance_epsilon
        )
        return both

    def forward_cuda(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            normed: Tensor = ir.ops.rms_norm(x, self._factor(), self.variance_epsilon)
            return normed
        both: tuple[Tensor, Tensor] = ir.ops.fused_add_rms_norm(
            x, residual, self._factor(), self.variance_epsilon
        )
        return both

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _factor(self) -> Tensor:
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def extra_repr(self) -> str:
        return f"hidden_size={self.weight.numel()}, eps={self.variance_epsilon}"
