"""Replaces the experts of a transformers model, which has already routed the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opweave.layers.moe.layer import FusedMoE
from opweave.layers.pluggable_layer import PluggableLayer


@PluggableLayer.register("transformers_fused_moe")
class TransformersFusedMoE(FusedMoE):
    """:class:`FusedMoE` with the interface of transformers' ``*Experts``, for routed tokens.

    The routing options have no effect.
    """

    def forward(  # type: ignore[override]  # the arguments that transformers gives its own
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, **kwargs: Any
    ) -> Tensor:
        """Return ``(T, hidden_size)`` in the dtype of *hidden_states*.

        Args:
            hidden_states: ``(T, hidden_size)``, the dtype of the weights.
            topk_ids: ``(T, K)``, integer: the experts' ids on all ranks.
            topk_weights: ``(T, K)``, any floating dtype.
            kwargs: other arguments from transformers, which are ignored.
        """
        ids, weights = topk_ids.to(torch.int32), topk_weights.to(torch.float32)
        routed = self.quant_method(self, hidden_states, weights, ids)
        return self._finished(hidden_states, routed)
