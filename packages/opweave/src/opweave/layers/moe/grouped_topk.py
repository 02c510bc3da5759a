"""Routing to the best experts in the best groups, as a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.layers.custom_op import CustomOp
from opweave.layers.errors import LayerArgumentError

Routing = tuple[Tensor, Tensor]


@CustomOp.register("grouped_topk")
class GroupedTopk(CustomOp):
    """``ir.ops.grouped_topk`` as a layer.

    Args:
        topk: number of experts per token.
        renormalize: divide the weights of a token by their sum.
        num_expert_group: number of groups of experts; 0: one.
        topk_group: number of groups to choose experts from; 0: all.
        scoring_func: ``"softmax"`` or ``"sigmoid"``.
        routed_scaling_factor: final factor of the weights.
        num_fused_shared_experts: number of shared experts, with ids from ``E``, that get every
            token with weight 1; their weights follow those of the other experts.
        enforce_enable: as in :class:`CustomOp`.
    """

    def __init__(
        self,
        topk: int,
        renormalize: bool,
        num_expert_group: int = 0,
        topk_group: int = 0,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        num_fused_shared_experts: int = 0,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.topk, self.renormalize = topk, renormalize
        self.num_expert_group = num_expert_group or 1
        self.topk_group = topk_group or self.num_expert_group
        self.scoring_func, self.routed_scaling_factor = scoring_func, routed_scaling_factor
        self.num_fused_shared_experts = num_fused_shared_experts

    def forward_native(
        self,
        hidden_states: Tensor,
        gating_output: Tensor,
        e_score_correction_bias: Tensor | None = None,
    ) -> Routing:
        """Return weights ``(T, topk)``, float32, and experts ``(T, topk)``, int32.

        Args:
            hidden_states: ``(T, hidden)``; only the number of rows is used.
            gating_output: ``(T, E)``, logits.
            e_score_correction_bias: ``(E,)`` or None; added to the scores for the choice, but not
                to the weights.

        Raises:
            LayerArgumentError: the numbers of rows differ.
            ValueError: as in ``ir.ops.grouped_topk``.
        """
        return self._route(
            ops.grouped_topk.native, hidden_states, gating_output, e_score_correction_bias
        )

    def forward_cuda(
        self,
        hidden_states: Tensor,
        gating_output: Tensor,
        e_score_correction_bias: Tensor | None = None,
    ) -> Routing:
        """Return the same as :meth:`forward_native`, from the op, which may run a kernel."""
        return self._route(ops.grouped_topk, hidden_states, gating_output, e_score_correction_bias)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _route(
        self, route: Callable[..., Any], hidden: Tensor, logits: Tensor, bias: Tensor | None
    ) -> Routing:
        if hidden.shape[0] != logits.shape[0]:
            raise LayerArgumentError(
                f"grouped_topk: {hidden.shape[0]} tokens, but logits of {logits.shape[0]}."
            )
        weights, ids = route(
            logits,
            self.topk,
            self.num_expert_group,
            self.topk_group,
            self.renormalize,
            self.scoring_func,
            self.routed_scaling_factor,
            bias,
        )
        return self._with_shared(weights, ids, logits.shape[1])

    def _with_shared(self, weights: Tensor, ids: Tensor, num_experts: int) -> Routing:
        count = self.num_fused_shared_experts
        if not count:
            return weights, ids
        numbers = torch.arange(num_experts, num_experts + count, dtype=ids.dtype, device=ids.device)
        everyone = numbers.expand(ids.shape[0], count)
        ones = weights.new_ones(ids.shape[0], count)
        return torch.cat((weights, ones), dim=1), torch.cat((ids, everyone), dim=1)
