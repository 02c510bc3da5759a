"""Routing of a mixture of experts: router, best experts, placement on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.layers.custom_op import CustomOp
from opweave.layers.parallel import TensorParallel
from opweave.layers.registry import LayerArgumentError, ShardingError

# Routing to the best experts in the best groups, as a layer.


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
        self, topk: int, renormalize: bool, num_expert_group: int = 0, topk_group: int = 0,
        scoring_func: str = "softmax", routed_scaling_factor: float = 1.0,
        num_fused_shared_experts: int = 0, *, enforce_enable: bool = False,
    ) -> None:  # fmt: skip
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
        shared_ids = numbers.expand(ids.shape[0], count)
        ones = weights.new_ones(ids.shape[0], count)
        return torch.cat((weights, ones), dim=1), torch.cat((ids, shared_ids), dim=1)


# The router: chooses experts and weights from logits.


RoutingFunction = Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor]]

SCORING = {
    "softmax": ops.topk_softmax,
    "sigmoid": ops.topk_sigmoid,
    "sqrtsoftplus": ops.topk_sqrtsoftplus,
}


@dataclass(frozen=True)
class Router:
    """Chooses the experts of each token.

    Attributes:
        top_k: number of experts per token.
        renormalize: divide the weights of a token by their sum.
        scoring_func: maps logits to scores: a key of ``SCORING``.
        routed_scaling_factor: final factor of the weights.
        e_score_correction_bias: ``(E,)`` or None; added to the scores for the choice, but not to
            the weights.
        grouped: chooses groups of experts first; takes precedence over *custom*.
        custom: ``custom(hidden_states, logits, top_k, renormalize)`` returns weights and experts,
            instead of the scoring function.
    """

    top_k: int
    renormalize: bool = True
    scoring_func: str = "softmax"
    routed_scaling_factor: float = 1.0
    e_score_correction_bias: Tensor | None = None
    grouped: GroupedTopk | None = None
    custom: RoutingFunction | None = None

    def __post_init__(self) -> None:
        if self.scoring_func not in SCORING:
            raise LayerArgumentError(
                f"scoring_func={self.scoring_func!r} is not one of {', '.join(SCORING)}."
            )

    def __call__(self, hidden_states: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights ``(T, top_k)``, float32, and experts ``(T, top_k)``, int32.

        Args:
            hidden_states: ``(T, hidden)``.
            router_logits: ``(T, E)``.
        """
        if self.grouped is not None:
            return self.grouped(hidden_states, router_logits, self.e_score_correction_bias)  # type: ignore[no-any-return]
        if self.custom is not None:
            weights, ids = self.custom(hidden_states, router_logits, self.top_k, self.renormalize)
            return weights.float() * self.routed_scaling_factor, ids.to(torch.int32)
        weights, ids = SCORING[self.scoring_func](
            router_logits,
            self.top_k,
            self.renormalize,
            self.e_score_correction_bias,
            self.routed_scaling_factor,
        )
        return weights, ids


# The placement of experts on ranks.


STRATEGIES = ("linear", "round_robin")


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts of one rank, and its shard of each.

    The ranks of a group are divided into ``ep_size`` subgroups of consecutive ranks. A subgroup has
    its own experts, whose intermediate dimension is sharded over its ``tp_size`` ranks.

    Attributes:
        num_experts: the number of experts.
        ep_rank, ep_size: the index of this rank's subgroup, and the number of subgroups.
        tp_rank, tp_size: the index of this rank in its subgroup, and the size of a subgroup.
        strategy: ``"linear"``: consecutive experts are in the same subgroup; ``"round_robin"``: in
            consecutive subgroups.

    >>> ExpertPlacement(5, ep_rank=0, ep_size=2).local_experts
    (0, 1, 2)
    >>> ExpertPlacement(5, ep_rank=1, ep_size=2, strategy="round_robin").local_experts
    (1, 3)
    """

    num_experts: int
    ep_rank: int = 0
    ep_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    strategy: str = "linear"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise LayerArgumentError(
                f"expert_placement_strategy={self.strategy!r}: not one of {', '.join(STRATEGIES)}."
            )

    @classmethod
    def of(
        cls, num_experts: int, parallel: TensorParallel, ep_size: int, strategy: str = "linear"
    ) -> ExpertPlacement:
        """Divide the ranks of *parallel* into *ep_size* subgroups.

        Raises:
            ShardingError: *ep_size* does not divide the number of ranks.
            LayerArgumentError: *ep_size* is not positive, or *strategy* is unknown.
        """
        if ep_size < 1:
            raise LayerArgumentError(f"ep_size={ep_size} must be at least 1.")
        if parallel.size % ep_size:
            raise ShardingError(
                f"ep_size={ep_size} does not divide the {parallel.size} ranks; each part must have "
                "as many of them."
            )
        tp_size = parallel.size // ep_size
        ep_rank, tp_rank = divmod(parallel.rank, tp_size)
        return cls(num_experts, ep_rank, ep_size, tp_rank, tp_size, strategy)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The experts of this rank, in the order of its weights."""
        experts = range(self.num_experts)
        if self.strategy == "round_robin":
            return tuple(experts[self.ep_rank :: self.ep_size])
        base, more = divmod(self.num_experts, self.ep_size)
        start = self.ep_rank * base + min(self.ep_rank, more)  # the first ranks have one more
        return tuple(experts[start : start + base + (self.ep_rank < more)])

    def expert_map(self, device: torch.device | str | None = None) -> Tensor | None:
        """Return the index of each expert in this rank's weights, -1 for experts of other ranks.

        Shape ``(num_experts,)``, int32. None if this rank has all experts.
        """
        if self.ep_size == 1:
            return None
        places = {expert: place for place, expert in enumerate(self.local_experts)}
        local_places = [places.get(expert, -1) for expert in range(self.num_experts)]
        return torch.tensor(local_places, dtype=torch.int32, device=device)
