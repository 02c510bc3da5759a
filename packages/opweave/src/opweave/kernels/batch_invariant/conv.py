"""Convolutions, one image at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.ir.ops.conv import check_patches, patches
from opweave.ir.traits import BATCH_INVARIANT, DIFFERENTIABLE
from opweave.kernels.batch_invariant.opaque import opaque

_TRAITS = {BATCH_INVARIANT, DIFFERENTIABLE}


@ops.conv_nd.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.conv_nd)
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
    options = stride, padding, dilation, groups, padding_mode
    return _each_image(
        lambda image: ops.conv_nd.native(image, weight, bias, *options), x, weight.ndim
    )


@ops.patch_matmul.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.patch_matmul)
def patch_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_patches(x, weight)

    def product(image: Tensor) -> Tensor:
        rows: Tensor = ops.linear.native(patches(image, weight.shape[2:]), weight.flatten(1), bias)
        return rows

    return _each_image(product, x, weight.ndim).movedim(-1, 1)


def _each_image(function: Callable[[Tensor], Tensor], x: Tensor, ndim: int) -> Tensor:
    if x.ndim != ndim or x.shape[0] == 0:
        return function(x)
    # Copy each image, because libraries choose the summation order by memory alignment.
    return torch.cat([function(image.clone()) for image in torch.split_with_sizes(x, [1] * len(x))])
