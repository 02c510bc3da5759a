"""The configuration of Qwen2-VL's vision encoder, read from a checkpoint's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opweave_engine.models.errors import InvalidConfigError
from opweave_engine.models.fields import Fields


@dataclass(frozen=True)
class Qwen2VisionConfig:
    """The configuration of Qwen2-VL's vision encoder. Sizes are named as in ``config.json``.

    Attributes:
        embed_dim: the size of a patch's hidden state.
        hidden_size: the size of the merger's output, the hidden size of the language model.
        spatial_merge_size: the side of the squares of patches that become one token.
        rope_theta: the base of the frequencies.
        dtype: the name of the checkpoint's dtype; None if it does not say.
    """

    depth: int
    embed_dim: int
    hidden_size: int
    num_heads: int
    mlp_ratio: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    rope_theta: float
    dtype: str | None

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return self.embed_dim // self.num_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen2VisionConfig:
        """Read the object in a ``config.json``, or the ``vision_config`` in one.

        Missing keys have the same meaning as in transformers.

        Raises:
            UnsupportedModelError: an activation or rope type that is not supported.
            InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
        """
        fields = Fields(config)
        activation = fields.text("hidden_act", "quick_gelu")
        fields.require("hidden_act", activation, "quick_gelu")
        rope = fields.nested("rope_parameters")
        rope.require("rope_type", rope.text("rope_type", "axial"), "axial")
        found = cls(
            depth=fields.count("depth", 32),
            embed_dim=fields.count("embed_dim", 1280),
            hidden_size=fields.count("hidden_size", 3584),
            num_heads=fields.count("num_heads", 16),
            mlp_ratio=fields.count("mlp_ratio", 4),
            in_channels=fields.count("in_channels", 3),
            patch_size=fields.count("patch_size", 14),
            temporal_patch_size=fields.count("temporal_patch_size", 2),
            spatial_merge_size=fields.count("spatial_merge_size", 2),
            rope_theta=rope.number("rope_theta", 10000.0),
            dtype=fields.dtype(),
        )
        if found.embed_dim % (4 * found.num_heads):
            raise InvalidConfigError(
                f"{fields.name} has 'embed_dim': {found.embed_dim} for {found.num_heads} "
                "'num_heads'; a head's size must be a multiple of 4, pairs for rows and columns."
            )
        return found
