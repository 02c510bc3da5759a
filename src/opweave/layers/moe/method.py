"""The strategy of a :class:`FusedMoE`: weight format and computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from opweave.layers.custom_op import CustomOp

if TYPE_CHECKING:
    from opweave.layers.moe.layer import FusedMoE


@dataclass(frozen=True)
class ExpertShapes:
    """The sizes of one rank's weights.

    Attributes:
        num_experts: the experts of this rank.
        rows: the rows of ``w13`` for each: gate and up together, where there is a gate.
        intermediate_size: this rank's part of the intermediate dimension.
        hidden_size: of a token.
        has_bias: whether both products have one.
        dtype, device: of the parameters.
    """

    num_experts: int
    rows: int
    intermediate_size: int
    hidden_size: int
    has_bias: bool
    dtype: torch.dtype
    device: torch.device | str | None


class FusedMoEMethod(CustomOp):
    """Base class of the strategies.

    A method is called: ``method(layer, x, topk_weights, topk_ids)``. (``apply`` is what it is for
    every ``nn.Module``.) It returns this rank's part of the weighted sum, ``(T, hidden)``, of
    *x* ``(T, hidden)``, *topk_weights* ``(T, K)``, float32, and *topk_ids* ``(T, K)``, int32, which
    count the experts over all ranks. One method may serve several layers: it keeps nothing of them.
    """

    @property
    def method_name(self) -> str:
        """The name of the method in reports."""
        return type(self).__name__

    @property
    def quant_config(self) -> object | None:
        """How the weights are quantized; None: they are not."""
        return None

    def create_weights(self, layer: FusedMoE, shapes: ExpertShapes) -> None:
        """Give *layer* its parameters, without values."""
        raise NotImplementedError(f"{self.method_name} creates no weights.")

    def process_weights_after_loading(self, layer: FusedMoE) -> None:
        """Bring loaded weights into the form that the computation wants. Nothing by default."""

    def apply_monolithic(self, layer: FusedMoE, x: Tensor, router_logits: Tensor) -> Tensor:
        """Route and apply in one: for a kernel that does both. By default one after the other.

        Args:
            layer: has the weights and the router.
            x: ``(T, hidden)``.
            router_logits: ``(T, E)``.
        """
        output: Tensor = self(layer, x, *layer.select_experts(x, router_logits))
        return output


class FusedMoEQuantConfig(Protocol):
    """Chooses the method of a layer."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the method for the layer called *prefix*, or None for weights as they are."""
