"""The gated short convolution of LFM2."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from opweave.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from opweave.layers.linear.method import QuantConfig
from opweave.layers.mamba.columns import CausalConv1d, tensor_of
from opweave.layers.mamba.stateful import StatefulLayer
from opweave.layers.pluggable_layer import PluggableLayer


class ShortConvConfig(Protocol):
    """The short convolution part of a model configuration."""

    conv_L_cache: int  # noqa: N815 - the name in config.json
    conv_bias: bool


@PluggableLayer.register("short_conv")
class ShortConv(StatefulLayer):
    """``out_proj(C * conv(B * x))``, where ``B``, ``C`` and ``x`` are projected from the tokens.

    ``ir.ops.causal_conv1d``, without activation, between linear layers. Inside
    :func:`sequence_states`, tokens continue the states of their sequences; otherwise they are one
    new sequence. Channels are sharded over the ranks.

    Args:
        config: ``conv_L_cache`` is the kernel size of the convolution; ``conv_bias`` is whether it
            and the linear layers have a bias.
        dim: the size of a token's hidden state, and the number of channels.
        layer_idx: the index of this layer, kept as an attribute.
        model_config, cache_config: kept as attributes, for replacements of this layer.
        quant_config: quantization of the linear layers.
        prefix: the name of this layer in its model, which identifies its states.
        params_dtype: dtype of the weights; by default torch's default dtype.

    Raises:
        ShardingError: the number of ranks does not divide the channels.
        DuplicateLayerError: the model has another layer of that name.

    Source: LFM2 technical report, Liquid AI, arXiv:2511.23404.
    """

    def __init__(
        self,
        config: ShortConvConfig,
        dim: int,
        layer_idx: int,
        model_config: Any = None,
        cache_config: Any = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        *,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(prefix)
        self.layer_idx, self.model_config, self.cache_config = (
            layer_idx, model_config, cache_config,
        )  # fmt: skip
        self.in_proj = MergedColumnParallelLinear(
            dim,
            [dim] * 3,
            bias=config.conv_bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
            return_bias=False,
        )
        self.conv = CausalConv1d(
            [dim],
            config.conv_L_cache,
            self.prefix,
            bias=config.conv_bias,
            params_dtype=params_dtype,
        )
        self.out_proj = RowParallelLinear(
            dim,
            dim,
            bias=config.conv_bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
            return_bias=False,
        )
        self.state_shapes = {"conv": self.conv.state_shape}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``(T, dim)`` to ``(T, dim)``."""
        b, c, x = tensor_of(self.in_proj(hidden_states)).chunk(3, -1)
        return tensor_of(self.out_proj(c * self.conv(b * x)))
