"""State-space mixers, short convolutions, and the storage of their states."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opweave.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from opweave.layers.linear_methods import QuantConfig
from opweave.layers.mamba_states import (
    CausalConv1d,
    MixedColumnParallelLinear,
    SequenceStates,
    StateCache,
    StatefulLayer,
    decay_rates,
    head_vector,
    selective_scan,
    sequence_states,
    ssd_chunk_scan,
    stateful_layers,
    tensor_of,
)
from opweave.layers.norm import Mixer2RMSNormGated, RMSNorm
from opweave.layers.parallel import WeightLoader, current_tensor_parallel, set_weight_attrs
from opweave.layers.registry import LayerArgumentError, PluggableLayer, ShardingError

__all__ = [
    "MambaMixer",
    "MambaMixer2",
    "Plamo2MambaMixer",
    "SequenceStates",
    "ShortConv",
    "StateCache",
    "StatefulLayer",
    "sequence_states",
    "stateful_layers",
]


# The mixer of Mamba.


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


# The mixer of Mamba-2.


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


# The mixer of PLaMo 2.


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


# The gated short convolution of LFM2.


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
