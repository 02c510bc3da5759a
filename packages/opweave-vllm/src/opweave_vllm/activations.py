"""Gated activations."""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

from opweave import ir
from opweave_vllm.replacing import replace


class OpweaveSiluAndMul(SiluAndMul):
    """SwiGLU by opweave's op."""

    def forward_native(self, x: Tensor) -> Tensor:
        """Return ``silu(gate) * up``."""
        return ir.ops.silu_and_mul(x)

    # vLLM calls forward_cpu where custom_ops enables the layer, and forward_native elsewhere.
    forward_cpu = forward_native


class OpweaveGeluAndMul(GeluAndMul):
    """GeGLU by opweave's op."""

    def forward_native(self, x: Tensor) -> Tensor:
        """Return ``gelu(gate) * up``."""
        return ir.ops.gelu_and_mul(x, self.approximate)

    forward_cpu = forward_native


def register() -> None:
    """Replace vLLM's SiluAndMul and GeluAndMul."""
    replace(SiluAndMul, OpweaveSiluAndMul)
    replace(GeluAndMul, OpweaveGeluAndMul)
