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
        num_experts: number of experts of this rank.
        rows: the rows of ``w13`` per expert: gate and up together, if there is a gate.
        intermediate_size: this rank's part of the intermediate dimension.
        hidden_size: size of a token's hidden state.
        has_bias: whether both products have a bias.
        dtype, device: dtype and device of the parameters.
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

    Call it as ``method(layer, x, topk_weights, topk_ids)``; ``apply`` is that of ``nn.Module``. It
    returns this rank's part of the weighted sum, ``(T, hidden)``, for *x* ``(T, hidden)``,
    *topk_weights* ``(T, K)``, float32, and *topk_ids* ``(T, K)``, int32, the experts' ids on all
    ranks. Several layers may share a method, because it does not store anything about a layer.
    """

    @property
    def method_name(self) -> str:
        """The name of the method in reports."""
        return type(self).__name__

    @property
    def quant_config(self) -> object | None:
        """The quantization of the weights, or None."""
        return None

    def create_weights(self, layer: FusedMoE, shapes: ExpertShapes) -> None:
        """Register the uninitialized parameters on *layer*."""
        raise NotImplementedError(f"{self.method_name} creates no weights.")

    def process_weights_after_loading(self, layer: FusedMoE) -> None:
        """Convert the loaded weights to the format of the computation. A no-op by default."""

    def apply_monolithic(self, layer: FusedMoE, x: Tensor, router_logits: Tensor) -> Tensor:
        """Route the tokens and apply the experts, for kernels that do both; two calls by default.

        Args:
            layer: the layer with the weights and the router.
            x: ``(T, hidden)``.
            router_logits: ``(T, E)``.
        """
        output: Tensor = self(layer, x, *layer.select_experts(x, router_logits))
        return output


class FusedMoEQuantConfig(Protocol):
    """Chooses the method of a layer."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the method for the layer called *prefix*; None: not quantized."""
