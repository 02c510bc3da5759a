"""The provider "opweave" of vLLM's IR ops; ``ir_op_priority`` selects it."""

# vLLM reads the annotations of these functions, so they must not be strings.

from typing import Any

import torch
from torch import Tensor
from vllm import ir as vllm_ir

from opweave import ir

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _supports(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return variance_size is None and x.device.type == "cpu" and x.dtype in _FLOATS


def _supports_residual(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _supports(x, weight, epsilon, variance_size)


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Root mean square norm."""
    return ir.ops.rms_norm(x, weight, epsilon, variance_size)


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Root mean square norm of the sum with the residual, in-place."""
    result: Any = ir.ops.fused_add_rms_norm.maybe_inplace(
        x, x_residual, weight, epsilon, variance_size
    )
    return result


def register() -> None:
    """Register the provider; it runs only where ``ir_op_priority`` names it."""
    ops = vllm_ir.ops
    ops.rms_norm.register_impl("opweave", supports_args=_supports)(rms_norm)
    ops.fused_add_rms_norm.register_impl("opweave", supports_args=_supports_residual, inplace=True)(
        fused_add_rms_norm
    )
