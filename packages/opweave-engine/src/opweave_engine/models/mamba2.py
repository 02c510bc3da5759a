"""Mamba-2: only mixers, without attention (arXiv:2405.21060)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from opweave.layers import MambaMixer2, RMSNorm, VocabParallelEmbedding, stateful_layers
from opweave_engine.models.blocks import ResidualStream, add_and_norm
from opweave_engine.models.causal_lm import CausalLM, Decoder
from opweave_engine.models.config import Fields, InvalidConfigError, ModelConfig, key
from opweave_engine.models.weights import WeightTarget

# The configuration of Mamba-2, read from a checkpoint's ``config.json``.


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(ModelConfig):
    """The configuration of a Mamba-2 language model. Sizes are named as in ``config.json``.

    Attributes:
        intermediate_size: the channels of a mixer: ``num_heads * head_dim``.
        residual_in_fp32: keep the sum of all layers' outputs in float32.
        time_step_limit: the minimum and maximum time step, or None.
    """

    vocab_size: int = key(Fields.count, 32768)
    hidden_size: int = key(Fields.count, 4096)
    intermediate_size: int
    state_size: int = key(Fields.count, 128)
    num_hidden_layers: int = key(Fields.count, 64)
    num_heads: int = key(Fields.count, 128)
    head_dim: int = key(Fields.count, 64)
    n_groups: int = key(Fields.count, 8)
    conv_kernel: int = key(Fields.count, 4)
    chunk_size: int = key(Fields.count, 256)
    layer_norm_epsilon: float = key(Fields.number, 1e-5)
    use_bias: bool = key(Fields.flag, False)
    use_conv_bias: bool = key(Fields.flag, True)
    residual_in_fp32: bool = key(Fields.flag, True)
    time_step_limit: tuple[float | None, float | None]
    tie_word_embeddings: bool = key(Fields.flag, False)

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        fields.require("hidden_act", fields.text("hidden_act", "silu"), "silu", "swish")
        heads, head_dim = fields.count("num_heads", 128), fields.count("head_dim", 64)
        channels = heads * head_dim
        config = cls.read(fields, intermediate_size=channels, time_step_limit=_limits(fields))
        hidden, expand = config.hidden_size, fields.number("expand", 2)
        if channels != hidden * expand:
            raise InvalidConfigError(
                f"{fields.name} has 'num_heads': {heads} and 'head_dim': {head_dim}, which make "
                f"{channels} channels; 'hidden_size' {hidden} times 'expand' {expand:g} makes "
                f"{hidden * expand:g}."
            )
        fields.require_multiple("num_heads", heads, "n_groups", config.n_groups)
        return config


def _limits(fields: Fields) -> tuple[float | None, float | None]:
    """Return the limits of the time step, which is positive and finite anyway."""
    limits = fields.values.get("time_step_limit", (0.0, math.inf))
    numbers = [_number(value) for value in limits] if isinstance(limits, list | tuple) else []
    if len(numbers) != 2 or None in numbers:
        kind = "a list of two numbers, the least and the largest time step"
        raise fields.wrong("time_step_limit", limits, kind)
    least, largest = numbers
    return least or None, None if largest == math.inf else largest


def _number(value: object) -> float | None:
    """Return a number as JSON has it; transformers writes infinity as an object."""
    if isinstance(value, Mapping):
        value = math.inf if dict(value) == {"__float__": "Infinity"} else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


# The model.


class ResidualNorm(nn.Module):
    """Adds a layer's output to the sum of those before it, and normalizes.

    Args:
        size: the size of a token's hidden state.
        epsilon: the epsilon of the norm.
        dtype: dtype of the weight and of the normalized output.
        wide: keep the sum in float32.
    """

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype, wide: bool) -> None:
        super().__init__()
        self.rms_norm = RMSNorm(size, epsilon, dtype=dtype)
        # float32 sums need no wider type, and one op adds and normalizes.
        self.wide, self.dtype = wide and dtype.itemsize < 4, dtype

    def forward(self, hidden: Tensor, residual: Tensor | None) -> ResidualStream:
        """Return the norm of the sum, and the sum."""
        if self.wide:
            residual = hidden.float() if residual is None else residual + hidden
            return self.rms_norm(residual.to(self.dtype)), residual
        return add_and_norm(self.rms_norm, hidden, residual)


class Mamba2Layer(nn.Module):
    """A norm and a mixer."""

    def __init__(self, config: Mamba2Config, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        least, largest = config.time_step_limit
        self.norm = ResidualNorm(
            config.hidden_size, config.layer_norm_epsilon, dtype, config.residual_in_fp32
        )
        self.mixer = MambaMixer2(
            config.hidden_size, config.state_size, config.conv_kernel, config.intermediate_size,
            config.use_conv_bias, config.use_bias, config.n_groups, config.num_heads,
            config.head_dim, config.layer_norm_epsilon, prefix=f"backbone.layers.{layer}.mixer",
            chunk_size=config.chunk_size, dt_min=least, dt_max=largest, params_dtype=dtype,
        )  # fmt: skip

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> ResidualStream:
        hidden, residual = self.norm(hidden, residual)
        return self.mixer(hidden), residual


class Mamba2ForCausalLM(CausalLM):
    """A Mamba-2 language model. Positions are unused, because states represent earlier tokens.

    Args:
        config: the configuration.
        dtype: dtype of weights and activations; decay rates and scan states are float32.

    Attributes:
        mixers: the stateful layers by name.
    """

    config_class = Mamba2Config

    def __init__(self, config: Mamba2Config, *, dtype: torch.dtype = torch.float32) -> None:
        vocabulary, size, tied = config.vocab_size, config.hidden_size, config.tie_word_embeddings
        with stateful_layers() as mixers:
            embedding = VocabParallelEmbedding(vocabulary, size, params_dtype=dtype)
            layers = [Mamba2Layer(config, i, dtype) for i in range(config.num_hidden_layers)]
        norm = ResidualNorm(size, config.layer_norm_epsilon, dtype, config.residual_in_fp32)
        decoder = Decoder(embedding, layers, norm)
        super().__init__(decoder, vocabulary, size, dtype=dtype, tied=tied, max_positions=None)
        self.config, self.mixers = config, mixers

    def fill_randomly(self, seed: int = 0) -> None:
        super().fill_randomly(seed)
        for name, place in self.places().items():
            # The random numbers are taken for logarithms, so that states decay and do not grow.
            if name.endswith("A_log"):
                place.fill(place.parameter.data)

    def places(self) -> dict[str, WeightTarget]:
        return {_name_in_checkpoint(name): place for name, place in super().places().items()}


def _name_in_checkpoint(name: str) -> str:
    for ours, theirs in (
        ("model.norm.rms_norm.", "backbone.norm_f."),
        (".norm.rms_norm.", ".norm."),
        ("model.embed_tokens.", "backbone.embeddings."),
        ("model.", "backbone."),
    ):
        name = name.replace(ours, theirs)
    return f"{name}_log" if name.endswith(".mixer.A") else name
