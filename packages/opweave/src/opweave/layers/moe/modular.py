"""The computation of experts in three replaceable steps: prepare, experts, finalize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.ir.ops.fused_experts import Routed, route
from opweave.layers.custom_op import CustomOp
from opweave.layers.moe.method import ExpertShapes, FusedMoEMethod

if TYPE_CHECKING:
    from opweave.layers.moe.layer import FusedMoE


class PrepareAndFinalize(Protocol):
    """Sends tokens to the ranks of their experts, and returns the results."""

    def prepare(self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Routed:
        """Quantize and send the tokens; find the experts' places in the weights."""

    def finalize(self, outputs: Tensor, routed: Routed) -> Tensor:
        """Sum the weighted results ``(T, K, hidden)``, and send them back: ``(T, hidden)``."""


class Experts(Protocol):
    """Computes the experts."""

    def apply(self, layer: FusedMoE, routed: Routed) -> Tensor:
        """Return each expert's result for each of its tokens: ``(T, K, hidden)``."""


class LocalPrepareAndFinalize:
    """Keeps tokens on their rank."""

    def prepare(self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Routed:
        on_input = layer.apply_router_weight_on_input
        count = layer.placement.local_experts
        return route(x, topk_weights, topk_ids, len(count), layer.expert_map, on_input)

    def finalize(self, outputs: Tensor, routed: Routed) -> Tensor:
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if routed.weights is not None:
            wide = wide * routed.weights.to(wide.dtype)[..., None]
        wide = torch.where(routed.valid[..., None], wide, 0.0)
        total: Tensor = ops.moe_sum(wide)
        return total.to(outputs.dtype)


class OpExperts:
    """Computes every pair of token and expert with ``ir.ops.fused_experts``."""

    def apply(self, layer: FusedMoE, routed: Routed) -> Tensor:
        shape = routed.experts.shape
        ids = torch.where(routed.valid, routed.experts, -1).reshape(-1, 1)
        ones = torch.ones_like(ids, dtype=torch.float32)
        outputs = ops.fused_experts(
            routed.x.repeat_interleave(shape[1], dim=0),
            layer.w13_weight,
            layer.w2_weight,
            ones,
            ids,
            layer.activation,
            None,
            layer.w13_bias,
            layer.added_w2_bias,
            **layer.activation_options,
        )
        return torch.unflatten(outputs, 0, tuple(shape))


class ModularKernel:
    """A kernel in three steps: prepare, experts, finalize.

    Args:
        prepare_finalize: the first and last step; by default, tokens stay on their rank.
        experts: the middle step; by default ``ir.ops.fused_experts``.
    """

    def __init__(
        self,
        prepare_finalize: PrepareAndFinalize | None = None,
        experts: Experts | None = None,
    ) -> None:
        self.prepare_finalize = prepare_finalize or LocalPrepareAndFinalize()
        self.experts = experts or OpExperts()

    def __call__(
        self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        routed = self.prepare_finalize.prepare(layer, x, topk_weights, topk_ids)
        return self.prepare_finalize.finalize(self.experts.apply(layer, routed), routed)


@CustomOp.register("modular_fused_moe")
class FusedMoEModularMethod(FusedMoEMethod):
    """Applies a :class:`ModularKernel` to the weights of another method.

    Args:
        old_quant_method: the method that created the weights and describes their quantization.
        fused_experts: the kernel; it returns the result of ``ir.ops.fused_experts``.
    """

    def __init__(self, old_quant_method: FusedMoEMethod, fused_experts: ModularKernel) -> None:
        super().__init__()
        self.old_quant_method, self.fused_experts = old_quant_method, fused_experts

    @classmethod
    def make(cls, layer: FusedMoE, kernel: ModularKernel | None = None) -> FusedMoEModularMethod:
        """Return a method to assign to *layer* in place of its current one."""
        return cls(layer.quant_method, kernel or ModularKernel())

    @property
    def method_name(self) -> str:
        return self.old_quant_method.method_name

    @property
    def quant_config(self) -> object | None:
        return self.old_quant_method.quant_config

    def create_weights(self, layer: FusedMoE, shapes: ExpertShapes) -> None:
        """Not supported: the other method creates the weights.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "FusedMoEModularMethod computes with weights that another method has created. Build "
            "the layer with that method, then assign FusedMoEModularMethod.make(layer)."
        )

    def process_weights_after_loading(self, layer: FusedMoE) -> None:
        self.old_quant_method.process_weights_after_loading(layer)

    def forward_native(
        self, layer: FusedMoE, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """Return this rank's part of the weighted sum; see :class:`FusedMoEMethod`."""
        return self.fused_experts(layer, x, topk_weights, topk_ids)
