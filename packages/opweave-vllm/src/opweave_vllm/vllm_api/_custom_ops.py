"""Native ops as functions, and opweave's ops with the signatures of vLLM's ``_custom_ops``."""

from typing import Any

from torch import Tensor

from opweave import ir
from opweave._custom_ops import advance_step_flashattn, fused_add_rms_norm, rms_norm

__all__ = [
    "advance_step_flashattn", "fused_add_rms_norm", "gelu_and_mul", "gelu_tanh_and_mul", "moe_sum",
    "rms_norm", "rotary_embedding", "scaled_fp8_quant", "scaled_int8_quant", "silu_and_mul",
]  # fmt: skip


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    """Write ``silu(gate) * up`` to *out*."""
    out.copy_(ir.ops.silu_and_mul(x))


def gelu_and_mul(out: Tensor, x: Tensor) -> None:
    """Write ``gelu(gate) * up`` to *out*."""
    out.copy_(ir.ops.gelu_and_mul(x))


def gelu_tanh_and_mul(out: Tensor, x: Tensor) -> None:
    """Write ``gelu(gate) * up`` to *out*, with the approximation by tanh."""
    out.copy_(ir.ops.gelu_and_mul(x, "tanh"))


def moe_sum(input: Tensor, output: Tensor, **unsupported: Any) -> None:
    """Write the sum over the experts of each token to *output*."""
    _refuse("moe_sum", unsupported)
    output.copy_(ir.ops.moe_sum(input))


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate *query* and *key* in place.

    Raises:
        NotImplementedError: *rope_dim_offset* or *inverse* is given.
    """
    _refuse("rotary_embedding", {"rope_dim_offset": rope_dim_offset, "inverse": inverse})
    for x in (query, key):
        if x is not None:
            rotated = ir.ops.rotary_embedding_single(
                x, positions, cos_sin_cache, head_size, is_neox
            )
            x.copy_(rotated)


def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize to float8, with *scale* or with one scale per token or for the whole tensor.

    Returns:
        The quantized tensor, which is *output* if given, and the scales.

    Raises:
        NotImplementedError: *num_token_padding* or *group_shape* is given.
    """
    unsupported = {"num_token_padding": num_token_padding, "group_shape": group_shape}
    _refuse("scaled_fp8_quant", unsupported)
    if scale is not None:
        quantized = ir.ops.static_quant_fp8(input, scale)
    elif use_per_token_if_dynamic:
        quantized, scale = ir.ops.dynamic_per_token_quant_fp8(input, scale_ub)
    else:
        quantized, scale = ir.ops.dynamic_per_tensor_quant_fp8(input)
    return quantized if output is None else output.copy_(quantized), scale


def scaled_int8_quant(
    input: Tensor, scale: Tensor | None = None, azp: Tensor | None = None, symmetric: bool = True
) -> tuple[Tensor, Tensor, None]:
    """Quantize to int8, with *scale* or with one scale per token.

    Returns:
        The quantized tensor, the scales, and None for the zero points.

    Raises:
        NotImplementedError: the quantization is not symmetric.
    """
    _refuse("scaled_int8_quant", {"azp": azp, "symmetric=False": not symmetric})
    if scale is not None:
        return ir.ops.static_quant_int8(input, scale), scale, None
    return *ir.ops.dynamic_per_token_quant_int8(input), None


def _refuse(function: str, options: dict[str, Any]) -> None:
    # Not "in", which would compare tensors.
    names = [name for name, value in options.items() if isinstance(value, Tensor) or value]
    if names:
        raise NotImplementedError(f"opweave's {function} does not support {', '.join(names)}")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"opweave does not have _custom_ops.{name}; it has {', '.join(__all__)}. The ops of "
        "opweave.ir.ops are functional."
    )
