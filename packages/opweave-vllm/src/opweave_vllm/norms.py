"""RMSNorm, with and without a residual."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from opweave import ir
from opweave_vllm.replacing import replace


class OpweaveRMSNorm(RMSNorm):
    """RMSNorm by opweave's ops."""

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize *x*, or its sum with *residual*, and return that sum, too."""
        # The plain tensor: vLLM's subclass of Parameter makes every call go through the dispatcher.
        weight = self.weight.data if self.pass_weight else None
        return _normalize(x, residual, weight, self.variance_epsilon, self.variance_size_override)

    # vLLM calls forward_cpu where custom_ops enables the layer, and forward_native elsewhere.
    forward_cpu = forward_native


class OpweaveGemmaRMSNorm(GemmaRMSNorm):
    """RMSNorm with the factor ``1 + weight`` by opweave's ops."""

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize *x*, or its sum with *residual*, and return that sum, too."""
        return _normalize(x, residual, self.weight.data.float() + 1.0, self.variance_epsilon)

    forward_cpu = forward_native


def _normalize(x: Tensor, residual: Tensor | None, *rest: Any) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None:
        return ir.ops.rms_norm(x, *rest)
    return ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, *rest)


def register() -> None:
    """Replace vLLM's RMSNorm and GemmaRMSNorm."""
    replace(RMSNorm, OpweaveRMSNorm)
    replace(GemmaRMSNorm, OpweaveGemmaRMSNorm)
