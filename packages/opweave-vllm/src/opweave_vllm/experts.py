"""Mixture of experts: the experts' products, behind vLLM's routing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from opweave import ir
from opweave_vllm.replacing import replace


class OpweaveExperts(CPUUnquantizedExperts):
    """Unquantized experts by opweave's op."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weights as they are: vLLM would pack them for its own kernel."""

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor,
        topk_ids: Tensor, activation: Any, global_num_experts: int, expert_map: Tensor | None,
        a1q_scale: Tensor | None, a2_scale: Tensor | None, workspace13: Tensor, workspace2: Tensor,
        expert_tokens_meta: Any, apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """Write the weighted sum of the experts' results to *output*."""
        if apply_router_weight_on_input:  # vLLM has done so
            topk_weights = torch.ones_like(topk_weights)
        result = ir.ops.fused_experts(
            hidden_states,
            w1.data,
            w2.data,
            topk_weights,
            topk_ids,
            activation.value,
            expert_map,
            self.w1_bias,
            self.w2_bias,
        )
        output.copy_(result)


class OpweaveFusedMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's method for unquantized experts with :class:`OpweaveExperts`."""

    experts_cls: Any

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        kind = self.experts_cls
        if isinstance(kind, type) and issubclass(kind, CPUUnquantizedExperts):
            self.experts_cls = OpweaveExperts


def register() -> None:
    """Replace vLLM's method for unquantized experts; quantized experts keep their own."""
    replace(UnquantizedFusedMoEMethod, OpweaveFusedMoEMethod)
