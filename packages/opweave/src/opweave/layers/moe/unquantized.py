"""Experts with weights in the dtype of the activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from opweave.ir import ops
from opweave.layers.custom_op import CustomOp
from opweave.layers.moe.method import ExpertShapes, FusedMoEMethod

if TYPE_CHECKING:
    from opweave.layers.moe.layer import FusedMoE


@CustomOp.register("unquantized_fused_moe")
class UnquantizedFusedMoEMethod(FusedMoEMethod):
    """``ir.ops.fused_experts`` with the layer's weights.

    ``forward_native`` calls the op too: its native implementation computes every expert for every
    token, which defines the result but is too slow to run a model.
    """

    def create_weights(self, layer: FusedMoE, shapes: ExpertShapes) -> None:
        """Create ``w13_weight``, ``w2_weight`` and the biases, as in ``fused_experts``."""
        count, size, hidden = shapes.num_experts, shapes.intermediate_size, shapes.hidden_size
        wanted = {
            "w13_weight": (count, shapes.rows, hidden),
            "w2_weight": (count, hidden, size),
            "w13_bias": (count, shapes.rows) if shapes.has_bias else None,
            "w2_bias": (count, hidden) if shapes.has_bias else None,
        }
        for name, shape in wanted.items():
            parameter = None
            if shape is not None:
                empty = torch.empty(shape, dtype=shapes.dtype, device=shapes.device)
                parameter = nn.Parameter(empty, requires_grad=False)
            layer.register_parameter(name, parameter)

    def forward_native(
        self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """Return this rank's part of the weighted sum; see :class:`FusedMoEMethod`."""
        output: Tensor = ops.fused_experts(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights,
            topk_ids,
            layer.activation,
            layer.expert_map,
            layer.w13_bias,
            layer.added_w2_bias,
            layer.apply_router_weight_on_input,
            **layer.activation_options,
        )
        return output
