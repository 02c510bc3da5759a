"""Root-mean-square norms with a gate, as layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.layers.custom_op import CustomOp
from opweave.layers.errors import LayerArgumentError

_ACTIVATIONS = ("silu", "swish", "sigmoid")


@CustomOp.register("rms_norm_gated")
class RMSNormGated(CustomOp):
    """``norm(x * act(z)) * weight``, or ``norm(x) * weight * act(z)``: ``ir.ops.rms_norm_gated``.

    Args:
        hidden_size: the size of the last dimension.
        eps: added to the mean square.
        group_size: normalize groups of this many elements separately; None for one group.
        norm_before_gate: normalize before the gate is applied, instead of after.
        device, dtype: device and dtype of the weight.
        activation: activation of the gate: ``"silu"`` (or ``"swish"``, its other name), or
            ``"sigmoid"``.

    Raises:
        LayerArgumentError: *group_size* does not divide *hidden_size*, or *activation* is
            unknown.

    Source: Mamba-2, arXiv:2405.21060; with *norm_before_gate*, Gated DeltaNet, arXiv:2412.06464.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        activation: str = "swish",
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise LayerArgumentError(
                f"activation={activation!r} is not one of {', '.join(_ACTIVATIONS)}."
            )
        if group_size is not None and (group_size < 1 or hidden_size % group_size):
            raise LayerArgumentError(
                f"group_size={group_size} does not divide hidden_size={hidden_size}."
            )
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.eps, self.group_size = eps, group_size
        self.norm_before_gate, self.activation = norm_before_gate, activation

    def forward_native(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize *x*, ``(..., hidden_size)``, gated by *z* of the same shape if there is one.

        Returns:
            Shape and dtype of *x*.
        """
        normed: Tensor = ir.ops.rms_norm_gated.native(x, self.weight, z, *self._options())
        return normed

    def forward_cuda(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        normed: Tensor = ir.ops.rms_norm_gated(x, self.weight, z, *self._options())
        return normed

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _options(self) -> tuple[float, int | None, bool, str]:
        return self.eps, self.group_size, self.norm_before_gate, self.activation

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.weight.numel()}, eps={self.eps}, group_size={self.group_size}, "
            f"norm_before_gate={self.norm_before_gate}, activation={self.activation!r}"
        )
