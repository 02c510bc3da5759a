"""Mixtral (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from opweave_engine.models.mixture import MixtureForCausalLM
from opweave_engine.models.mixture_config import MixtureConfig
from opweave_engine.models.weights import FusedWeightTarget, WeightTarget


class MixtralForCausalLM(MixtureForCausalLM):
    """A Mixtral language model: every layer has experts."""

    experts: ClassVar[tuple[str, str, str]] = ("w1", "w2", "w3")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(MixtureConfig.mixtral(config), dtype=dtype)

    def own_name(self, name: str) -> str:
        return _original(name)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        # transformers 5 names the block "mlp" where it writes all experts into one tensor.
        super().load_weights((self.own_name(name), tensor) for name, tensor in tensors)

    def places(self) -> dict[str, WeightTarget]:
        return {_original(name): place for name, place in super().places().items()}

    def fused_places(self) -> dict[str, FusedWeightTarget]:
        return {
            _original(name): FusedWeightTarget(
                fused.place, frozenset(map(_original, fused.replaced))
            )
            for name, fused in super().fused_places().items()
        }


def _original(name: str) -> str:
    """Return the name of a tensor in the original checkpoints."""
    return name.replace(".mlp.", ".block_sparse_moe.")
