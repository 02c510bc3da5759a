"""A custom op as a vLLM plugin writes it: input for ``opweave migrate``.

    opweave migrate examples/vllm_custom_op.py

The file is parsed, never imported, so vLLM is not needed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from vllm.model_executor.custom_op import CustomOp


@CustomOp.register("soft_capped_gelu")
class SoftCappedGelu(CustomOp):
    """``cap * tanh(gelu(x) / cap)``."""

    def __init__(self, cap: float = 30.0) -> None:
        super().__init__()
        self.cap = cap

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.gelu(x) / self.cap) * self.cap

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.my_kernels.soft_capped_gelu(out, x, self.cap)
        return out
