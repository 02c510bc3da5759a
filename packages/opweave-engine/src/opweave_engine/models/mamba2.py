"""Mamba-2: only mixers, without attention (arXiv:2405.21060)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from opweave.layers import MambaMixer2, RMSNorm, VocabParallelEmbedding, stateful_layers
from opweave_engine.models.causal_lm import CausalLM, Decoder
from opweave_engine.models.decoder_layer import add_and_norm
from opweave_engine.models.mamba2_config import Mamba2Config
from opweave_engine.models.weights import WeightTarget


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

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
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
            config.hidden_size,
            config.state_size,
            config.conv_kernel,
            config.intermediate_size,
            config.use_conv_bias,
            config.use_bias,
            config.n_groups,
            config.num_heads,
            config.head_dim,
            config.layer_norm_epsilon,
            prefix=f"backbone.layers.{layer}.mixer",
            chunk_size=config.chunk_size,
            dt_min=least,
            dt_max=largest,
            params_dtype=dtype,
        )

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
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

    def __init__(self, config: Mamba2Config, *, dtype: torch.dtype = torch.float32) -> None:
        size = config.hidden_size
        with stateful_layers() as mixers:
            decoder = Decoder(
                VocabParallelEmbedding(config.vocab_size, size, params_dtype=dtype),
                (Mamba2Layer(config, i, dtype) for i in range(config.num_hidden_layers)),
                ResidualNorm(size, config.layer_norm_epsilon, dtype, config.residual_in_fp32),
            )
        tied = config.tie_word_embeddings
        super().__init__(
            decoder, config.vocab_size, size, dtype=dtype, tied=tied, max_positions=None
        )
        self.config, self.mixers = config, mixers

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: torch.dtype) -> Self:
        return cls(Mamba2Config.from_hf(config), dtype=dtype)

    def fill_randomly(self, seed: int = 0) -> None:
        super().fill_randomly(seed)
        for name, place in self.places().items():
            # The numbers are logarithms, as in checkpoints: states are to decay, not to grow.
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
