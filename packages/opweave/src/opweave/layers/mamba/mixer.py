"""The mixer of Mamba."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opweave.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from opweave.layers.linear.method import QuantConfig
from opweave.layers.mamba.columns import CausalConv1d, tensor_of
from opweave.layers.mamba.decay import decay_rates, head_vector
from opweave.layers.mamba.in_context import selective_scan
from opweave.layers.mamba.stateful import StatefulLayer
from opweave.layers.norm import RMSNorm
from opweave.layers.parallel import current_tensor_parallel
from opweave.layers.pluggable_layer import PluggableLayer


@PluggableLayer.register("mamba_mixer")
class MambaMixer(StatefulLayer):
    """Mamba's mixer: a selective state space per channel.

    ``ir.ops.causal_conv1d`` and ``ir.ops.selective_scan`` (in decode, their single-token updates)
    between linear layers. Inside :func:`sequence_states`, tokens continue the states of their
    sequences; otherwise they are one new sequence. Channels are sharded over the ranks.

    Args:
        hidden_size: size of a token's hidden state.
        ssm_state_size: ``N``, the number of states per channel.
        conv_kernel_size: kernel size of the convolution.
        intermediate_size: number of channels, on all ranks together.
        time_step_rank: number of features that time steps are projected from.
        use_conv_bias, use_bias: whether the convolution, and the first and last linear layer, have
            a bias.
        use_rms_norm: normalize time step, ``B`` and ``C``, as Jamba and FalconMamba do.
        rms_norm_has_weight: whether these norms have weights, as in Jamba.
        rms_norm_eps: epsilon of these norms.
        activation: activation of the convolution: ``"silu"``.
        model_config, cache_config: kept as attributes, for replacements of this layer.
        is_lora_enabled: pass a contiguous input to the projection of time steps, as adapters
            require.
        quant_config: quantization of the linear layers.
        prefix: the name of this layer in its model, which identifies its states.
        params_dtype: dtype of the weights; by default torch's default dtype.

    Attributes:
        A: ``-exp(A_log)`` in float32; its ``weight_loader`` takes ``A_log``.

    Raises:
        ShardingError: the number of ranks does not divide the channels.
        DuplicateLayerError: the model has another layer of that name.

    Source: Gu and Dao, arXiv:2312.00752; with norms, Jamba, arXiv:2403.19887.
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        intermediate_size: int,
        time_step_rank: int,
        use_conv_bias: bool,
        use_bias: bool,
        use_rms_norm: bool,
        rms_norm_has_weight: bool = True,
        rms_norm_eps: float = 1e-5,
        activation: str = "silu",
        is_lora_enabled: bool = False,
        model_config: Any = None,
        cache_config: Any = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        *,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(prefix)
        self.parallel = current_tensor_parallel()
        self.ssm_state_size, self.time_step_rank = ssm_state_size, time_step_rank
        self.use_rms_norm, self.is_lora_enabled = use_rms_norm, is_lora_enabled
        self.model_config, self.cache_config, self.activation = (
            model_config, cache_config, activation,
        )  # fmt: skip
        sizes = [time_step_rank, ssm_state_size, ssm_state_size]
        self.in_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size] * 2,
            bias=use_bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
            return_bias=False,
        )
        self.conv1d = CausalConv1d(
            [intermediate_size],
            conv_kernel_size,
            self.prefix,
            bias=use_conv_bias,
            activation=activation,
            params_dtype=params_dtype,
        )
        self.x_proj = RowParallelLinear(
            intermediate_size,
            sum(sizes),
            bias=False,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.x_proj",
            return_bias=False,
        )
        # The scan adds the bias, in float32.
        self.dt_proj = ColumnParallelLinear(
            time_step_rank,
            intermediate_size,
            skip_bias_add=True,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.dt_proj",
            return_bias=False,
        )
        name = f"MambaMixer {prefix}".rstrip()
        self.A = decay_rates(self.parallel, intermediate_size, ssm_state_size, what=f"{name}: A")
        self.D = head_vector(self.parallel, intermediate_size, params_dtype, f"{name}: D")
        self.out_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=use_bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
            return_bias=False,
        )
        self.dt_layernorm = self.b_layernorm = self.c_layernorm = None
        if use_rms_norm:
            self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
                RMSNorm(size, rms_norm_eps, has_weight=rms_norm_has_weight, dtype=params_dtype)
                for size in sizes
            )
        self.state_shapes = {"conv": self.conv1d.state_shape, "ssm": (*self.A.shape,)}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``(T, hidden_size)`` to ``(T, hidden_size)``."""
        u, gate = tensor_of(self.in_proj(hidden_states)).chunk(2, -1)
        u = self.conv1d(u)
        dt, b, c = self._dt_b_c(u)
        bias = self.dt_proj.bias
        y = selective_scan(u, dt, self.A, b, c, self.D, gate, bias, self.prefix)
        return tensor_of(self.out_proj(y))

    def _dt_b_c(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return time step, ``B`` and ``C`` of every token."""
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        dt, b, c = tensor_of(self.x_proj(u)).split_with_sizes(sizes, -1)
        norms = self.dt_layernorm, self.b_layernorm, self.c_layernorm
        dt, b, c = (
            part if norm is None else norm(part)
            for part, norm in zip((dt, b, c), norms, strict=True)
        )
        if self.is_lora_enabled:
            dt = dt.contiguous()
        return tensor_of(self.dt_proj(dt)), b, c
