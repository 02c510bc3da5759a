"""RMSNorm, with and without a residual."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm

from opweave import ir


class OpweaveRMSNorm(RMSNorm):  # type: ignore[misc]
    """RMSNorm by opweave's ops."""

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        # The plain tensor: vLLM's subclass of Parameter makes every call go through the dispatcher.
        weight = self.weight.data if self.pass_weight else None
        rest: tuple[Any, ...] = (weight, self.variance_epsilon, self.variance_size_override)
        if residual is None:
            return ir.ops.rms_norm(x, *rest)
        return ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, *rest)

    # vLLM calls forward_cpu where custom_ops enables the layer, and forward_native elsewhere.
    forward_cpu = forward_native


def register(bfloat16_only: bool) -> None:
    """Replace vLLM's RMSNorm."""
    RMSNorm.register_oot(OpweaveRMSNorm, name="RMSNorm")
