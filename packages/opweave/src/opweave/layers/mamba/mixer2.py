"""The mixer of Mamba-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opweave.layers.errors import LayerArgumentError, ShardingError
from opweave.layers.linear import RowParallelLinear
from opweave.layers.linear.method import QuantConfig
from opweave.layers.mamba.columns import CausalConv1d, MixedColumnParallelLinear, tensor_of
from opweave.layers.mamba.decay import decay_rates, head_vector
from opweave.layers.mamba.in_context import ssd_chunk_scan
from opweave.layers.mamba.stateful import StatefulLayer
from opweave.layers.mixer2_gated_norm import Mixer2RMSNormGated
from opweave.layers.parallel import current_tensor_parallel
from opweave.layers.pluggable_layer import PluggableLayer


@PluggableLayer.register("mamba_mixer2")
class MambaMixer2(StatefulLayer):
    """Mamba-2's mixer: a state space whose heads each have one decay rate.

    ``ir.ops.causal_conv1d`` and ``ir.ops.ssd_chunk_scan`` (in decode, their single-token updates),
    then ``mixer2_gated_rms_norm``, between linear layers. Inside :func:`sequence_states`, tokens
    continue the states of their sequences; otherwise they are one new sequence. Heads and groups
    are sharded over the ranks; a single group is replicated.

    Args:
        hidden_size: size of a token's hidden state.
        ssm_state_size: ``N``, the number of states per channel.
        conv_kernel_size: kernel size of the convolution.
        intermediate_size: number of channels, ``num_heads * head_dim``.
        use_conv_bias, use_bias: whether the convolution and the two linear layers have a bias.
        n_groups: number of groups of consecutive heads that share ``B`` and ``C``.
        num_heads, head_dim: number of heads, and channels per head.
        rms_norm_eps: epsilon of the gated norm.
        activation: activation of the convolution: ``"silu"``.
        use_rms_norm: False: gate without a norm.
        model_config, cache_config: kept as attributes, for replacements of this layer.
        quant_config: quantization of the linear layers.
        prefix: the name of this layer in its model, which identifies its states.
        chunk_size: chunk size of the scan.
        dt_min, dt_max: limits of the time step, or None.
        params_dtype: dtype of the weights; by default torch's default dtype.

    Attributes:
        A: ``-exp(A_log)`` in float32; its ``weight_loader`` takes ``A_log``.

    Raises:
        ShardingError: the number of ranks does not divide the heads or groups.
        LayerArgumentError: the sizes are inconsistent.
        DuplicateLayerError: the model has another layer of that name.

    Source: Dao and Gu, arXiv:2405.21060.
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        intermediate_size: int,
        use_conv_bias: bool,
        use_bias: bool,
        n_groups: int = 1,
        num_heads: int = 128,
        head_dim: int = 64,
        rms_norm_eps: float = 1e-5,
        activation: str = "silu",
        use_rms_norm: bool = True,
        model_config: Any = None,
        cache_config: Any = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        *,
        chunk_size: int = 256,
        dt_min: float | None = None,
        dt_max: float | None = None,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(prefix)
        self.parallel = parallel = current_tensor_parallel()
        _check(intermediate_size, num_heads, head_dim, n_groups)
        self.model_config, self.cache_config, self.activation = (
            model_config, cache_config, activation,
        )  # fmt: skip
        self.num_heads, self.head_dim = parallel.divide(num_heads, "num_heads"), head_dim
        self.n_groups, self.ssm_state_size = _groups(n_groups, parallel.size), ssm_state_size
        self.chunk_size, self.dt_min, self.dt_max = chunk_size, dt_min, dt_max
        grouped = n_groups * ssm_state_size
        mixed = [intermediate_size, grouped, grouped]  # x, B, C
        shared = n_groups == 1  # by all ranks
        self.in_proj = MixedColumnParallelLinear(
            hidden_size,
            [intermediate_size, *mixed, num_heads],
            (2, 3) if shared else (),
            use_bias,
            params_dtype,
            quant_config,
            f"{prefix}.in_proj",
        )
        self.conv1d = CausalConv1d(
            mixed,
            conv_kernel_size,
            self.prefix,
            (1, 2) if shared else (),
            bias=use_conv_bias,
            activation=activation,
            params_dtype=params_dtype,
        )
        name = f"MambaMixer2 {prefix}".rstrip()
        self.A = decay_rates(parallel, num_heads, what=f"{name}: A")
        self.D = head_vector(parallel, num_heads, params_dtype, f"{name}: D")
        self.dt_bias = head_vector(parallel, num_heads, params_dtype, f"{name}: dt_bias")
        self.norm = Mixer2RMSNormGated(intermediate_size, n_groups, use_rms_norm, rms_norm_eps).to(
            params_dtype or torch.get_default_dtype()
        )
        self.out_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=use_bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
            return_bias=False,
        )
        ssm = self.num_heads, head_dim, ssm_state_size
        self.state_shapes = {"conv": self.conv1d.state_shape, "ssm": ssm}

    def forward(self, hidden_states: Tensor, mup_vector: Tensor | None = None) -> Tensor:
        """Map ``(T, hidden_size)`` to ``(T, hidden_size)``.

        Args:
            hidden_states: ``(T, hidden_size)``.
            mup_vector: factors for this rank's outputs of the first linear layer.
        """
        projected = tensor_of(self.in_proj(hidden_states))
        if mup_vector is not None:
            projected = projected * mup_vector
        channels, grouped = self.num_heads * self.head_dim, self.n_groups * self.ssm_state_size
        sizes = [channels, channels + 2 * grouped, self.num_heads]
        gate, mixed, dt = projected.split_with_sizes(sizes, -1)
        x, b, c = self.conv1d(mixed).split_with_sizes([channels, grouped, grouped], -1)
        y = ssd_chunk_scan(
            torch.unflatten(x, -1, (self.num_heads, self.head_dim)),
            dt,
            self.A,
            torch.unflatten(b, -1, (self.n_groups, self.ssm_state_size)),
            torch.unflatten(c, -1, (self.n_groups, self.ssm_state_size)),
            self.D,
            None,
            self.dt_bias,
            self.prefix,
            self.chunk_size,
            self.dt_min,
            self.dt_max,
        )
        return tensor_of(self.out_proj(self.norm(y.flatten(1), gate)))


def _check(intermediate_size: int, num_heads: int, head_dim: int, n_groups: int) -> None:
    if num_heads * head_dim != intermediate_size:
        raise LayerArgumentError(
            f"num_heads={num_heads} of head_dim={head_dim} make {num_heads * head_dim} channels, "
            f"but intermediate_size={intermediate_size}."
        )
    if n_groups < 1 or num_heads % n_groups:
        raise LayerArgumentError(f"n_groups={n_groups} does not divide num_heads={num_heads}.")


def _groups(n_groups: int, ranks: int) -> int:
    """Return the groups of one rank."""
    if n_groups > 1 and n_groups % ranks:
        raise ShardingError(
            f"n_groups={n_groups} cannot be divided over {ranks} tensor-parallel ranks; use a "
            "number of ranks that divides it. (A single group could be shared.)"
        )
    return max(1, n_groups // ranks)
