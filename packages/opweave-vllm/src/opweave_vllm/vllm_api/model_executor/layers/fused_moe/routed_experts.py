"""The experts of a layer without its router, which opweave does not have as a layer."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from opweave.layers import PluggableLayer

__all__ = ["FusedMoERouter", "RoutedExperts"]


class FusedMoERouter(ABC):
    """Base class of routers: choose the experts of each token."""

    @abstractmethod
    def select_experts(
        self, hidden_states: Tensor, router_logits: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the weights and the ids of the experts, ``(tokens, experts per token)`` each."""


class RoutedExperts(PluggableLayer):
    """Base class that lets modules be imported; it cannot be built.

    :class:`opweave.layers.FusedMoE` owns both the router and the weights.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}: opweave has no layer for experts without a router; derive "
            "from opweave.layers.FusedMoE, or register a FusedMoEMethod with kernels."
        )
