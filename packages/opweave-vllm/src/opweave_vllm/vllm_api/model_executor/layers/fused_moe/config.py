"""The configuration of a mixture of experts, for kernels and methods of other packages."""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from opweave_vllm.vllm_api.model_executor.layers.fused_moe.activation import MoEActivation

__all__ = ["FusedMoEConfig", "FusedMoEParallelConfig", "FusedMoEQuantConfig"]


@dataclass
class FusedMoEParallelConfig:
    """The ranks over which the experts are divided."""

    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    use_ep: bool = False


@dataclass
class FusedMoEConfig:
    """The sizes and dtypes of a layer; opweave's layers take them as arguments instead.

    Attributes:
        num_experts: the number of experts on all ranks; *num_local_experts*, on this one.
        experts_per_token: the number of experts per token.
        hidden_dim: the size of a token's hidden state.
        intermediate_size_per_partition: the size between the two products on this rank.
        activation: the activation between the two products.
        in_dtype: the dtype of hidden states.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size_per_partition: int
    num_local_experts: int
    in_dtype: torch.dtype
    activation: MoEActivation = MoEActivation.SILU
    moe_parallel_config: FusedMoEParallelConfig = field(default_factory=FusedMoEParallelConfig)
    device: torch.device | str = "cpu"
    router_logits_dtype: torch.dtype | None = None
    max_num_tokens: int = 256
    has_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in FusedMoEParallelConfig.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.moe_parallel_config, name)  # tp_size, ep_rank, ...


@dataclass
class FusedMoEQuantConfig:
    """The scales, zero points and biases of quantized experts.

    Attributes:
        quant_dtype: the dtype of quantized activations, or None.
        per_act_token_quant: whether activations have one scale per token, not per tensor.
        per_out_ch_quant: whether weights have one scale per output channel.
        block_shape: the rows and columns of a block of weights with one scale.
        w1_scale, w2_scale, w1_zp, w2_zp, w1_bias, w2_bias: of the first and second product.
        a1_scale, a2_scale: static scales of their inputs.

    Raises:
        ValueError: activations are quantized both by token and by block.
    """

    quant_dtype: torch.dtype | str | None = None
    per_act_token_quant: bool = False
    per_out_ch_quant: bool = False
    block_shape: list[int] | None = None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None
    w1_zp: Tensor | None = None
    w2_zp: Tensor | None = None
    w1_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.per_act_token_quant and self.block_shape is not None:
            raise ValueError(
                f"per_act_token_quant=True and block_shape={self.block_shape} exclude each other"
            )

    @classmethod
    def make(cls, quant_dtype: torch.dtype | str | None = None, **values: Any) -> Self:
        """Return a configuration; *values* are its other attributes."""
        return cls(quant_dtype, **values)

    @property
    def is_quantized(self) -> bool:
        """Whether activations are quantized."""
        return self.quant_dtype is not None

    @property
    def is_per_act_token(self) -> bool:
        """Whether activations have one scale per token."""
        return self.per_act_token_quant

    @property
    def is_block_quantized(self) -> bool:
        """Whether weights have one scale per block."""
        return self.block_shape is not None

    @property
    def use_fp8_w8a8(self) -> bool:
        """Whether activations are float8."""
        return self.quant_dtype == torch.float8_e4m3fn

    @property
    def use_int8_w8a8(self) -> bool:
        """Whether activations are int8."""
        return self.quant_dtype == torch.int8
