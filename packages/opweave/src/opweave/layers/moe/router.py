"""The router: chooses experts and weights from logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.layers.errors import LayerArgumentError
from opweave.layers.moe.grouped_topk import GroupedTopk

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
