"""The configuration of Mamba-2, read from a checkpoint's ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opweave_engine.models.errors import InvalidConfigError
from opweave_engine.models.fields import Fields


@dataclass(frozen=True)
class Mamba2Config:
    """The configuration of a Mamba-2 language model. Sizes are named as in ``config.json``.

    Attributes:
        intermediate_size: the channels of a mixer: ``num_heads * head_dim``.
        residual_in_fp32: keep the sum of all layers' outputs in float32.
        time_step_limit: the minimum and maximum time step, or None.
        dtype: the name of the checkpoint's dtype; None if it does not say.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    state_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    n_groups: int
    conv_kernel: int
    chunk_size: int
    layer_norm_epsilon: float
    use_bias: bool
    use_conv_bias: bool
    residual_in_fp32: bool
    time_step_limit: tuple[float | None, float | None]
    tie_word_embeddings: bool
    dtype: str | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mamba2Config:
        """Read the object in a ``config.json``, as transformers 4 or 5 writes it.

        Missing keys have the same meaning as in transformers.

        Raises:
            UnsupportedModelError: an activation or quantization that is not supported.
            InvalidConfigError: a value is missing, of the wrong type, or does not fit the others.
        """
        fields = Fields(config)
        activation = fields.text("hidden_act", "silu")
        fields.require("hidden_act", activation, "silu", "swish")
        fields.refuse_quantized()
        hidden, expand = fields.count("hidden_size", 4096), fields.number("expand", 2)
        heads, head_dim = fields.count("num_heads", 128), fields.count("head_dim", 64)
        groups = fields.count("n_groups", 8)
        if heads * head_dim != hidden * expand:
            raise InvalidConfigError(
                f"{fields.name} has 'num_heads': {heads} and 'head_dim': {head_dim}, which make "
                f"{heads * head_dim} channels; 'hidden_size' {hidden} times 'expand' {expand:g} "
                f"makes {hidden * expand:g}."
            )
        fields.require_multiple("num_heads", heads, "n_groups", groups)
        return cls(
            vocab_size=fields.count("vocab_size", 32768),
            hidden_size=hidden,
            intermediate_size=heads * head_dim,
            state_size=fields.count("state_size", 128),
            num_hidden_layers=fields.count("num_hidden_layers", 64),
            num_heads=heads,
            head_dim=head_dim,
            n_groups=groups,
            conv_kernel=fields.count("conv_kernel", 4),
            chunk_size=fields.count("chunk_size", 256),
            layer_norm_epsilon=fields.number("layer_norm_epsilon", 1e-5),
            use_bias=fields.flag("use_bias", False),
            use_conv_bias=fields.flag("use_conv_bias", True),
            residual_in_fp32=fields.flag("residual_in_fp32", True),
            time_step_limit=_limits(fields),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            dtype=fields.dtype(),
        )


def _limits(fields: Fields) -> tuple[float | None, float | None]:
    """Return the limits of the time step, which is positive and finite anyway."""
    given = fields.values.get("time_step_limit", (0.0, math.inf))
    found = [_number(value) for value in given] if isinstance(given, list | tuple) else []
    if len(found) != 2 or None in found:
        raise InvalidConfigError(
            f"{fields.name} has 'time_step_limit': {given!r}; it must be a list of two numbers, "
            "the least and the largest time step."
        )
    least, largest = found
    return least or None, None if largest == math.inf else largest


def _number(value: object) -> float | None:
    """Return a number as JSON has it; transformers writes infinity as an object."""
    if isinstance(value, Mapping):
        value = math.inf if dict(value) == {"__float__": "Infinity"} else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
