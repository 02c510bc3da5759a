"""Experts with quantized weights, as a checkpoint has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from opweave.ir import ops
from opweave.layers.custom_op import CustomOp
from opweave.layers.linear.low_bit import BlockMethod, GroupedInt4Method, Weight8Method
from opweave.layers.linear.method import LinearMethod
from opweave.layers.linear.w8a8 import W8A8Method
from opweave.layers.moe.method import ExpertShapes, FusedMoEMethod

if TYPE_CHECKING:
    from opweave.layers.moe.layer import FusedMoE


def experts_format(method: LinearMethod | None) -> str | None:
    """Return what ``fused_experts_quant`` calls the format of a linear method; None: unsupported.

    Reordered inputs, and static or bounded scales of activations, are not supported.
    """
    if isinstance(method, GroupedInt4Method):
        return None if method.is_ordered else "w4a16"
    if isinstance(method, Weight8Method):
        return "w8a16"
    if isinstance(method, BlockMethod):
        return method.format
    if not isinstance(method, W8A8Method):
        return None
    if method.activations.is_static or method.activations.upper_bound is not None:
        return None
    return "w8a8_ue8m0" if method.activations.use_ue8m0 else "w8a8"


@CustomOp.register("quantized_fused_moe")
class QuantizedFusedMoEMethod(FusedMoEMethod):
    """``ir.ops.fused_experts_quant`` with the layer's weights.

    Parameters: those of the linear methods, with a first dimension of experts, called
    ``w13_weight``, ``w13_scale``, ``w2_weight`` and so on.

    Args:
        w13: how gate and up projections are kept; the method of a linear layer.
        w2: how down projections are kept.
    """

    def __init__(self, w13: LinearMethod, w2: LinearMethod) -> None:
        super().__init__()
        self.w13, self.w2 = w13, w2
        self.formats = experts_format(w13), experts_format(w2)

    def create_weights(self, layer: FusedMoE, shapes: ExpertShapes) -> None:
        """Create the parameters of all experts of this rank.

        Raises:
            ShardingError: a rank's shard of an expert does not consist of whole groups or blocks.
        """
        hidden, size, whole = shapes.hidden_size, shapes.intermediate_size, layer.intermediate_size
        halves = [size] * (shapes.rows // size)
        self._register(layer, "w13", self.w13, shapes, (hidden, hidden), halves)
        self._register(layer, "w2", self.w2, shapes, (size, whole), [hidden])
        for name in ("w13_bias", "w2_bias"):
            layer.register_parameter(name, None)

    def _register(
        self,
        layer: FusedMoE,
        name: str,
        method: LinearMethod,
        shapes: ExpertShapes,
        inputs: tuple[int, int],
        outputs: list[int],
    ) -> None:
        """Register the parameters of all experts, each of which *method* describes.

        Args:
            inputs: the input features of this rank, and of all ranks together.
            outputs: the output features of this rank.
        """
        one: Any = nn.Module()
        one.prefix = layer.prefix
        with torch.device("meta"):
            own, whole = inputs
            method.create_weights(one, own, outputs, whole, sum(outputs), shapes.dtype)
        for leaf, parameter in one.named_parameters():
            size = (shapes.num_experts, *parameter.shape)
            empty = torch.empty(size, dtype=parameter.dtype, device=shapes.device)
            layer.register_parameter(f"{name}_{leaf}", nn.Parameter(empty, requires_grad=False))

    def forward_native(
        self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """Return this rank's part of the weighted sum; see :class:`FusedMoEMethod`."""
        weights = [
            getattr(layer, f"{name}_{leaf}", None)
            for name in ("w13", "w2")
            for leaf in ("weight", "scale", "offset")
        ]
        output: Tensor = ops.fused_experts_quant(
            x,
            *weights,
            topk_weights,
            topk_ids,
            *self.formats,
            layer.activation,
            layer.expert_map,
            layer.apply_router_weight_on_input,
            **layer.activation_options,
        )
        return output
