"""The linear method of 8-bit weights and activations: shapes, sharding, schemes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opweave.layers import (
    LayerArgumentError,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    ShardingError,
    TensorParallel,
    tensor_parallel,
)
from opweave.layers.linear_methods import ActivationScheme, W8A8Method

FP8 = torch.float8_e4m3fn
BLOCKS = W8A8Method(FP8, block_rows=128)


def unused(x: Tensor, dim: int = -1) -> Tensor:
    raise AssertionError("nothing is computed")


def shapes(layer: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in layer.named_parameters()}


def test_parameters() -> None:
    layer = MergedColumnParallelLinear(256, [192, 64], bias=False)
    layer.set_quant_method(W8A8Method(torch.int8))
    assert shapes(layer) == {"weight": (256, 256), "scale": (256,)}
    layer.set_quant_method(W8A8Method(FP8, ActivationScheme(is_static=True)))
    assert shapes(layer) == {"weight": (256, 256), "scale": (256,), "input_scale": (2,)}
    layer.set_quant_method(BLOCKS.for_outputs([192, 64]))
    assert shapes(layer) == {"weight": (256, 256), "scale": (4, 2)}
    with pytest.raises(LayerArgumentError, match=r"block_rows=128 does not divide .*\[192, 64\]"):
        layer.set_quant_method(BLOCKS)


def test_inputs_are_sharded_by_whole_groups() -> None:
    with tensor_parallel(TensorParallel(1, 2, unused, unused)):
        layer = RowParallelLinear(256, 128, bias=False)
        layer.set_quant_method(BLOCKS)
        assert shapes(layer) == {"weight": (128, 128), "scale": (1, 1)}
        layer = RowParallelLinear(384, 128, bias=False, prefix="down")
        with pytest.raises(ShardingError, match=r"down: .* 192 of 384 inputs are not a multiple"):
            layer.set_quant_method(BLOCKS)


@pytest.mark.parametrize("narrow", [torch.int8, FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_schemes(narrow: torch.dtype, dtype: torch.dtype) -> None:
    x, largest = torch.randn(5, 256).to(dtype), 127 if narrow is torch.int8 else 448
    for scheme in (ActivationScheme(), ActivationScheme(is_static=True)):
        layer = ReplicatedLinear(256, 64, bias=False, return_bias=False)
        layer.set_quant_method(W8A8Method(narrow, scheme))
        weight = torch.randn(64, 256)
        scale = weight.abs().amax(1) / largest
        codes = weight / scale[:, None]
        codes = codes.round() if narrow is torch.int8 else codes
        layer.weight.data.copy_(codes.to(narrow))
        layer.scale.data.copy_(scale)
        if scheme.is_static:
            layer.input_scale.data.fill_(float(x.abs().max()) / largest)
        found, wanted = layer(x), x.float() @ weight.T
        assert found.dtype is dtype
        assert (found - wanted).norm() < (0.02 if narrow is torch.int8 else 0.06) * wanted.norm()


def test_an_upper_bound_limits_the_scale() -> None:
    x = torch.tensor([[1.04, 100.0], [1.0, 2.0]])
    codes, scale = W8A8Method(FP8, ActivationScheme(upper_bound=4.48)).quantized(x)
    torch.testing.assert_close(scale, torch.tensor([[0.01], [2 / 448]]))
    assert codes[0].tolist() == [104.0, 448.0]
