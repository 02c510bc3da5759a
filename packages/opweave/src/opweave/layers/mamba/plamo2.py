"""The mixer of PLaMo 2."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opweave.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from opweave.layers.linear.method import QuantConfig
from opweave.layers.mamba.columns import CausalConv1d, tensor_of
from opweave.layers.mamba.decay import decay_rates, head_vector
from opweave.layers.mamba.in_context import ssd_chunk_scan
from opweave.layers.mamba.stateful import StatefulLayer
from opweave.layers.norm import RMSNorm
from opweave.layers.parallel import current_tensor_parallel
from opweave.layers.pluggable_layer import PluggableLayer
from opweave.layers.weight_loading import WeightLoader, set_weight_attrs


class Plamo2Config(Protocol):
    """The mixer part of a model configuration."""

    hidden_size: int
    mamba_d_state: int
    mamba_d_conv: int
    mamba_num_heads: int
    hidden_size_per_head: int
    mamba_chunk_size: int
    rms_norm_eps: float


@PluggableLayer.register("plamo2_mamba_mixer")
class Plamo2MambaMixer(StatefulLayer):
    """PLaMo 2's mixer: Mamba-2's scan with Mamba's projections.

    Each head has a time step, which is normalized like ``B`` and ``C``.
    ``ir.ops.causal_conv1d`` and ``ir.ops.ssd_chunk_scan`` (in decode, their single-token updates)
    between linear layers; the scan applies the gate. Inside :func:`sequence_states`, tokens
    continue the states of their sequences; otherwise they are one new sequence. Heads are sharded
    over the ranks.

    Args:
        config: sizes; see :class:`Plamo2Config`.
        model_config, cache_config: kept as attributes, for replacements of this layer.
        quant_config: quantization of the linear layers.
        prefix: the name of this layer in its model, which identifies its states.
        params_dtype: dtype of the weights; by default torch's default dtype.

    Attributes:
        A: ``-exp(A_log)`` in float32; its ``weight_loader`` takes ``A_log``.

    In checkpoints, ``in_proj`` has for each head the rows of the gate, then those of the channels;
    the loader separates them. The model adds the offsets of the three norms' weights.

    Raises:
        ShardingError: the number of ranks does not divide the heads.
        DuplicateLayerError: the model has another layer of that name.

    Source: PLaMo 2 technical report, Preferred Networks, arXiv:2509.04897.
    """

    def __init__(
        self,
        config: Plamo2Config,
        model_config: Any = None,
        cache_config: Any = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        *,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(prefix)
        self.parallel = parallel = current_tensor_parallel()
        self.model_config, self.cache_config = model_config, cache_config
        heads, self.head_dim = config.mamba_num_heads, config.hidden_size_per_head
        states, self.chunk_size = config.mamba_d_state, config.mamba_chunk_size
        self.num_heads, channels = parallel.divide(heads, "mamba_num_heads"), heads * self.head_dim
        self.sizes = [states, states, max(64, config.hidden_size // 16)]  # B, C, time step
        self.in_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [channels] * 2,
            bias=False,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
            return_bias=False,
        )
        loader: WeightLoader = self.in_proj.weight_loader
        set_weight_attrs(self.in_proj.weight, weight_loader=_by_head(heads, self.num_heads, loader))
        self.conv1d = CausalConv1d(
            [channels],
            config.mamba_d_conv,
            self.prefix,
            bias=False,
            activation="silu",
            params_dtype=params_dtype,
        )
        self.bcdt_proj = RowParallelLinear(
            channels,
            sum(self.sizes),
            bias=False,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.bcdt_proj",
            return_bias=False,
        )
        self.dt_proj = ColumnParallelLinear(
            self.sizes[2],
            heads,
            bias=False,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.dt_proj",
            return_bias=False,
        )
        name = f"Plamo2MambaMixer {prefix}".rstrip()
        self.A = decay_rates(parallel, heads, what=f"{name}: A")
        self.D = head_vector(parallel, heads, params_dtype, f"{name}: D")
        self.dt_bias = head_vector(parallel, heads, params_dtype, f"{name}: dt_bias")
        self.B_norm, self.C_norm, self.dt_norm = (
            RMSNorm(size, config.rms_norm_eps, dtype=params_dtype) for size in self.sizes
        )
        self.out_proj = RowParallelLinear(
            channels,
            config.hidden_size,
            bias=False,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
            return_bias=False,
        )
        ssm = self.num_heads, self.head_dim, states
        self.state_shapes = {"conv": self.conv1d.state_shape, "ssm": ssm}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``(T, hidden_size)`` to ``(T, hidden_size)``."""
        gate, x = tensor_of(self.in_proj(hidden_states)).chunk(2, -1)
        x = self.conv1d(x)
        b, c, dt = tensor_of(self.bcdt_proj(x)).split_with_sizes(self.sizes, -1)
        b, c, dt = self.B_norm(b), self.C_norm(c), self.dt_norm(dt)
        heads = self.num_heads, self.head_dim
        y = ssd_chunk_scan(
            torch.unflatten(x, -1, heads),
            tensor_of(self.dt_proj(dt)),
            self.A,
            b,
            c,
            self.D,
            torch.unflatten(gate, -1, heads),
            self.dt_bias,
            self.prefix,
            self.chunk_size,
        )
        return tensor_of(self.out_proj(y.flatten(1)))


def _by_head(all_heads: int, own_heads: int, load: WeightLoader) -> WeightLoader:
    """Return *load* for a weight that has the rows of gate and channels alternating by head."""

    def load_by_head(param: nn.Parameter, loaded_weight: Tensor) -> None:
        heads = own_heads if loaded_weight.shape[:1] == param.shape[:1] else all_heads
        if loaded_weight.ndim == param.ndim and loaded_weight.shape[0] % (2 * heads) == 0:
            by_head = torch.unflatten(loaded_weight, 0, (heads, 2, -1))
            loaded_weight = by_head.transpose(0, 1).flatten(0, 2)
        load(param, loaded_weight)  # which says so if the shape does not fit

    return load_by_head
