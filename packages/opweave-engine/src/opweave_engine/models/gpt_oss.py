"""The mixture of experts of gpt-oss (arXiv:2508.10925)."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from opweave.layers import FusedMoE, ReplicatedLinear
from opweave_engine.models.config import Fields
from opweave_engine.models.mixture import read_experts
from opweave_engine.models.weights import CheckpointModel, WeightTarget


class GptOssMoE(CheckpointModel):
    """gpt-oss's mixture of experts: a router, and clamped experts with biases.

    Args:
        num_experts: number of experts.
        top_k: number of experts per token.
        hidden_size, intermediate_size: the sizes of a token's hidden state, and between an expert's
            products.
        alpha, limit: constants of the activation.
        dtype: dtype of weights and activations.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        alpha: float = 1.702,
        limit: float = 7.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.router = ReplicatedLinear(
            hidden_size, num_experts, params_dtype=dtype, return_bias=False
        )
        sizes = num_experts, top_k, hidden_size, intermediate_size
        self.mixture = FusedMoE(
            *sizes, dtype, activation="swigluoai", has_bias=True, alpha=alpha, limit=limit
        )
        self.requires_grad_(False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        """Build the block of the model that the object in a ``config.json`` describes.

        Missing keys have the same meaning as in transformers.

        Raises:
            UnsupportedModelError: the weights are quantized.
            InvalidConfigError: a value is of the wrong type, or does not fit the others.
        """
        fields = Fields(config)
        fields.refuse_quantized()
        experts = read_experts(fields, "num_local_experts", 128, 4)
        return cls(
            experts["num_experts"],
            experts["num_experts_per_tok"],
            fields.count("hidden_size", 2880),
            fields.count("intermediate_size", 2880),
            alpha=fields.number("swiglu_alpha", 1.702),
            limit=fields.number("swiglu_limit", 7.0),
            dtype=dtype,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``(T, hidden_size)``.

        Args:
            hidden: ``(T, hidden_size)``, the dtype of the weights.
        """
        mixed: Tensor = self.mixture(hidden, self.router(hidden))
        return mixed

    def places(self) -> dict[str, WeightTarget]:
        """Return the target of each checkpoint tensor, by its name inside the block.

        All experts are in one tensor, whose last two dimensions are ``(in, out)``.
        """
        places = {f"router.{name}": WeightTarget(p) for name, p in self.router.named_parameters()}
        for name, part in (("gate_up_proj", "w13"), ("down_proj", "w2")):
            weight = getattr(self.mixture, f"{part}_weight")
            bias = getattr(self.mixture, f"{part}_bias")
            places[f"experts.{name}"] = WeightTarget(weight, (part, None, True))
            places[f"experts.{name}_bias"] = WeightTarget(bias, (part,))
        return places
