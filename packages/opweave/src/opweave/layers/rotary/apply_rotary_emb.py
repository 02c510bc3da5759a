"""Rotation by given angles."""

from __future__ import annotations

from torch import Tensor

from opweave import ir
from opweave.layers.custom_op import CustomOp


@CustomOp.register("apply_rotary_emb")
class ApplyRotaryEmb(CustomOp):
    """Rotates pairs of dimensions by given angles: ``ir.ops.apply_rotary_emb``.

    Args:
        enforce_enable: run the platform's method regardless of the configuration.
        is_neox_style: pair dimension ``i`` with ``i + r / 2``; otherwise ``2 * i`` with
            ``2 * i + 1``.
        enable_fp32_compute: compute in float32; otherwise in the dtype of the input.
    """

    def __init__(
        self,
        enforce_enable: bool = False,
        is_neox_style: bool = True,
        enable_fp32_compute: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.is_neox_style, self.enable_fp32_compute = is_neox_style, enable_fp32_compute

    def forward_native(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate *x*, ``(..., tokens, heads, head_size)``, by angles ``(tokens, r / 2)``."""
        rotated: Tensor = ir.ops.apply_rotary_emb.native(
            x, cos, sin, self.is_neox_style, self.enable_fp32_compute
        )
        return rotated

    def forward_cuda(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated: Tensor = ir.ops.apply_rotary_emb(
            x, cos, sin, self.is_neox_style, self.enable_fp32_compute
        )
        return rotated

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def extra_repr(self) -> str:
        return f"is_neox_style={self.is_neox_style}, fp32_compute={self.enable_fp32_compute}"
