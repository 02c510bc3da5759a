"""State-space mixers, short convolutions, and the storage of their states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from opweave.layers import mamba_states
from opweave.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    RowParallelLinear,
    tensor_of,
)
from opweave.layers.linear_methods import QuantConfig
from opweave.layers.norm import Mixer2RMSNormGated, RMSNorm
from opweave.layers.parallel import WeightLoader, current_tensor_parallel, fill, set_weight_attrs
from opweave.layers.registry import LayerArgumentError, PluggableLayer, ShardingError

# Base class of the mixers.


LinearT = TypeVar("LinearT", bound=LinearBase)


class _Mixer(mamba_states.StatefulLayer):
    """A stateful layer of linear layers with the same options, and sharded parameters of a scan."""

    def __init__(
        self,
        model_config: Any,
        cache_config: Any,
        quant_config: QuantConfig | None,
        prefix: str,
        params_dtype: torch.dtype | None,
    ) -> None:
        super().__init__(prefix)
        self.parallel = current_tensor_parallel()
        self.model_config, self.cache_config = model_config, cache_config
        self.quant_config = quant_config
        self.params_dtype = params_dtype or torch.get_default_dtype()

    def _linear(
        self,
        kind: Callable[..., LinearT],
        name: str,
        input_size: int,
        output_size: int | list[int],
        bias: bool = False,
        **options: Any,
    ) -> LinearT:
        """Return a linear layer of this *kind*, called *name*."""
        return kind(
            input_size,
            output_size,
            bias=bias,
            params_dtype=self.params_dtype,
            quant_config=self.quant_config,
            prefix=f"{self.prefix}.{name}",
            return_bias=False,
            **options,
        )

    def _conv(
        self,
        channels: list[int],
        kernel_size: int,
        bias: bool,
        activation: str | None = None,
        whole: tuple[int, ...] = (),
    ) -> mamba_states.CausalConv1d:
        """Return the convolution of this layer; see :class:`CausalConv1d`."""
        options: Any = {"bias": bias, "activation": activation, "params_dtype": self.params_dtype}
        return mamba_states.CausalConv1d(channels, kernel_size, self.prefix, whole, **options)

    def _scan_parameter(self, name: str, *shape: int, is_rate: bool = False) -> nn.Parameter:
        """Return an uninitialized parameter, sharded along its first dimension.

        Args:
            name: its name, for errors.
            shape: its shape on all ranks together.
            is_rate: it is ``A = -exp(A_log)``, in float32; its loader takes ``A_log``.
        """
        parallel, label = self.parallel, f"{type(self).__name__} {self.prefix}: {name}"

        def load(param: nn.Parameter, loaded_weight: Tensor) -> None:
            values = -torch.exp(loaded_weight.float()) if is_rate else loaded_weight
            fill(param.data, values, label, 0, parallel.rank, parallel.size)

        dtype = torch.float32 if is_rate else self.params_dtype
        data = torch.empty(parallel.divide(shape[0], label), *shape[1:], dtype=dtype)
        parameter = nn.Parameter(data, requires_grad=False)
        set_weight_attrs(parameter, weight_loader=load, output_dim=0)
        return parameter


# The mixer of Mamba.


@PluggableLayer.register("mamba_mixer")
class MambaMixer(_Mixer):
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
        self, hidden_size: int, ssm_state_size: int, conv_kernel_size: int, intermediate_size: int,
        time_step_rank: int, use_conv_bias: bool, use_bias: bool, use_rms_norm: bool,
        rms_norm_has_weight: bool = True, rms_norm_eps: float = 1e-5, activation: str = "silu",
        is_lora_enabled: bool = False, model_config: Any = None, cache_config: Any = None,
        quant_config: QuantConfig | None = None, prefix: str = "", *,
        params_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model_config, cache_config, quant_config, prefix, params_dtype)
        self.ssm_state_size, self.time_step_rank = ssm_state_size, time_step_rank
        self.use_rms_norm, self.is_lora_enabled = use_rms_norm, is_lora_enabled
        self.activation = activation
        sizes = [time_step_rank, ssm_state_size, ssm_state_size]
        self.in_proj = self._linear(
            MergedColumnParallelLinear, "in_proj", hidden_size, [intermediate_size] * 2, use_bias
        )
        self.conv1d = self._conv([intermediate_size], conv_kernel_size, use_conv_bias, activation)
        self.x_proj = self._linear(RowParallelLinear, "x_proj", intermediate_size, sum(sizes))
        # The scan adds the bias, in float32.
        dt_sizes = time_step_rank, intermediate_size
        self.dt_proj = self._linear(
            ColumnParallelLinear, "dt_proj", *dt_sizes, True, skip_bias_add=True
        )
        self.A = self._scan_parameter("A", intermediate_size, ssm_state_size, is_rate=True)
        self.D = self._scan_parameter("D", intermediate_size)
        self.out_proj = self._linear(
            RowParallelLinear, "out_proj", intermediate_size, hidden_size, use_bias
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
        y = mamba_states.selective_scan(u, dt, self.A, b, c, self.D, gate, bias, self.prefix)
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
class MambaMixer2(_Mixer):
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
        self, hidden_size: int, ssm_state_size: int, conv_kernel_size: int, intermediate_size: int,
        use_conv_bias: bool, use_bias: bool, n_groups: int = 1, num_heads: int = 128,
        head_dim: int = 64, rms_norm_eps: float = 1e-5, activation: str = "silu",
        use_rms_norm: bool = True, model_config: Any = None, cache_config: Any = None,
        quant_config: QuantConfig | None = None, prefix: str = "", *, chunk_size: int = 256,
        dt_min: float | None = None, dt_max: float | None = None,
        params_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model_config, cache_config, quant_config, prefix, params_dtype)
        if num_heads * head_dim != intermediate_size:
            raise LayerArgumentError(
                f"num_heads={num_heads} of head_dim={head_dim} make {num_heads * head_dim} "
                f"channels, but intermediate_size={intermediate_size}."
            )
        if n_groups < 1 or num_heads % n_groups:
            raise LayerArgumentError(f"n_groups={n_groups} does not divide num_heads={num_heads}.")
        self.activation, self.ssm_state_size = activation, ssm_state_size
        self.num_heads, self.head_dim = self.parallel.divide(num_heads, "num_heads"), head_dim
        if n_groups > 1 and n_groups % self.parallel.size:
            raise ShardingError(
                f"n_groups={n_groups} cannot be divided over {self.parallel.size} tensor-parallel "
                "ranks; use a number of ranks that divides it. (A single group could be shared.)"
            )
        self.n_groups = max(1, n_groups // self.parallel.size)
        self.chunk_size, self.dt_min, self.dt_max = chunk_size, dt_min, dt_max
        grouped = n_groups * ssm_state_size
        mixed = [intermediate_size, grouped, grouped]  # x, B, C
        is_shared = n_groups == 1  # by all ranks
        self.in_proj = mamba_states.MixedColumnParallelLinear(
            hidden_size,
            [intermediate_size, *mixed, num_heads],
            (2, 3) if is_shared else (),
            use_bias,
            self.params_dtype,
            quant_config,
            f"{self.prefix}.in_proj",
        )
        self.conv1d = self._conv(
            mixed, conv_kernel_size, use_conv_bias, activation, (1, 2) if is_shared else ()
        )
        self.A = self._scan_parameter("A", num_heads, is_rate=True)
        self.D = self._scan_parameter("D", num_heads)
        self.dt_bias = self._scan_parameter("dt_bias", num_heads)
        self.norm = Mixer2RMSNormGated(intermediate_size, n_groups, use_rms_norm, rms_norm_eps)
        self.norm.to(self.params_dtype)
        self.out_proj = self._linear(
            RowParallelLinear, "out_proj", intermediate_size, hidden_size, use_bias
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
        x = torch.unflatten(x, -1, (self.num_heads, self.head_dim))
        b, c = (torch.unflatten(t, -1, (self.n_groups, self.ssm_state_size)) for t in (b, c))
        options = self.prefix, self.chunk_size, self.dt_min, self.dt_max
        y = mamba_states.ssd_chunk_scan(x, dt, self.A, b, c, self.D, None, self.dt_bias, *options)
        return tensor_of(self.out_proj(self.norm(y.flatten(1), gate)))


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
class Plamo2MambaMixer(_Mixer):
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
        super().__init__(model_config, cache_config, quant_config, prefix, params_dtype)
        heads, self.head_dim = config.mamba_num_heads, config.hidden_size_per_head
        states, self.chunk_size = config.mamba_d_state, config.mamba_chunk_size
        self.num_heads = self.parallel.divide(heads, "mamba_num_heads")
        channels = heads * self.head_dim
        self.sizes = [states, states, max(64, config.hidden_size // 16)]  # B, C, time step
        self.in_proj = self._linear(
            MergedColumnParallelLinear, "in_proj", config.hidden_size, [channels] * 2
        )
        loader: WeightLoader = self.in_proj.weight_loader
        set_weight_attrs(self.in_proj.weight, weight_loader=_by_head(heads, self.num_heads, loader))
        self.conv1d = self._conv([channels], config.mamba_d_conv, False, "silu")
        self.bcdt_proj = self._linear(RowParallelLinear, "bcdt_proj", channels, sum(self.sizes))
        self.dt_proj = self._linear(ColumnParallelLinear, "dt_proj", self.sizes[2], heads)
        self.A = self._scan_parameter("A", heads, is_rate=True)
        self.D = self._scan_parameter("D", heads)
        self.dt_bias = self._scan_parameter("dt_bias", heads)
        self.B_norm, self.C_norm, self.dt_norm = (
            RMSNorm(size, config.rms_norm_eps, dtype=params_dtype) for size in self.sizes
        )
        self.out_proj = self._linear(RowParallelLinear, "out_proj", channels, config.hidden_size)
        ssm = self.num_heads, self.head_dim, states
        self.state_shapes = {"conv": self.conv1d.state_shape, "ssm": ssm}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``(T, hidden_size)`` to ``(T, hidden_size)``."""
        gate, x = tensor_of(self.in_proj(hidden_states)).chunk(2, -1)
        x = self.conv1d(x)
        b, c, dt = tensor_of(self.bcdt_proj(x)).split_with_sizes(self.sizes, -1)
        b, c, dt = self.B_norm(b), self.C_norm(c), self.dt_norm(dt)
        x, gate = (torch.unflatten(t, -1, (self.num_heads, self.head_dim)) for t in (x, gate))
        dt, options = tensor_of(self.dt_proj(dt)), (self.prefix, self.chunk_size)
        y = mamba_states.ssd_chunk_scan(x, dt, self.A, b, c, self.D, gate, self.dt_bias, *options)
        return tensor_of(self.out_proj(y.flatten(1)))


def _by_head(all_heads: int, local_heads: int, load: WeightLoader) -> WeightLoader:
    """Return *load* for a weight that has the rows of gate and channels alternating by head."""

    def load_by_head(param: nn.Parameter, loaded_weight: Tensor) -> None:
        heads = local_heads if loaded_weight.shape[:1] == param.shape[:1] else all_heads
        if loaded_weight.ndim == param.ndim and loaded_weight.shape[0] % (2 * heads) == 0:
            by_head = torch.unflatten(loaded_weight, 0, (heads, 2, -1))
            loaded_weight = by_head.transpose(0, 1).flatten(0, 2)
        load(param, loaded_weight)  # raises if the shape does not fit

    return load_by_head


# The gated short convolution of LFM2.


class ShortConvConfig(Protocol):
    """The short convolution part of a model configuration."""

    conv_L_cache: int  # noqa: N815 - the name in config.json
    conv_bias: bool


@PluggableLayer.register("short_conv")
class ShortConv(_Mixer):
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
        self, config: ShortConvConfig, dim: int, layer_idx: int, model_config: Any = None,
        cache_config: Any = None, quant_config: QuantConfig | None = None, prefix: str = "", *,
        params_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model_config, cache_config, quant_config, prefix, params_dtype)
        self.layer_idx = layer_idx
        self.in_proj = self._linear(
            MergedColumnParallelLinear, "in_proj", dim, [dim] * 3, config.conv_bias
        )
        self.conv = self._conv([dim], config.conv_L_cache, config.conv_bias)
        self.out_proj = self._linear(RowParallelLinear, "out_proj", dim, dim, config.conv_bias)
        self.state_shapes = {"conv": self.conv.state_shape}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``(T, dim)`` to ``(T, dim)``."""
        b, c, x = tensor_of(self.in_proj(hidden_states)).chunk(3, -1)
        return tensor_of(self.out_proj(c * self.conv(b * x)))
