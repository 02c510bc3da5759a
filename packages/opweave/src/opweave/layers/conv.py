"""Convolutions of images and videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from opweave import ir
from opweave.ir.ops.conv import PADDING_MODES
from opweave.layers.custom_op import CustomOp
from opweave.layers.registry import LayerArgumentError

Sizes = int | Sequence[int]


class ConvLayer(CustomOp):
    """A convolution, with the arguments, parameters and results of ``torch.nn.Conv2d`` or 3d.

    Calls ``ir.ops.conv_nd``. If the stride equals the kernel size and there is no padding, dilation
    or grouping, as in patch embeddings, it calls ``ir.ops.patch_matmul``, whose result has the
    channels innermost in memory. Parameters are uninitialized and do not require gradients.

    Args:
        in_channels, out_channels: the channels of input and output.
        kernel_size, stride, dilation: a number, or one for each dimension.
        padding: a number, one for each dimension, ``"valid"`` for no padding, or ``"same"`` for a
            result of the input's size.
        groups: the number of groups of channels, each with its own kernels.
        bias: whether to add a bias.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        params_dtype: default: ``torch.get_default_dtype()``.

    Raises:
        LayerArgumentError: an argument is invalid, or *padding* is ``"same"`` with a stride.
    """

    num_dims: ClassVar[int]

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Sizes, stride: Sizes = 1,
        padding: Sizes | str = 0, dilation: Sizes = 1, groups: int = 1, bias: bool = True,
        padding_mode: str = "zeros", *, params_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = self._sizes("kernel_size", kernel_size, 1)
        self.stride = self._sizes("stride", stride, 1)
        self.dilation = self._sizes("dilation", dilation, 1)
        self.padding = padding if isinstance(padding, str) else self._sizes("padding", padding, 0)
        self.padding_mode = padding_mode
        self._check()
        self.pads = self._pads()
        self.is_patches = (
            self.kernel_size == self.stride
            and set(self.dilation) == {1}
            and not any(self.pads)
            and groups == 1
        )
        shape = out_channels, in_channels // groups, *self.kernel_size
        self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        if bias:
            values = torch.empty(out_channels, dtype=params_dtype)
            self.bias: nn.Parameter | None = nn.Parameter(values, requires_grad=False)
        else:
            self.register_parameter("bias", None)

    def _sizes(self, what: str, value: Sizes, least: int) -> tuple[int, ...]:
        sizes = (value,) * self.num_dims if isinstance(value, int) else tuple(value)
        if len(sizes) != self.num_dims or min(sizes) < least:
            raise LayerArgumentError(
                f"{what}={value!r} must be a number of at least {least}, or {self.num_dims} of "
                f"them, for {type(self).__name__}."
            )
        return sizes

    def _check(self) -> None:
        if isinstance(self.padding, str) and self.padding not in ("same", "valid"):
            raise LayerArgumentError(
                f"padding={self.padding!r} must be 'same', 'valid', or numbers."
            )
        if self.padding == "same" and set(self.stride) != {1}:
            raise LayerArgumentError(
                f"padding='same' keeps the size, which stride={self.stride} does not; give the "
                "padding in numbers."
            )
        if self.padding_mode not in PADDING_MODES:
            raise LayerArgumentError(
                f"padding_mode={self.padding_mode!r} is not one of {', '.join(PADDING_MODES)}."
            )
        if self.groups < 1 or self.in_channels % self.groups or self.out_channels % self.groups:
            raise LayerArgumentError(
                f"groups={self.groups} must divide in_channels={self.in_channels} and "
                f"out_channels={self.out_channels}."
            )

    def _pads(self) -> list[int]:
        """Return padding before and after, for each dimension."""
        if self.padding == "same":
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return [pad for total in totals for pad in (total // 2, total - total // 2)]
        if isinstance(self.padding, str):
            return [0] * (2 * self.num_dims)
        return [pad for pad in self.padding for _ in range(2)]

    def forward_native(self, x: Tensor) -> Tensor:
        """Convolve ``(batch, in_channels, *size)`` or ``(in_channels, *size)``.

        Returns:
            ``(batch, out_channels, *positions)``, without the batch dimension if *x* has none.
        """
        return self._run(x, ir.ops.patch_matmul.native, ir.ops.conv_nd.native)

    def forward_cuda(self, x: Tensor) -> Tensor:
        """Convolve with the platform's kernels."""
        return self._run(x, ir.ops.patch_matmul, ir.ops.conv_nd)

    forward_cpu = forward_xpu = forward_tpu = forward_oot = forward_cuda

    def _run(
        self, x: Tensor, patches: Callable[..., Tensor], conv: Callable[..., Tensor]
    ) -> Tensor:
        if self._sees_patches(x):
            return patches(x, self.weight, self.bias)
        options = (self.stride, self.pads, self.dilation, self.groups, self.padding_mode)
        return conv(x, self.weight, self.bias, *options)

    def _sees_patches(self, x: Tensor) -> bool:
        """Whether ``patch_matmul`` supports *x*; ``conv_nd`` raises for invalid shapes."""
        sizes = zip(x.shape[2:], self.kernel_size, strict=False)
        is_batch = x.ndim == self.weight.ndim and x.shape[1] == self.in_channels
        return self.is_patches and is_batch and all(size >= k for size, k in sizes)

    def extra_repr(self) -> str:
        """Return the arguments, for ``repr(model)``."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding!r}"
        )


@CustomOp.register("conv2d")
class Conv2dLayer(ConvLayer):
    """``torch.nn.Conv2d``: see :class:`ConvLayer`."""

    num_dims = 2


@CustomOp.register("conv3d")
class Conv3dLayer(ConvLayer):
    """``torch.nn.Conv3d``: see :class:`ConvLayer`."""

    num_dims = 3
