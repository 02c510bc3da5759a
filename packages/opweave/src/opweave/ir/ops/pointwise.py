"""Elementwise activations.

Every step is computed in the dtype of ``x``, as in the models that were trained with them.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.registry import register_op
from opweave.ir.traits import ROWWISE

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


@register_op(native_traits={ROWWISE})
def gelu_new(x: Tensor) -> Tensor:
    """``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``: the tanh GELU.

    Args:
        x: any shape, floating point.

    Returns:
        Shape and dtype of ``x``.

    Source: Hendrycks and Gimpel, arXiv:1606.08415; rounded in every step, as in GPT-2.
    """
    inner = _SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1.0 + torch.tanh(inner))


@register_op(native_traits={ROWWISE})
def gelu_fast(x: Tensor) -> Tensor:
    """``0.5 * x * (1 + tanh(0.7978845608 * x * (1 + 0.044715 * x * x)))``.

    :func:`gelu_new` with its constant truncated to ten digits and the inner sum factored, which
    gives other roundings in 16-bit dtypes.

    Args:
        x: any shape, floating point.

    Returns:
        Shape and dtype of ``x``.

    Source: Hendrycks and Gimpel, arXiv:1606.08415.
    """
    inner = x * 0.7978845608 * (1.0 + 0.044715 * x * x)
    return 0.5 * x * (1.0 + torch.tanh(inner))


@register_op(native_traits={ROWWISE})
def quick_gelu(x: Tensor) -> Tensor:
    """``x * sigmoid(1.702 * x)``.

    Args:
        x: any shape, floating point.

    Returns:
        Shape and dtype of ``x``.

    Source: Hendrycks and Gimpel, arXiv:1606.08415; used by CLIP, arXiv:2103.00020.
    """
    return x * torch.sigmoid(1.702 * x)


@register_op(native_traits={ROWWISE})
def relu2(x: Tensor) -> Tensor:
    """``relu(x) ** 2``; NaN propagates.

    Args:
        x: any shape, floating point.

    Returns:
        Shape and dtype of ``x``.

    Source: Primer, So et al., arXiv:2109.08668.
    """
    return functional.relu(x).square()


@register_op(native_traits={ROWWISE})
def xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    """xIELU: quadratic above zero, exponential below, with a learned curvature on each side.

    With ``p = softplus(alpha_p)`` and ``n = beta + softplus(alpha_n)``:
    ``p * x**2 + beta * x`` where ``x > 0``, else ``n * (expm1(min(x, eps)) - x) + beta * x``.

    Args:
        x: any shape, floating point.
        alpha_p, alpha_n: learned scalars, of any shape with one element; cast to the dtype of
            ``x``.
        beta: the slope at zero.
        eps: a small negative number, the upper bound of the argument of ``expm1``.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        ValueError: ``alpha_p`` or ``alpha_n`` does not have exactly one element.

    Source: Huang and Schlag, arXiv:2411.13010; used by Apertus.
    """
    positive = functional.softplus(_number("alpha_p", alpha_p, x))
    negative = beta + functional.softplus(_number("alpha_n", alpha_n, x))
    linear = beta * x
    curve = torch.expm1(x.clamp(max=eps)) - x
    return torch.where(x > 0, positive * x * x + linear, negative * curve + linear)


def _number(name: str, value: Tensor, x: Tensor) -> Tensor:
    if value.numel() != 1:
        raise ValueError(
            f"xielu: {name} must have one element; found a tensor of shape {tuple(value.shape)}."
        )
    return value.to(x.dtype).reshape(())


@gelu_new.register_input_generator
@gelu_fast.register_input_generator
@quick_gelu.register_input_generator
@relu2.register_input_generator
def _inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor]:
    return (torch.randn(num_tokens, hidden_size, device=device).to(dtype),)


@xielu.register_input_generator
def _xielu_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, float, float]:
    (x,) = _inputs(num_tokens, hidden_size, dtype, device)
    alpha_p, alpha_n = torch.tensor([[0.2], [-1.1]], device=device).to(dtype)
    return x, alpha_p, alpha_n, 0.5, -1e-6


for _op in (gelu_new, gelu_fast, xielu):
    # tanh and expm1 may round either way, and near -1 the following sum cancels all other digits.
    _op.override_tolerance(torch.bfloat16, atol=3e-2, rtol=1.6e-2)
    _op.override_tolerance(torch.float16, atol=4e-3, rtol=2e-3)

quick_gelu.override_tolerance(torch.float16, atol=1e-3, rtol=2e-3)  # the same, times x
