"""Rotary position embedding: its parameters and its table of cosines and sines.

Sources: Su et al., arXiv:2104.09864; ``linear``: Chen et al., arXiv:2306.15595; ``llama3``: The
Llama 3 Herd of Models, arXiv:2407.21783.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.layers.rotary.scaling import LinearScaling, Llama3Scaling, Scaling, cos_sin_table
from opweave.models.errors import InvalidConfigError
from opweave.models.fields import Fields

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """The frequencies by which positions rotate.

    Attributes:
        rope_type: one of ``ROPE_TYPES``.
        theta: the base of the frequencies.
        factor: by how much ``linear`` and ``llama3`` stretch the context.
        low_freq_factor, high_freq_factor, original_max_positions: ``llama3`` stretches wavelengths
            above ``original_max_positions / low_freq_factor``, keeps those below
            ``original_max_positions / high_freq_factor``, and interpolates between the two.
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0

    @classmethod
    def from_hf(cls, config: Fields, max_positions: int) -> RopeConfig:
        """Read ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``.

        Raises:
            UnsupportedModelError: another rope type, or a rotation of part of the head.
            InvalidConfigError: a parameter is missing or wrong.
        """
        rope = config.nested("rope_scaling" if "rope_scaling" in config else "rope_parameters")
        rope_type = rope.text("rope_type", rope.text("type", "default"))
        rope.require("rope_type", rope_type, *ROPE_TYPES)
        for fields in (config, rope):
            share = fields.number("partial_rotary_factor", 1.0)
            fields.require("partial_rotary_factor", share, 1.0)
        theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
        if rope_type == "default":
            return cls(theta=theta)
        if rope_type == "linear":
            return cls(rope_type, theta, rope.number("factor"))
        original = config.count(
            "original_max_position_embeddings",
            rope.count("original_max_position_embeddings", max_positions),
        )
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not low < high:
            raise InvalidConfigError(
                f"{rope.name} has low_freq_factor {low} and high_freq_factor {high}; the first "
                "must be the smaller one."
            )
        return cls(rope_type, theta, rope.number("factor"), low, high, original)

    @property
    def scaling(self) -> Scaling:
        """How the frequencies differ from the plain ones."""
        if self.rope_type == "linear":
            return LinearScaling(self.factor)
        if self.rope_type == "llama3":
            return Llama3Scaling(
                self.factor,
                self.low_freq_factor,
                self.high_freq_factor,
                self.original_max_positions,
            )
        return Scaling()


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions.

    Args:
        config: the frequencies.
        head_dim: the size of a head; all of it is rotated.
        max_positions: the number of positions in the table.
        dtype: of the table, which is computed in float32.
    """

    cos_sin_cache: Tensor

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        max_positions: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        frequencies = config.scaling.frequencies(head_dim, config.theta)
        table = cos_sin_table(frequencies, max_positions).to(device=device, dtype=dtype)
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return *query* and *key*, ``(T, heads, head_dim)``, rotated. Both are donated."""
        query, key = ir.ops.rotary_embedding.maybe_inplace(
            query, key, positions, self.cos_sin_cache, self.head_dim
        )
        return query, key
