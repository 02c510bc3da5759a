"""Activations: gated ones, whose activated half multiplies the other, and elementwise ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.op import ROWWISE_ELEMENTS
from opweave.ir.ops.arguments import inputs_from_rows
from opweave.ir.registry import register_op
from opweave.ir.rules import ROWWISE

# Gated activations: the activated half of the last dimension multiplies the other half.
#
# Every step is computed in the dtype of ``x``.


@register_op(native_traits={ROWWISE})
def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(x1) * x2`` for the halves ``x1, x2`` of the last dimension.

    Args:
        x: ``(..., 2 * d)``, floating point.

    Returns:
        ``(..., d)`` in the dtype of ``x``; the activation is rounded to it before the product.

    Raises:
        ValueError: the last dimension is odd.

    Source: SwiGLU without the projections, Shazeer, arXiv:2002.05202.
    """
    first, second = _halves(x, "silu_and_mul")
    return functional.silu(first) * second


@register_op(native_traits={ROWWISE})
def mul_and_silu(x: Tensor) -> Tensor:
    """``x1 * silu(x2)`` for the halves ``x1, x2`` of the last dimension.

    Like :func:`silu_and_mul` with the halves exchanged.
    """
    first, second = _halves(x, "mul_and_silu")
    return first * functional.silu(second)


@register_op(native_traits={ROWWISE})
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(x1) * x2`` for the halves ``x1, x2`` of the last dimension.

    Args:
        x: ``(..., 2 * d)``, floating point.
        approximate: ``"none"`` for the exact ``x * Phi(x)``, ``"tanh"`` for the tanh approximation.

    Returns:
        ``(..., d)`` in the dtype of ``x``.

    Raises:
        ValueError: the last dimension is odd, or ``approximate`` is unknown.

    Source: GEGLU without the projections, Shazeer, arXiv:2002.05202.
    """
    _check_approximate(approximate, "gelu_and_mul")
    first, second = _halves(x, "gelu_and_mul")
    return functional.gelu(first, approximate=approximate) * second


@register_op(native_traits={ROWWISE})
def gelu_and_mul_sparse(x: Tensor, std_multiplier: float, approximate: str = "none") -> Tensor:
    """``gelu(relu(x1 - c)) * x2``, where ``c = mean(x1) + std_multiplier * std(x1)``.

    For normally distributed ``x1``, a fraction ``Phi(std_multiplier)`` of the elements becomes
    zero: 95 % for 1.64485.

    Args:
        x: ``(..., 2 * d)`` with the halves ``x1, x2``, floating point.
        std_multiplier: the cutoff in standard deviations above the mean.
        approximate: as in :func:`gelu_and_mul`.

    Returns:
        ``(..., d)`` in the dtype of ``x``. Mean and (population) standard deviation are over the
        last dimension.

    Raises:
        ValueError: the last dimension is odd, or ``approximate`` is unknown.

    Source: Gemma 3n (its ``activation_sparsity``); Spark Transformer, arXiv:2506.06644.
    """
    _check_approximate(approximate, "gelu_and_mul_sparse")
    first, second = _halves(x, "gelu_and_mul_sparse")
    if first.numel() == 0:  # torch.std would warn
        return first * second
    mean = first.mean(dim=-1, keepdim=True)
    deviation = first.std(dim=-1, keepdim=True, correction=0)
    above = functional.relu(first - (mean + deviation * std_multiplier))
    return functional.gelu(above, approximate=approximate) * second


@register_op(native_traits={ROWWISE})
def fatrelu_and_mul(x: Tensor, threshold: float = 0.0) -> Tensor:
    """``(x1 if x1 > threshold else 0) * x2`` for the halves ``x1, x2`` of the last dimension.

    Args:
        x: ``(..., 2 * d)``, floating point.
        threshold: elements not above it become zero; NaN propagates.

    Returns:
        ``(..., d)`` in the dtype of ``x``.

    Raises:
        ValueError: the last dimension is odd.

    Source: ProSparse, Song et al., arXiv:2402.13516.
    """
    first, second = _halves(x, "fatrelu_and_mul")
    return functional.threshold(first, threshold, 0.0) * second


@register_op(native_traits={ROWWISE})
def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """``(u + 1) * (g * sigmoid(alpha * g))`` for clamped pairs ``g, u`` of the last dimension.

    Args:
        x: ``(..., 2 * d)``, floating point: ``g`` at even positions, ``u`` at odd ones.
        alpha: factor in the sigmoid.
        limit: ``g`` is clamped to at most ``limit``, ``u`` to ``[-limit, limit]``.

    Returns:
        ``(..., d)`` in the dtype of ``x``.

    Raises:
        ValueError: the last dimension is odd.

    Source: the experts of gpt-oss, arXiv:2508.10925.
    """
    _check_even(x, "swigluoai_and_mul")
    gate = x[..., 0::2].clamp(max=limit)
    up = x[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _check_approximate(approximate: str, name: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"{name}: approximate must be 'none' or 'tanh', not {approximate!r}.")


def _check_even(x: Tensor, name: str) -> None:
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(
            f"{name}: the last dimension of x must be even; x has shape {tuple(x.shape)}."
        )


def _halves(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    _check_even(x, name)
    width = x.shape[-1] // 2
    return x[..., :width], x[..., width:]


def _inputs(*rest: Any, scale: float = 1.0) -> Callable[..., tuple[Any, ...]]:
    """Return an input generator that makes random halves times *scale*, followed by *rest*."""
    return inputs_from_rows(lambda x: (scale * torch.cat((x, torch.randn_like(x)), -1), *rest))


for _op in (silu_and_mul, mul_and_silu, fatrelu_and_mul):
    _op.register_input_generator(_inputs())
gelu_and_mul.register_input_generator(_inputs("none"))
gelu_and_mul_sparse.register_input_generator(_inputs(0.5, "tanh"))
swigluoai_and_mul.register_input_generator(_inputs(1.702, 7.0, scale=4.0))

for _op in (silu_and_mul, mul_and_silu, gelu_and_mul):
    # The activation may round either way, and the product rounds once more: 2 ulp.
    _op.override_tolerance(torch.float16, atol=1e-3, rtol=2e-3)

# torch's 1 + erf and 1 + tanh cancel for small results, and the product scales the error.
gelu_and_mul.override_tolerance(torch.float32, atol=5e-5, rtol=1.3e-6)
# The sums of the mean and the deviation depend on the order.
gelu_and_mul_sparse.override_tolerance(torch.float32, atol=1e-4, rtol=1e-5)

# Three roundings in a row.
swigluoai_and_mul.override_tolerance(torch.bfloat16, atol=1e-3, rtol=2.5e-2)
swigluoai_and_mul.override_tolerance(torch.float16, atol=1e-3, rtol=4e-3)

# The cutoff has the dtype of x: an error of 1 ulp shifts every element of the row above it.
gelu_and_mul_sparse.override_tolerance(torch.bfloat16, atol=5e-2, rtol=3e-2)
gelu_and_mul_sparse.override_tolerance(torch.float16, atol=6e-3, rtol=4e-3)


def _split(x: Tensor) -> tuple[Tensor, ...]:
    """Return the halves as ``torch.chunk`` makes them, by one operator in place of two slices."""
    return x.chunk(2, dim=-1)


@silu_and_mul.register_spelling(marker="exp", elements=ROWWISE_ELEMENTS)
def _silu_of_chunk(x: Tensor) -> Tensor:
    first, second = _split(x)
    return functional.silu(first) * second


@mul_and_silu.register_spelling(marker="exp", elements=ROWWISE_ELEMENTS)
def _silu_of_last_chunk(x: Tensor) -> Tensor:
    first, second = _split(x)
    return first * functional.silu(second)


@gelu_and_mul.register_spelling(marker="erf", elements=ROWWISE_ELEMENTS)
def _gelu_of_chunk(x: Tensor, approximate: str = "none") -> Tensor:
    first, second = _split(x)
    return functional.gelu(first, approximate=approximate) * second


for _op in (silu_and_mul, mul_and_silu):
    _op.register_spelling(marker="exp", elements=ROWWISE_ELEMENTS)(_op.native)
gelu_and_mul.register_spelling(marker="erf", elements=ROWWISE_ELEMENTS)(gelu_and_mul.native)
for _spelling in (_gelu_of_chunk, gelu_and_mul.native):
    gelu_and_mul.register_spelling(
        marker="tanh", elements=ROWWISE_ELEMENTS, inputs=_inputs("tanh")
    )(_spelling)


# Elementwise activations.
#
# Every step is computed in the dtype of ``x``, as in the models that were trained with them.


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
@inputs_from_rows
def _pointwise_inputs(x: Tensor) -> tuple[Tensor]:
    return (x,)


@xielu.register_input_generator
@inputs_from_rows
def _xielu_inputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, float, float]:
    alpha_p, alpha_n = torch.tensor([[0.2], [-1.1]], device=x.device).to(x.dtype)
    return x, alpha_p, alpha_n, 0.5, -1e-6


for _pointwise_op in (gelu_new, gelu_fast, xielu):
    # tanh and expm1 may round either way, and near -1 the following sum cancels all other digits.
    _pointwise_op.override_tolerance(torch.bfloat16, atol=3e-2, rtol=1.6e-2)
    _pointwise_op.override_tolerance(torch.float16, atol=4e-3, rtol=2e-3)

quick_gelu.override_tolerance(torch.float16, atol=1e-3, rtol=2e-3)  # the same, times x
