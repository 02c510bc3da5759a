"""Gated activations: the activated half of the last dimension multiplies the other half.

Every step is computed in the dtype of ``x``.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.registry import register_op
from opweave.ir.spelling import ROWWISE_ELEMENTS
from opweave.ir.traits import ROWWISE


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


def _random(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Tensor:
    return torch.randn(num_tokens, 2 * hidden_size, device=device).to(dtype)


def _inputs(*rest: Any, scale: float = 1.0) -> Callable[..., tuple[Any, ...]]:
    """Return a function that makes random halves times *scale*, followed by *rest*."""

    @functools.wraps(_random)
    def generate(*args: Any, **options: Any) -> tuple[Any, ...]:
        return scale * _random(*args, **options), *rest

    return generate


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


def _gelu_and_mul_by_tanh_inputs(**options: Any) -> tuple[Tensor, str]:
    return _random(**options), "tanh"


for _op in (silu_and_mul, mul_and_silu):
    _op.register_spelling(marker="exp", elements=ROWWISE_ELEMENTS)(_op.native)
gelu_and_mul.register_spelling(marker="erf", elements=ROWWISE_ELEMENTS)(gelu_and_mul.native)
for _spelling in (_gelu_of_chunk, gelu_and_mul.native):
    gelu_and_mul.register_spelling(
        marker="tanh", elements=ROWWISE_ELEMENTS, inputs=_gelu_and_mul_by_tanh_inputs
    )(_spelling)
