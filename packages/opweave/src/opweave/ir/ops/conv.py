"""Convolutions, and the convolution over separate patches as a matrix product."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.ops.linear import linear
from opweave.ir.registry import register_op

_CONV: dict[int, Callable[..., Tensor]] = {
    1: functional.conv1d,
    2: functional.conv2d,
    3: functional.conv3d,
}
_MODES = {
    "zeros": "constant",
    "reflect": "reflect",
    "replicate": "replicate",
    "circular": "circular",
}


@register_op
def conv_nd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """Cross-correlation in 1, 2 or 3 dimensions, as in ``torch.nn.Conv1d`` to ``Conv3d``.

    Args:
        x: ``(batch, in_channels, *size)`` or ``(in_channels, *size)``.
        weight: ``(out_channels, in_channels / groups, *kernel)``, the dtype of ``x``.
        bias: ``(out_channels,)`` or None.
        stride, dilation: one number per dimension of the kernel.
        padding: two numbers per dimension, in order: before and after.
        groups: number of channel groups.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.

    Returns:
        ``(batch, out_channels, *positions)`` in the dtype of ``x``; no batch if ``x`` has none.

    Raises:
        ValueError: the kernel does not have 1 to 3 dimensions, an option has the wrong number of
            values, or *padding_mode* is unknown.
    """
    dims = weight.ndim - 2
    _check_conv(dims, stride, padding, dilation, padding_mode)
    before, after = list(padding[::2]), list(padding[1::2])
    if padding_mode != "zeros" or before != after:
        pairs = zip(before[::-1], after[::-1], strict=True)  # torch pads the last dimension first
        x = functional.pad(x, [n for pair in pairs for n in pair], mode=_MODES[padding_mode])
        before = [0] * dims
    return _CONV[dims](x, weight, bias, list(stride), before, list(dilation), groups)


def _check_conv(
    dims: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    padding_mode: str,
) -> None:
    if dims not in _CONV:
        raise ValueError(
            f"conv_nd: weight must have 3 to 5 dimensions (1 to 3 of the kernel); found {dims + 2}."
        )
    if (len(stride), len(padding), len(dilation)) != (dims, 2 * dims, dims):
        raise ValueError(
            f"conv_nd: a kernel of {dims} dimensions needs {dims} values of stride and dilation, "
            f"and {2 * dims} of padding; found stride={list(stride)}, dilation={list(dilation)}, "
            f"padding={list(padding)}."
        )
    if padding_mode not in _MODES:
        raise ValueError(
            f"conv_nd: padding_mode must be one of {', '.join(_MODES)}; found {padding_mode!r}."
        )


@register_op(composite=True)
def patch_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolution with a stride equal to the kernel size, as a matrix product over patches.

    A composite of ``linear``. Elements after the last whole patch are ignored.

    Args:
        x: ``(batch, in_channels, *size)``.
        weight: ``(out_channels, in_channels, *kernel)``, the dtype of ``x``.
        bias: ``(out_channels,)`` or None.

    Returns:
        ``(batch, out_channels, *patches)`` in the dtype of ``x``; channels are innermost in memory.

    Raises:
        ValueError: ``x`` and ``weight`` differ in the number of dimensions or channels, or ``x`` is
            smaller than a patch.
    """
    check_patches(x, weight)
    output: Tensor = linear(patches(x, weight.shape[2:]), weight.flatten(1), bias)
    return output.movedim(-1, 1)


def check_patches(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError if ``patch_matmul`` does not support these arguments."""
    kernel = weight.shape[2:]
    if x.ndim != weight.ndim or x.shape[1] != weight.shape[1]:
        raise ValueError(
            "patch_matmul: x and weight must have the same number of dimensions and input "
            f"channels; x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}."
        )
    if any(size < k for size, k in zip(x.shape[2:], kernel, strict=True)):
        raise ValueError(
            f"patch_matmul: x, {tuple(x.shape)}, is smaller than a patch, {tuple(kernel)}."
        )


def patches(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """Return the patches of *x*, ``(batch, *positions, in_channels * elements)``."""
    count = len(kernel)
    for i, k in enumerate(kernel):
        dim = 2 + 2 * i
        whole = x.shape[dim] // k
        x = torch.unflatten(x.narrow(dim, 0, whole * k), dim, (whole, k))
    places = range(2, 2 + 2 * count, 2)
    x = x.permute(0, *places, 1, *(place + 1 for place in places))
    return x.flatten(1 + count)


@conv_nd.register_input_generator
def _conv_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int], list[int], int]:
    x = torch.randn(num_tokens, 4, 9, 7, device=device)
    weight = torch.randn(hidden_size, 2, 3, 2, device=device) / 12**0.5
    bias = torch.randn(hidden_size, device=device)
    return x.to(dtype), weight.to(dtype), bias.to(dtype), [2, 1], [1, 1, 0, 1], [1, 2], 2


@patch_matmul.register_input_generator
def _patch_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(num_tokens, 3, 9, 8, device=device)
    weight = torch.randn(hidden_size, 3, 4, 4, device=device) / 48**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(hidden_size, device=device).to(dtype)


# Sums in a different order: the error grows with the number of terms.
for _op in (conv_nd, patch_matmul):
    _op.override_tolerance(torch.float32, atol=1e-4, rtol=1e-5)
    _op.override_tolerance(torch.bfloat16, atol=1e-2, rtol=1.6e-2)
    _op.override_tolerance(torch.float16, atol=1e-2, rtol=2e-3)
